// SpillStore: blocks on disk, under their keys. The interface; spill_rocksdb.h has the real one.
#ifndef CERTKV_SERVICES_KVSTORE_SPILL_STORE_H_
#define CERTKV_SERVICES_KVSTORE_SPILL_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"

namespace certkv::kvstore {

// What is known of a block on disk without reading its bytes. Times are Unix epoch milliseconds.
struct SpilledBlock {
  BlockKey key;
  BlockKey parent;  // zeros: first of a chain
  uint64_t originals_digest = 0;
  int64_t seal_time_ms = 0;
  int64_t write_time_ms = 0;
  int64_t payload_bytes = 0;
  uint64_t payload_checksum = 0;  // XXH3-64; the store of the bytes fills and compares it
  int64_t version = 0;            // of the index, in this process: changes with each write
  std::string tenant;             // whose block it is; a valid name, or "" for nobody in particular
};

inline constexpr size_t kSpillSecretBytes = 32;

// A block is there as a whole or not at all, also after the process was killed in the middle of a
// call. Payloads are what block_payload.h makes.
// Threads: all calls are safe concurrently; they wait for the disk.
// Errors everywhere: DataLoss [SPILL_DAMAGED], what is on disk is not what was written; Unavailable
// [SPILL_FAILED], the disk is full or fails; with the system's text.
class SpillStore {
 public:
  virtual ~SpillStore() = default;

  // visit(...) for every block, in no order, until one returns false.
  virtual absl::Status ForEach(
      const std::function<bool(const SpecDigest&, const SpilledBlock&)>& visit) = 0;
  // Fills block->payload_checksum.
  virtual absl::Status Put(const SpecDigest& spec, absl::Span<const uint8_t> payload,
                           SpilledBlock* block) = 0;
  // `payload` has block.payload_bytes bytes, which are compared with their checksum.
  virtual absl::Status Get(const SpecDigest& spec, const SpilledBlock& block,
                           absl::Span<uint8_t> payload) = 0;
  virtual absl::Status Delete(const SpecDigest& spec, absl::Span<const BlockKey> keys) = 0;
  // Random bytes (kSpillSecretBytes) that were made with the store and stay with it; "": it keeps
  // none.
  virtual std::string Secret() const { return ""; }
  // Tries to leave a state in which writes fail.
  virtual absl::Status Recover() = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SPILL_STORE_H_
