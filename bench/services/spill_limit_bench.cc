// certkv-bench-spill-limit: what bounds the rate at which blocks are written to disk. The same
// blocks by one thread into a plain file, into RocksDB with the settings of the disk tier, with
// larger buffers, and without the write-ahead log (which the disk tier never does), in turns.
#include <fcntl.h>
#include <rocksdb/db.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "services/common/clock.h"

ABSL_FLAG(int32_t, blocks, 2048, "blocks to write");
ABSL_FLAG(int64_t, block_bytes, 256 << 10, "bytes of a block");
ABSL_FLAG(int32_t, rounds, 2, "rounds of all variants");
ABSL_FLAG(std::string, directory, "", "where to write; default below the system's temporary one");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

namespace fs = std::filesystem;

struct Variant {
  const char* name;
  size_t buffer_bytes;
  int buffer_count;
  bool with_log;
};
constexpr Variant kVariants[] = {{"as_configured", size_t{32} << 20, 2, true},
                                 {"larger_buffers", size_t{64} << 20, 4, true},
                                 {"without_log", size_t{32} << 20, 2, false},
                                 {"larger_buffers_without_log", size_t{64} << 20, 4, false}};

double SecondsSince(int64_t start_ns) {
  return static_cast<double>(RealClock()->MonotonicNs() - start_ns) * 1e-9;
}

double PlainFileSeconds(const fs::path& path, std::vector<char>& payload) {
  const int fd = open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  CERTKV_CHECK(fd >= 0, "the file opens");
  const int64_t start_ns = RealClock()->MonotonicNs();
  for (int32_t i = 0; i < absl::GetFlag(FLAGS_blocks); ++i) {
    ++payload[static_cast<size_t>(i) % payload.size()];
    const auto size = static_cast<ssize_t>(payload.size());
    CERTKV_CHECK(write(fd, payload.data(), payload.size()) == size, "the file is written");
  }
  close(fd);
  const double seconds = SecondsSince(start_ns);
  fs::remove(path);
  return seconds;
}

// Until all is in blob files.
double RocksDbSeconds(const fs::path& directory, const Variant& variant,
                      std::vector<char>& payload) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.max_background_jobs = 2;
  options.max_total_wal_size = uint64_t{128} << 20;
  options.bytes_per_sync = uint64_t{1} << 20;
  options.enable_blob_files = true;
  options.min_blob_size = 4096;
  options.enable_blob_garbage_collection = true;
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = variant.buffer_bytes;
  options.max_write_buffer_number = variant.buffer_count;
  rocksdb::DB* raw = nullptr;
  CERTKV_CHECK(rocksdb::DB::Open(options, directory, &raw).ok(), "the database opens");
  std::unique_ptr<rocksdb::DB> db(raw);
  rocksdb::WriteOptions write;
  write.disableWAL = !variant.with_log;
  std::mt19937_64 random(1);
  const int64_t start_ns = RealClock()->MonotonicNs();
  for (int32_t i = 0; i < absl::GetFlag(FLAGS_blocks); ++i) {
    ++payload[static_cast<size_t>(i) % payload.size()];
    const std::string key = std::to_string(random());
    const rocksdb::Slice value(payload.data(), payload.size());
    CERTKV_CHECK(db->Put(write, key, value).ok(), "a block is written");
  }
  CERTKV_CHECK(db->Flush(rocksdb::FlushOptions()).ok(), "the rest is written");
  const double seconds = SecondsSince(start_ns);
  db.reset();
  fs::remove_all(directory);
  return seconds;
}

int Run() {
  fs::path base = absl::GetFlag(FLAGS_directory);
  if (base.empty()) base = fs::temp_directory_path();
  base /= "certkv-bench-spill-limit-" + std::to_string(getpid());
  fs::create_directories(base);
  std::vector<char> payload(static_cast<size_t>(absl::GetFlag(FLAGS_block_bytes)));
  std::mt19937_64 random(1);
  for (char& byte : payload) byte = static_cast<char>(random());
  const double gigabytes = static_cast<double>(payload.size()) * absl::GetFlag(FLAGS_blocks) * 1e-9;
  std::vector<double> plain;
  std::vector<std::vector<double>> rates(std::size(kVariants));
  for (int32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    plain.push_back(gigabytes / PlainFileSeconds(base / "plain", payload));
    for (size_t i = 0; i < std::size(kVariants); ++i) {
      rates[i].push_back(gigabytes / RocksDbSeconds(base / "db", kVariants[i], payload));
    }
  }
  fs::remove_all(base);
  nlohmann::json report = {{"run", DescribeRun()},
                           {"gigabytes", gigabytes},
                           {"plain_file_gigabytes_per_second", Median(plain)}};
  std::printf("%-28s %.3f GB/s\n", "plain file", Median(plain));
  for (size_t i = 0; i < std::size(kVariants); ++i) {
    report["rocksdb_gigabytes_per_second"][kVariants[i].name] = Median(rates[i]);
    std::printf("%-28s %.3f GB/s\n", kVariants[i].name, Median(rates[i]));
  }
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Run();
}
