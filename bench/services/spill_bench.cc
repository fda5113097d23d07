// certkv-bench-spill: the tier on disk. Blocks written to and read from RocksDB against a plain
// file of the same bytes on the same disk in the same run (no fsync on either side; what is read
// was written a moment ago, so much of it comes from the system's cache), and how long a store of a
// million blocks takes to open.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "services/common/clock.h"
#include "services/kvstore/spill_rocksdb.h"
#include "services/kvstore/spill_tier.h"

ABSL_FLAG(int32_t, blocks, 4096, "blocks to write and read");
ABSL_FLAG(int64_t, block_bytes, 256 << 10, "bytes of a block");
ABSL_FLAG(int32_t, index_blocks, 1'000'000, "small blocks of the store that is opened");
ABSL_FLAG(std::string, directory, "", "where to write; default below the system's temporary one");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

namespace fs = std::filesystem;

BlockKey KeyAt(int64_t index) {
  BlockKey key;
  std::mt19937_64 random(static_cast<uint64_t>(index) + 1);
  for (auto& byte : key.bytes) byte = static_cast<uint8_t>(random());
  return key;
}

double Seconds(const std::function<void()>& call) {
  const int64_t start = RealClock()->MonotonicNs();
  call();
  return static_cast<double>(RealClock()->MonotonicNs() - start) / 1e9;
}

struct Rates {
  double write = 0;  // GB/s
  double read = 0;
};

Rates RocksDbRates(const fs::path& directory, std::vector<uint8_t>& payload) {
  const auto store = kvstore::OpenRocksDbSpill(directory);
  CERTKV_CHECK(store.ok(), "the store opens");
  const int32_t count = absl::GetFlag(FLAGS_blocks);
  const double gigabytes = static_cast<double>(payload.size()) * count / 1e9;
  std::vector<kvstore::SpilledBlock> blocks(static_cast<size_t>(count));
  const double write_s = Seconds([&] {
    for (int32_t i = 0; i < count; ++i) {
      blocks[i].key = KeyAt(i);
      payload[0] = static_cast<uint8_t>(i);
      CERTKV_CHECK((*store)->Put(SpecDigest{}, payload, &blocks[i]).ok(), "a block is written");
    }
  });
  const double read_s = Seconds([&] {
    for (int32_t i = 0; i < count; ++i) {
      CERTKV_CHECK((*store)->Get(SpecDigest{}, blocks[i], absl::MakeSpan(payload)).ok(),
                   "a block is read");
    }
  });
  return {gigabytes / write_s, gigabytes / read_s};
}

Rates FileRates(const fs::path& path, std::vector<uint8_t>& payload) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  CERTKV_CHECK(file >= 0, "the file opens");
  const int32_t count = absl::GetFlag(FLAGS_blocks);
  const auto size = static_cast<ssize_t>(payload.size());
  const double gigabytes = static_cast<double>(size) * count / 1e9;
  const double write_s = Seconds([&] {
    for (int32_t i = 0; i < count; ++i) {
      CERTKV_CHECK(pwrite(file, payload.data(), payload.size(), size * i) == size, "written");
    }
  });
  const double read_s = Seconds([&] {
    for (int32_t i = 0; i < count; ++i) {
      CERTKV_CHECK(pread(file, payload.data(), payload.size(), size * i) == size, "read");
    }
  });
  close(file);
  return {gigabytes / write_s, gigabytes / read_s};
}

nlohmann::json OpenTime(const fs::path& directory) {
  const int32_t count = absl::GetFlag(FLAGS_index_blocks);
  {
    const auto store = kvstore::OpenRocksDbSpill(directory);
    CERTKV_CHECK(store.ok(), "the store opens");
    const std::vector<uint8_t> payload(64);
    for (int32_t i = 0; i < count; ++i) {
      kvstore::SpilledBlock block;
      block.key = KeyAt(i);
      CERTKV_CHECK((*store)->Put(SpecDigest{}, payload, &block).ok(), "a block is written");
    }
  }
  double open_s = 0;
  double load_s = 0;
  open_s = Seconds([&] {
    auto store = kvstore::OpenRocksDbSpill(directory);
    CERTKV_CHECK(store.ok(), "the store opens");
    kvstore::SpillTier tier(*std::move(store), {.size_bytes = int64_t{1} << 50}, RealClock());
    load_s = Seconds([&] { CERTKV_CHECK(tier.Load().ok(), "the index is read"); });
    CERTKV_CHECK(tier.GetStats().blocks == count, "every block is found");
  });
  return {{"blocks", count},
          {"seconds_per_million", open_s * 1e6 / count},
          {"of_which_index_seconds_per_million", load_s * 1e6 / count}};
}

int Main() {
  std::string base = absl::GetFlag(FLAGS_directory);
  if (base.empty())
    base = fs::temp_directory_path() / absl::StrCat("certkv-bench-spill-", getpid());
  fs::create_directories(base);
  std::mt19937_64 random(1);
  std::vector<uint8_t> payload(static_cast<size_t>(absl::GetFlag(FLAGS_block_bytes)));
  for (auto& byte : payload) byte = static_cast<uint8_t>(random());
  const Rates file = FileRates(fs::path(base) / "file", payload);
  const Rates rocksdb = RocksDbRates(fs::path(base) / "blocks", payload);
  const nlohmann::json report = {
      {"run", DescribeRun()},
      {"blocks", absl::GetFlag(FLAGS_blocks)},
      {"block_bytes", absl::GetFlag(FLAGS_block_bytes)},
      {"write_gigabytes_per_second", {{"rocksdb", rocksdb.write}, {"file", file.write}}},
      {"read_gigabytes_per_second", {{"rocksdb", rocksdb.read}, {"file", file.read}}},
      {"open", OpenTime(fs::path(base) / "index")}};
  fs::remove_all(base);
  std::printf("%s\n", report.dump(2).c_str());
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
