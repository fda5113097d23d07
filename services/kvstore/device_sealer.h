// DeviceSealer: writes blocks whose originals are in a GPU's memory, with the GPU's kernels.
#ifndef CERTKV_SERVICES_KVSTORE_DEVICE_SEALER_H_
#define CERTKV_SERVICES_KVSTORE_DEVICE_SEALER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/slab_layout.h"
#include "services/kvstore/block_writer.h"
#include "services/kvstore/exported_memory.h"

namespace certkv::kvstore {

// A batch of blocks goes this way: from the worker's staging memory on the GPU to memory there that
// no other process has; from that to the host, where its numbers are checked and put into backing
// slots; sealed there by the kernel, the records brought to the host, checksums written and each
// tile compared with them; then, on the GPU, into the slab's copy.
//
// Invariants:
//  1. Record, original and checksum are of the same bytes: everything after the first copy reads
//     what that copy wrote, in memory that is this process's alone.
//  2. The kernel sees originals only that were checked.
//  3. A block is in the copy, or the copy is withdrawn, when it was written (DeviceCopy).
//
// Threads: all calls are safe concurrently; batches of one cache follow each other.
class DeviceSealer {
 public:
  // Originals in private memory at a time, at least those of one block; as much again, and their
  // records, are pinned in host memory.
  static constexpr int64_t kBatchBytes = int64_t{32} << 20;

  // Takes the memory. `spec` outlives the sealer. Errors: as CheckSealsOnDevice; those of
  // DeviceRuntime.
  static absl::StatusOr<std::unique_ptr<DeviceSealer>> Create(const DevicePlace& place,
                                                              const CacheSpec& spec);
  ~DeviceSealer();

  // What became of the blocks that came from `staging`.
  struct Outcome {
    int32_t sealed_count = 0;  // on the device
    int32_t fallen_count = 0;  // by the host, from the originals that the device has brought
    absl::Status why;          // of the first that fell
  };
  // WriteBlocks for a cache that has a copy, with blocks of a staging slot taken from `staging`'s
  // memory on the device, which it has. What the device fails to do after it has brought a block's
  // originals, the host does.
  // Errors: as WriteBlocks; Internal [DEVICE_FAILED], originals could not be brought.
  absl::Status Write(const Cache& cache, const StagingArea& staging, absl::Span<BlockWrite> blocks,
                     ComputePool* pool, Outcome* outcome) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Pinned host memory and device memory of the same size, at the same offsets.
  struct Mirror {
    uint8_t* device = nullptr;
    uint8_t* host = nullptr;
    bool is_pinned = false;
  };
  // What a batch is laid out like in its mirrors.
  struct Batch {
    const Cache& cache;
    absl::Span<BlockWrite> blocks;
    SlabLayout originals;
    SlabLayout records;
    ComputePool* pool;
  };

  DeviceSealer(const DevicePlace& place, const CacheSpec& spec);
  absl::Status Open() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status MakeMirror(int64_t size_bytes, Mirror* mirror);
  void FreeMirror(const Mirror& mirror);

  // The steps above, each waited for. The first is the one after which the host has the originals.
  absl::Status BringOriginals(const StagingArea& staging, const Batch& batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status KeepOriginals(const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Seal(const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status KeepRecords(const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Adopt(const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const DevicePlace place_;
  const CacheSpec& spec_;
  const int32_t batch_blocks_;
  absl::Mutex mutex_;
  CUstream_st* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Mirror originals_ ABSL_GUARDED_BY(mutex_);
  Mirror records_ ABSL_GUARDED_BY(mutex_);
  const uint8_t* headers_ ABSL_GUARDED_BY(mutex_) = nullptr;  // records_.host as the device sees it
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_DEVICE_SEALER_H_
