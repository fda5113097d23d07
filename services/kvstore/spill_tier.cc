#include "services/kvstore/spill_tier.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kProgressBlocks = 65'536;

}  // namespace

SpillTier::SpillTier(std::unique_ptr<SpillStore> store, const SpillLimits& limits,
                     const Clock* clock, absl::Status why)
    : store_(std::move(store)), limits_(limits), clock_(clock) {
  absl::MutexLock lock(&mutex_);
  stats_.enabled = true;
  if (store_ == nullptr) stats_.error = std::string(why.message());
}

absl::Status SpillTier::Load(const std::function<void(int64_t)>& progress) {
  if (store_ == nullptr) return absl::OkStatus();
  std::vector<std::pair<SpecDigest, SpilledBlock>> found;
  const absl::Status status =
      store_->ForEach([&](const SpecDigest& spec, const SpilledBlock& block) {
        found.emplace_back(spec, block);
        if (static_cast<int64_t>(found.size()) % kProgressBlocks == 0) {
          progress(static_cast<int64_t>(found.size()));
        }
      });
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.second.write_time_ms < b.second.write_time_ms;
  });
  absl::MutexLock lock(&mutex_);
  for (const auto& [spec, block] : found) Add(spec, block);
  if (!status.ok()) stats_.error = std::string(status.message());
  return status;
}

bool SpillTier::Contains(const SpecDigest& spec, const BlockKey& key) const {
  return Find(spec, key).has_value();
}

std::optional<SpilledBlock> SpillTier::Find(const SpecDigest& spec, const BlockKey& key) const {
  absl::MutexLock lock(&mutex_);
  const auto blocks = specs_.find(spec);
  if (blocks == specs_.end()) return std::nullopt;
  const auto entry = blocks->second.find(key);
  if (entry == blocks->second.end()) return std::nullopt;
  return entry->second.block;
}

bool SpillTier::CanWrite() const {
  if (store_ == nullptr) return false;
  absl::MutexLock lock(&mutex_);
  return retry_time_ns_ <= clock_->MonotonicNs();
}

void SpillTier::Add(const SpecDigest& spec, const SpilledBlock& block) {
  Remove(spec, block.key);
  by_age_[++sequence_] = Aged{spec, block.key};
  specs_[spec][block.key] = Entry{block, sequence_};
  ++stats_.blocks;
  stats_.bytes += block.payload_bytes;
}

void SpillTier::Remove(const SpecDigest& spec, const BlockKey& key) {
  Blocks& blocks = specs_[spec];
  const auto entry = blocks.find(key);
  if (entry == blocks.end()) return;
  --stats_.blocks;
  stats_.bytes -= entry->second.block.payload_bytes;
  by_age_.erase(entry->second.sequence);
  blocks.erase(entry);
}

std::vector<SpillTier::Aged> SpillTier::TakeOldest(
    const std::function<bool(const SpilledBlock&)>& is_over) {
  std::vector<Aged> taken;
  while (!by_age_.empty()) {
    const Aged oldest = by_age_.begin()->second;
    if (!is_over(specs_[oldest.spec][oldest.key].block)) break;
    Remove(oldest.spec, oldest.key);
    ++stats_.blocks_expired;
    taken.push_back(oldest);
  }
  return taken;
}

void SpillTier::DeleteAged(const std::vector<Aged>& blocks) {
  absl::flat_hash_map<SpecDigest, std::vector<BlockKey>> by_spec;
  for (const Aged& block : blocks) by_spec[block.spec].push_back(block.key);
  // What can't be deleted now is out of this process's sight; the next one finds it again.
  for (const auto& [spec, keys] : by_spec) Delete(spec, keys);
}

void SpillTier::Delete(const SpecDigest& spec, absl::Span<const BlockKey> keys) {
  if (store_ == nullptr) return;
  for (const BlockKey& key : keys) {
    absl::MutexLock lock(&MutexOf(key));
    if (Contains(spec, key)) continue;  // it was written again meanwhile
    const absl::Status status = store_->Delete(spec, {key});
    if (!status.ok()) return NoteWrite(status);
  }
}

void SpillTier::NoteWrite(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  needs_recovery_ = !status.ok();
  if (status.ok()) {
    stats_.error.clear();
    return;
  }
  ++stats_.write_errors;
  stats_.error = std::string(status.message());
  retry_time_ns_ = clock_->MonotonicNs() + kTroubleNs;
}

void SpillTier::NoteDuration(int64_t start_ns) {
  const int64_t now_ns = clock_->MonotonicNs();
  if (now_ns - start_ns <= kSlowCallNs) return;
  absl::MutexLock lock(&mutex_);
  ++stats_.slow_calls;
  slow_until_ns_ = now_ns + kTroubleNs;
}

