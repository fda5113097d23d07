// What one store has of which prefix, as its events and lists tell.
#ifndef CERTKV_CLIENTS_CPP_PREFIX_INDEX_H_
#define CERTKV_CLIENTS_CPP_PREFIX_INDEX_H_

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "certkv/kvstore/v1/kvstore.pb.h"
#include "kernels/core/ids.h"

namespace certkv::client {

// How many leading blocks of a chain a store has; each number is at least the one before it.
struct PrefixCounts {
  int32_t device_blocks = 0;  // quantized, ready to read
  int32_t memory_blocks = 0;  // in memory at all
  int32_t stored_blocks = 0;  // in memory or on disk, as far as events have told

  bool operator==(const PrefixCounts&) const = default;
};

// A list takes time, and events come meanwhile: a block that an event spoke of since BeginList() is
// as the event says, whatever the list still says.
// Threads: not safe.
class PrefixIndex {
 public:
  // Forgets everything: a list comes. Call it once events come in, so that none is missed.
  void BeginList();
  // Blocks of the list; a message whose key is no key is passed over.
  void AddListed(const certkv::kvstore::v1::Block& block);
  void EndList();
  // Is everything known that was there when the last list began?
  bool is_complete() const { return is_complete_; }

  void Apply(const certkv::kvstore::v1::BlockEvent& event);

  PrefixCounts Count(absl::Span<const BlockKey> chain) const;
  size_t size() const { return places_.size(); }

 private:
  enum class Place : uint8_t { kDisk, kMemory, kDevice };

  absl::flat_hash_map<BlockKey, Place> places_;
  absl::flat_hash_set<BlockKey> told_;  // by events since BeginList(), while the list comes
  bool is_complete_ = false;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_PREFIX_INDEX_H_
