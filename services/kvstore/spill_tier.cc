#include "services/kvstore/spill_tier.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kProgressBlocks = 1024;
constexpr size_t kBlocksPerLock = 4096;  // put into the index between two looks of others

}  // namespace

SpillTier::SpillTier(std::unique_ptr<SpillStore> store, const SpillLimits& limits,
                     const Clock* clock, absl::Status why)
    : store_(std::move(store)), limits_(limits), clock_(clock) {
  absl::MutexLock lock(&mutex_);
  stats_.enabled = true;
  stats_.opening = store_ != nullptr;
  if (store_ == nullptr) stats_.error = std::string(why.message());
}

absl::Status SpillTier::Load(const std::function<bool(const SpillProgress&)>& progress) {
  if (store_ == nullptr) return absl::OkStatus();
  std::vector<std::pair<SpecDigest, SpilledBlock>> found;
  SpillProgress so_far;
  bool is_cancelled = false;
  absl::Status status = store_->ForEach([&](const SpecDigest& spec, const SpilledBlock& block) {
    found.emplace_back(spec, block);
    so_far.bytes += block.payload_bytes;
    if (++so_far.blocks % kProgressBlocks != 0) return true;
    {
      absl::MutexLock lock(&mutex_);
      stats_.progress = so_far;
    }
    is_cancelled = progress != nullptr && !progress(so_far);
    return !is_cancelled;
  });
  if (is_cancelled) status = absl::CancelledError("the store stops while it opens");
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return a.second.write_time_ms < b.second.write_time_ms;
  });
  for (size_t begin = 0; begin < found.size() && !is_cancelled; begin += kBlocksPerLock) {
    absl::MutexLock lock(&mutex_);
    const size_t end = std::min(found.size(), begin + kBlocksPerLock);
    for (size_t i = begin; i < end; ++i) Add(found[i].first, found[i].second);
  }
  absl::MutexLock lock(&mutex_);
  stats_.opening = is_cancelled;  // what was not read must not be written over
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
  return !stats_.opening && retry_time_ns_ <= clock_->MonotonicNs();
}

SpillTier::Use& SpillTier::UseOf(absl::string_view tenant) {
  const auto found = uses_.find(tenant);
  if (found != uses_.end()) return found->second;
  const int64_t limit = FindTenantQuota(limits_.quotas, tenant).spill_limit_bytes;
  return uses_
      .emplace(std::string(tenant), Use{.limit_bytes = limit == 0 ? limits_.size_bytes : limit})
      .first->second;
}

void SpillTier::DropUnused(absl::string_view tenant) {
  const auto found = uses_.find(tenant);
  if (found == uses_.end() || !found->second.sequences.empty() || found->second.writing_bytes > 0) {
    return;
  }
  uses_.erase(found);
}

void SpillTier::Add(const SpecDigest& spec, const SpilledBlock& block) {
  Remove(spec, block.key);
  by_age_[++sequence_] = Aged{spec, block.key};
  Entry& entry = specs_[spec][block.key];
  entry = Entry{block, sequence_};
  entry.block.version = sequence_;
  Use& use = UseOf(block.tenant);
  use.sequences.insert(sequence_);
  use.bytes += block.payload_bytes;
  ++stats_.blocks;
  stats_.bytes += block.payload_bytes;
}

void SpillTier::Remove(const SpecDigest& spec, const BlockKey& key) {
  Blocks& blocks = specs_[spec];
  const auto entry = blocks.find(key);
  if (entry == blocks.end()) return;
  const SpilledBlock& block = entry->second.block;
  --stats_.blocks;
  stats_.bytes -= block.payload_bytes;
  Use& use = UseOf(block.tenant);
  use.bytes -= block.payload_bytes;
  use.sequences.erase(entry->second.sequence);
  DropUnused(block.tenant);
  by_age_.erase(entry->second.sequence);
  blocks.erase(entry);
}

void SpillTier::Take(int64_t sequence, int64_t* count, std::vector<Aged>* taken) {
  const Aged block = by_age_.at(sequence);
  Remove(block.spec, block.key);
  ++*count;
  taken->push_back(block);
}

bool SpillTier::MakeRoom(absl::string_view tenant, int64_t size, std::vector<Aged>* taken) {
  // The reference to a Use ends with its last block.
  const auto over = [this, tenant, size] {
    mutex_.AssertHeld();
    const Use& use = UseOf(tenant);
    return use.bytes + use.writing_bytes + size > use.limit_bytes;
  };
  while (over()) {
    const Use& use = UseOf(tenant);
    if (use.sequences.empty()) return false;
    Take(*use.sequences.begin(), &stats_.blocks_over_quota, taken);
  }
  while (stats_.bytes + writing_bytes_ + size > limits_.size_bytes) {
    if (by_age_.empty()) return false;
    Take(by_age_.begin()->first, &stats_.blocks_expired, taken);
  }
  return true;
}

