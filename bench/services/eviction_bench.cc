// certkv-bench-eviction: hit rates of the two eviction policies on a generated workload of many
// tenants. Only the index runs, with the calls that the engine makes of it; no bytes are stored.
//
// A request is a tenant's prompt, perhaps one of its documents, then turns of its own; half of the
// requests go on with a recent conversation, and one in twenty is a long one that never comes back.
// Tenants, prompts and documents are drawn by Zipf's law. Hit rate: blocks found of blocks asked.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "bench/services/zipf.h"
#include "services/kvstore/block_index.h"

ABSL_FLAG(int32_t, requests, 60'000, "requests of the workload");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using kvstore::BlockId;
using kvstore::BlockIndex;
using kvstore::BlockRecord;
using kvstore::EvictionPolicy;

constexpr int kTenants = 16;
constexpr int kPrompts = 20;  // of each tenant
constexpr int kDocuments = 400;
constexpr int kConversations = 400;  // that may go on

using Chain = std::vector<BlockKey>;

// The same requests for every policy and size.
class Workload {
 public:
  Chain Next() {
    Chain chain;
    const uint64_t kind = random_() % 20;
    if (kind == 0) {
      Extend(&chain, random_(), 64 + static_cast<int>(random_() % 64));
      return chain;
    }
    if (kind < 11 && !conversations_.empty()) {
      // The more recent, the likelier.
      const size_t back =
          std::min(random_() % conversations_.size(), random_() % conversations_.size());
      const size_t place = conversations_.size() - 1 - back;
      chain = conversations_[place];
      conversations_.erase(conversations_.begin() + static_cast<int64_t>(place));
    } else {
      const auto tenant = static_cast<uint64_t>(tenants_.Draw(random_));
      const auto prompt = static_cast<uint64_t>(prompts_.Draw(random_));
      Extend(&chain, tenant << 32 | prompt << 16 | 1, 4 + static_cast<int>(prompt * 7 % 21));
      if (random_() % 5 < 3) {
        const auto document = static_cast<uint64_t>(documents_.Draw(random_));
        Extend(&chain, tenant << 32 | document << 8 | 2, 8 + static_cast<int>(document * 11 % 33));
      }
    }
    Extend(&chain, random_(), 1 + static_cast<int>(random_() % 4));
    conversations_.push_back(chain);
    if (conversations_.size() > kConversations) conversations_.erase(conversations_.begin());
    return chain;
  }

 private:
  // Blocks of some content after what is there.
  static void Extend(Chain* chain, uint64_t content, int blocks) {
    for (int i = 0; i < blocks; ++i) {
      uint64_t words[4] = {content, static_cast<uint64_t>(i), 0, 0x9e3779b97f4a7c15};
      if (!chain->empty()) std::memcpy(&words[2], chain->back().bytes.data(), 8);
      for (uint64_t& word : words) {  // mixed, so that the first word depends on all
        for (const uint64_t other : words)
          word = (word ^ other) * 0xff51afd7ed558ccd + (word >> 29);
      }
      BlockKey key;
      std::memcpy(key.bytes.data(), words, 32);
      chain->push_back(key);
    }
  }

  std::mt19937_64 random_{20260301};
  const Zipf tenants_{kTenants, 1.0};
  const Zipf prompts_{kPrompts, 1.1};
  const Zipf documents_{kDocuments, 0.9};
  std::vector<Chain> conversations_;
};

// Looks a chain up, seals what is missing, lets all go. Returns how many blocks were found.
int64_t Serve(BlockIndex& index, const Chain& chain, int32_t capacity) {
  std::vector<BlockId> held;
  for (const BlockKey& key : chain) {
    const BlockId id = index.Find(key);
    if (id == BlockId::kNone) break;
    index.Hold(id);
    index.NoteHit(id);
    held.push_back(id);
  }
  const auto found = static_cast<int64_t>(held.size());
  while (held.size() < chain.size()) {
    if (index.size() >= capacity) {
      const BlockId victim = index.order().NextEvictable([](auto) { return true; });
      if (victim == BlockId::kNone) break;
      index.Erase(victim);
    }
    BlockRecord record;
    record.key = chain[held.size()];
    record.backing = SlotRef{0, 2};
    held.push_back(index.Insert(record, held.empty() ? BlockId::kNone : held.back()));
  }
  for (auto it = held.rbegin(); it != held.rend(); ++it) index.Unhold(*it);
  return found;
}

double HitRate(EvictionPolicy policy, int32_t capacity) {
  BlockIndex index(capacity, policy);
  Workload workload;
  int64_t asked = 0;
  int64_t found = 0;
  for (int32_t i = 0; i < absl::GetFlag(FLAGS_requests); ++i) {
    const Chain chain = workload.Next();
    asked += static_cast<int64_t>(chain.size());
    found += Serve(index, chain, capacity);
  }
  return static_cast<double>(found) / static_cast<double>(asked);
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  using certkv::kvstore::EvictionPolicy;
  absl::ParseCommandLine(argc, argv);
  nlohmann::json sizes;
  std::printf("%10s %8s %8s\n", "blocks", "lru", "reuse");
  for (const int32_t capacity : {1000, 2000, 4000, 8000, 16000, 32000}) {
    const double lru = certkv::bench::HitRate(EvictionPolicy::kLru, capacity);
    const double reuse = certkv::bench::HitRate(EvictionPolicy::kReuse, capacity);
    std::printf("%10d %8.4f %8.4f\n", capacity, lru, reuse);
    sizes.push_back({{"blocks", capacity}, {"lru", lru}, {"reuse", reuse}});
  }
  const nlohmann::json report = {{"run", certkv::bench::DescribeRun()},
                                 {"requests", absl::GetFlag(FLAGS_requests)},
                                 {"hit_rates", sizes}};
  return certkv::bench::WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}