absl::Status SpillTier::Write(const SpecDigest& spec, SpilledBlock block,
                              absl::Span<const uint8_t> payload) {
  bool recover = false;
  std::vector<Aged> over;
  {
    absl::MutexLock lock(&mutex_);
    if (store_ == nullptr || retry_time_ns_ > clock_->MonotonicNs()) {
      return MakeError(absl::StatusCode::kUnavailable, "SPILL_FAILED", stats_.error);
    }
    recover = needs_recovery_;
    const auto size = static_cast<int64_t>(payload.size());
    over = TakeOldest([this, size](const SpilledBlock&) {
      mutex_.AssertHeld();
      return stats_.bytes + size > limits_.size_bytes;
    });
  }
  if (recover) {
    const absl::Status recovered = store_->Recover();
    if (!recovered.ok()) {
      NoteWrite(recovered);
      return recovered;
    }
  }
  DeleteAged(over);
  absl::MutexLock key_lock(&MutexOf(block.key));
  block.write_time_ms = clock_->NowMs();
  const int64_t start_ns = clock_->MonotonicNs();
  const absl::Status status = store_->Put(spec, payload, &block);
  NoteDuration(start_ns);
  NoteWrite(status);
  if (!status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  Add(spec, block);
  ++stats_.blocks_written;
  return status;
}

absl::Status SpillTier::Read(const SpecDigest& spec, const SpilledBlock& block,
                             absl::Span<uint8_t> payload) {
  if (store_ == nullptr) return MakeError(absl::StatusCode::kUnavailable, "SPILL_FAILED", "off");
  const int64_t start_ns = clock_->MonotonicNs();
  const absl::Status status = store_->Get(spec, block, payload);
  NoteDuration(start_ns);
  if (absl::IsDataLoss(status) && !ForgetDamaged(spec, block)) {
    return MakeError(absl::StatusCode::kNotFound, "BLOCK_NOT_FOUND",
                     absl::StrCat("block ", ToHex(block.key.view(), 8),
                                  " left the disk while it was read; look it up again"));
  }
  absl::MutexLock lock(&mutex_);
  if (status.ok()) {
    ++stats_.blocks_read;
  } else {
    stats_.error = std::string(status.message());
  }
  return status;
}

bool SpillTier::ForgetDamaged(const SpecDigest& spec, const SpilledBlock& block) {
  {
    absl::MutexLock lock(&mutex_);
    const Blocks& blocks = specs_[spec];
    const auto entry = blocks.find(block.key);
    if (entry == blocks.end() || entry->second.block.write_time_ms != block.write_time_ms ||
        entry->second.block.payload_checksum != block.payload_checksum ||
        entry->second.block.payload_bytes != block.payload_bytes) {
      return false;
    }
    Remove(spec, block.key);
    ++stats_.blocks_damaged;
  }
  Delete(spec, {block.key});
  return true;
}

std::vector<BlockKey> SpillTier::Forget(const SpecDigest& spec, absl::Span<const BlockKey> keys) {
  std::vector<BlockKey> forgotten;
  absl::MutexLock lock(&mutex_);
  const auto found = specs_.find(spec);
  if (found == specs_.end()) return forgotten;
  absl::flat_hash_map<BlockKey, std::vector<BlockKey>> children;
  for (const auto& [key, entry] : found->second) children[entry.block.parent].push_back(key);
  std::vector<BlockKey> open(keys.begin(), keys.end());
  absl::flat_hash_set<BlockKey> seen;
  while (!open.empty()) {
    const BlockKey key = open.back();
    open.pop_back();
    if (!seen.insert(key).second) continue;
    if (found->second.contains(key)) forgotten.push_back(key);
    const auto below = children.find(key);
    if (below == children.end()) continue;
    open.insert(open.end(), below->second.begin(), below->second.end());
  }
  for (const BlockKey& key : forgotten) Remove(spec, key);
  return forgotten;
}

void SpillTier::Expire() {
  if (store_ == nullptr || limits_.ttl_ms == 0) return;
  const int64_t oldest_ms = clock_->NowMs() - limits_.ttl_ms;
  std::vector<Aged> over;
  {
    absl::MutexLock lock(&mutex_);
    over = TakeOldest(
        [oldest_ms](const SpilledBlock& block) { return block.write_time_ms <= oldest_ms; });
  }
  DeleteAged(over);
}

SpillStats SpillTier::GetStats() const {
  absl::MutexLock lock(&mutex_);
  SpillStats stats = stats_;
  stats.degraded = !stats.error.empty() || clock_->MonotonicNs() < slow_until_ns_;
  return stats;
}

}  // namespace certkv::kvstore