bool SpillTier::Admits(absl::string_view tenant, int64_t bytes) const {
  const int64_t limit = FindTenantQuota(limits_.quotas, tenant).spill_limit_bytes;
  return bytes <= limits_.size_bytes && (limit == 0 || bytes <= limit);
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

absl::Status SpillTier::Reserve(const SpilledBlock& block, int64_t size, std::vector<Aged>* taken,
                                bool* recover) {
  absl::MutexLock lock(&mutex_);
  if (store_ == nullptr || stats_.opening || retry_time_ns_ > clock_->MonotonicNs()) {
    return MakeError(
        absl::StatusCode::kUnavailable, "SPILL_FAILED",
        stats_.opening ? "the index of blocks on disk is being read; write later" : stats_.error);
  }
  // Nobody goes for a block that does not fit all the same.
  if (!Admits(block.tenant, size) || !MakeRoom(block.tenant, size, taken)) {
    ++stats_.blocks_refused;
    const int64_t limit_bytes = UseOf(block.tenant).limit_bytes;
    DropUnused(block.tenant);
    return MakeError(
        absl::StatusCode::kResourceExhausted, "QUOTA_EXCEEDED",
        absl::StrCat("a block of ", size, " bytes has no room on disk: tenant \"", block.tenant,
                     "\" may have ", limit_bytes, " bytes, all together ", limits_.size_bytes,
                     "; raise spill_limit of kvstore_tenants or spill_size"));
  }
  UseOf(block.tenant).writing_bytes += size;
  writing_bytes_ += size;
  *recover = needs_recovery_;
  return absl::OkStatus();
}

void SpillTier::EndReservation(absl::string_view tenant, int64_t size) {
  UseOf(tenant).writing_bytes -= size;
  writing_bytes_ -= size;
}

absl::Status SpillTier::Put(const SpecDigest& spec, absl::Span<const uint8_t> payload,
                            SpilledBlock* block) {
  block->write_time_ms = clock_->NowMs();
  const int64_t start_ns = clock_->MonotonicNs();
  const absl::Status status = store_->Put(spec, payload, block);
  NoteDuration(start_ns);
  return status;
}

absl::Status SpillTier::Write(const SpecDigest& spec, SpilledBlock block,
                              absl::Span<const uint8_t> payload) {
  const auto size = static_cast<int64_t>(payload.size());
  bool recover = false;
  std::vector<Aged> over;
  const absl::Status reserved = Reserve(block, size, &over, &recover);
  if (!reserved.ok()) {
    DeleteAged(over);
    return reserved;
  }
  absl::Status status = recover ? store_->Recover() : absl::OkStatus();
  if (status.ok()) DeleteAged(over);
  absl::MutexLock key_lock(&MutexOf(block.key));
  if (status.ok()) status = Put(spec, payload, &block);
  NoteWrite(status);
  absl::MutexLock lock(&mutex_);
  EndReservation(block.tenant, size);
  if (status.ok()) {
    Add(spec, block);
    ++stats_.blocks_written;
  }
  DropUnused(block.tenant);
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
    if (entry == blocks.end() || entry->second.block.version != block.version) return false;
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
  if (store_ == nullptr) return;
  const int64_t oldest_ms =
      limits_.ttl_ms == 0 ? std::numeric_limits<int64_t>::min() : clock_->NowMs() - limits_.ttl_ms;
  std::vector<Aged> over;
  {
    absl::MutexLock lock(&mutex_);
    if (stats_.opening) return;
    while (!by_age_.empty()) {
      const Aged& oldest = by_age_.begin()->second;
      if (specs_[oldest.spec][oldest.key].block.write_time_ms > oldest_ms) break;
      Take(by_age_.begin()->first, &stats_.blocks_expired, &over);
    }
    std::vector<std::string> tenants;
    for (const auto& entry : uses_) tenants.push_back(entry.first);
    for (const std::string& tenant : tenants) {
      MakeRoom(tenant, 0, &over);
      DropUnused(tenant);
    }
  }
  DeleteAged(over);
}

SpillStats SpillTier::GetStats() const {
  absl::MutexLock lock(&mutex_);
  SpillStats stats = stats_;
  stats.degraded = !stats.error.empty() || clock_->MonotonicNs() < slow_until_ns_;
  for (const auto& [tenant, use] : uses_) {
    const int64_t limit = FindTenantQuota(limits_.quotas, tenant).spill_limit_bytes;
    stats.tenants.push_back({tenant, limit, static_cast<int64_t>(use.sequences.size()), use.bytes});
  }
  return stats;
}

}  // namespace certkv::kvstore
