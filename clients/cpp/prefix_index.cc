#include "clients/cpp/prefix_index.h"

#include <algorithm>

#include "absl/status/statusor.h"

namespace certkv::client {

namespace v1 = certkv::kvstore::v1;

void PrefixIndex::BeginList() {
  places_.clear();
  told_.clear();
  is_complete_ = false;
}

void PrefixIndex::AddListed(const v1::Block& block) {
  const absl::StatusOr<BlockKey> key = BlockKeyFromBytes(block.block_key());
  if (!key.ok() || block.lost() || told_.contains(*key)) return;
  places_[*key] = block.tier() == v1::BLOCK_TIER_DEVICE ? Place::kDevice : Place::kMemory;
}

void PrefixIndex::EndList() {
  told_.clear();
  is_complete_ = true;
}

void PrefixIndex::Apply(const v1::BlockEvent& event) {
  const absl::StatusOr<BlockKey> key = BlockKeyFromBytes(event.block_key());
  if (!key.ok()) return;
  switch (event.kind()) {
    case v1::BlockEvent::KIND_SEALED:
    case v1::BlockEvent::KIND_PROMOTED:
      places_[*key] = Place::kDevice;
      break;
    case v1::BlockEvent::KIND_DEMOTED:
    case v1::BlockEvent::KIND_RESTORED:
      places_[*key] = Place::kMemory;
      break;
    case v1::BlockEvent::KIND_SPILLED:
      places_[*key] = Place::kDisk;
      break;
    case v1::BlockEvent::KIND_EVICTED:
    case v1::BlockEvent::KIND_DROPPED:
    case v1::BlockEvent::KIND_LOST:
      places_.erase(*key);
      break;
    default:  // of a newer store: the block is there or not as it was
      return;
  }
  if (!is_complete_) told_.insert(*key);
}

PrefixCounts PrefixIndex::Count(absl::Span<const BlockKey> chain) const {
  PrefixCounts counts;
  auto least = Place::kDevice;  // of the blocks so far
  for (const BlockKey& key : chain) {
    const auto found = places_.find(key);
    if (found == places_.end()) break;
    least = std::min(least, found->second);
    ++counts.stored_blocks;
    counts.memory_blocks += least >= Place::kMemory ? 1 : 0;
    counts.device_blocks += least == Place::kDevice ? 1 : 0;
  }
  return counts;
}

}  // namespace certkv::client
