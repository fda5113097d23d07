// DeviceCopy: the copy of a device slab in a GPU's memory, which kernels of other processes read.
#ifndef CERTKV_SERVICES_KVSTORE_DEVICE_COPY_H_
#define CERTKV_SERVICES_KVSTORE_DEVICE_COPY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/core/slab_layout.h"
#include "kernels/ops/device_runtime.h"
#include "services/kvstore/exported_memory.h"

namespace certkv::kvstore {

// The slab in host memory is what was sealed; the copy has the same bytes at the same offsets, and
// the slab's header page says how to reach it (kernels/core/device_export.h).
//
// Invariants:
//  1. While it is ready, the copy has the bytes of every slot that Has() says it has.
//  2. Has() of a slot is false from Forget() until Upload() or Adopt() of it has been waited for.
//  3. Once withdrawn it stays so, and the header page says it before Upload() or Adopt() returns: a
//     slot that could not be copied is sealed after that.
//
// Threads: all calls may be made concurrently, but for one slot by one at a time.
class DeviceCopy {
 public:
  // Bytes that are on their way at a time, in pinned memory, each chunk on a stream of its own.
  static constexpr int64_t kChunkBytes = int64_t{2} << 20;
  static constexpr int32_t kChunkCount = 4;

  // `host` is the store's writable map of the slab, its header written; it outlives the copy.
  // Nothing is in the copy yet. Errors: those of DeviceRuntime; then the header page is as before.
  static absl::StatusOr<std::unique_ptr<DeviceCopy>> Create(const DevicePlace& place,
                                                            const SlabLayout& layout,
                                                            uint8_t* host);
  // Withdraws it, then gives the memory back. Readers in other processes that have it open get
  // errors from their device.
  ~DeviceCopy();

  // Copies slots and waits until they are there. Where that fails the copy is withdrawn.
  void Upload(absl::Span<const int32_t> slots) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same for slots whose bytes, which are the host's, are in device or pinned memory already: a
  // piece for each run of them, `from` its address there, addresses and sizes multiples of 16.
  struct Piece {
    const uint8_t* from;
    int64_t offset;  // in the slab
    int64_t size_bytes;
  };
  void Adopt(absl::Span<const int32_t> slots, absl::Span<const Piece> pieces)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Reads a slot back: is it other than in host memory? False, and withdrawn, where that fails.
  bool Differs(int32_t slot) ABSL_LOCKS_EXCLUDED(mutex_);

  // Were the slot's bytes copied, or need they not be, because the copy is withdrawn?
  bool Has(int32_t slot) const;
  void Forget(int32_t slot);

  bool is_ready() const;
  // Why it was withdrawn; OK while it is ready. Waits for no upload.
  absl::Status error() const ABSL_LOCKS_EXCLUDED(error_mutex_);
  int64_t uploaded_bytes() const { return uploaded_bytes_.load(std::memory_order_relaxed); }

 private:
  struct Run {
    int64_t offset;
    int64_t size_bytes;
  };
  // Pinned memory that copies pass through.
  struct Chunk {
    uint8_t* bytes = nullptr;
    bool is_pinned = false;
    CUstream_st* stream = nullptr;
    int64_t used_bytes = 0;
  };

  DeviceCopy(const DevicePlace& place, const SlabLayout& layout, uint8_t* host);
  absl::Status Open();
  absl::Status MakeChunks() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Export() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The slots' records, neighbours together.
  std::vector<Run> RunsOf(absl::Span<const int32_t> slots) const;
  absl::Status UploadRuns(absl::Span<const Run> runs) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CopyPieces(absl::Span<const Piece> pieces) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells readers' streams that a batch, which was waited for, is there.
  absl::Status RecordBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<bool> RunsDiffer(absl::Span<const Run> runs) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Withdraw(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const DevicePlace place_;
  const SlabLayout layout_;
  uint8_t* const host_;
  std::unique_ptr<ExportedMemory> memory_;
  CUevent_st* event_ = nullptr;
  std::vector<std::atomic<uint8_t>> has_;  // per slot
  std::atomic<int64_t> uploaded_bytes_{0};
  absl::Mutex mutex_;  // before error_mutex_
  std::vector<Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Mutex error_mutex_;
  absl::Status error_ ABSL_GUARDED_BY(error_mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_DEVICE_COPY_H_
