// certkv-bench-index: what the store's index costs. Lookups of a chain of 32 blocks per second with
// a thousand and with a million blocks, one thread, as the engine makes them: find, hold, note the
// hit, let go. And the bytes of memory that a block's metadata takes, by the system's count.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "services/common/clock.h"
#include "services/kvstore/block_index.h"

ABSL_FLAG(int32_t, lookups, 100'000, "lookups of each size");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using kvstore::BlockId;
using kvstore::BlockIndex;
using kvstore::BlockRecord;

constexpr int32_t kChainBlocks = 32;

BlockKey KeyAt(int64_t index) {
  BlockKey key;
  std::mt19937_64 random(static_cast<uint64_t>(index) + 1);
  for (int i = 0; i < 4; ++i) {
    const uint64_t word = random();
    std::memcpy(key.bytes.data() + 8 * i, &word, 8);
  }
  return key;
}

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

nlohmann::json Measure(int32_t blocks) {
  const int32_t chains = blocks / kChainBlocks;
  std::vector<BlockKey> keys(static_cast<size_t>(chains) * kChainBlocks);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = KeyAt(static_cast<int64_t>(i));
  const int64_t before = ResidentBytes();
  auto index = std::make_unique<BlockIndex>(blocks);
  for (size_t i = 0; i < keys.size(); ++i) {
    BlockRecord record;
    record.key = keys[i];
    record.backing = SlotRef{static_cast<int32_t>(i), 2};
    record.device = SlotRef{static_cast<int32_t>(i), 2};
    const bool is_first = i % kChainBlocks == 0;
    const BlockId id = index->Insert(record, is_first ? BlockId::kNone : index->Find(keys[i - 1]));
    index->Unhold(id);
  }
  const auto bytes = static_cast<double>(ResidentBytes() - before);
  const int32_t lookups = absl::GetFlag(FLAGS_lookups);
  std::mt19937_64 random(1);
  std::vector<BlockId> held(kChainBlocks);
  const int64_t start_ns = RealClock()->MonotonicNs();
  for (int32_t i = 0; i < lookups; ++i) {
    const auto chain = static_cast<size_t>(random() % static_cast<uint64_t>(chains));
    for (int32_t j = 0; j < kChainBlocks; ++j) {
      held[j] = index->Find(keys[chain * kChainBlocks + j]);
      CERTKV_CHECK(held[j] != BlockId::kNone, "every block is found");
    }
    for (const BlockId id : held) {
      index->Hold(id);
      index->NoteHit(id);
    }
    for (auto id = held.rbegin(); id != held.rend(); ++id) index->Unhold(*id);
  }
  const double seconds = static_cast<double>(RealClock()->MonotonicNs() - start_ns) * 1e-9;
  const double per_second = lookups / seconds;
  const double bytes_per_block = bytes / static_cast<double>(keys.size());
  std::printf(
      "%8d blocks: %10.0f lookups of %d blocks per second, %5.1f M blocks per second, "
      "%.0f bytes of metadata per block\n",
      blocks, per_second, kChainBlocks, per_second * kChainBlocks * 1e-6, bytes_per_block);
  return {{"blocks", keys.size()},
          {"blocks_per_lookup", kChainBlocks},
          {"lookups_per_second", per_second},
          {"blocks_per_second", per_second * kChainBlocks},
          // Of a small index the system's count of pages says nothing.
          {"metadata_bytes_per_block",
           blocks >= 100'000 ? nlohmann::json(bytes_per_block) : nlohmann::json()}};
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  nlohmann::json sizes;
  // The largest first: memory that it gives back would hide what the next one takes.
  for (const int32_t blocks : {1'000'000, 1024}) sizes.push_back(certkv::bench::Measure(blocks));
  std::reverse(sizes.begin(), sizes.end());
  const nlohmann::json report = {{"run", certkv::bench::DescribeRun()},
                                 {"record_bytes", sizeof(certkv::kvstore::BlockRecord)},
                                 {"sizes", sizes}};
  return certkv::bench::WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}
