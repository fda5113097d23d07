// NcclChannel: one end of a communicator with what moves through it: two buffers on the GPU, and
// the pinned host memory that they are copied from and to.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_CHANNEL_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_CHANNEL_H_

#include <array>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/ops/pair_communicator.h"
#include "services/common/clock.h"
#include "services/kvstore/device_copy.h"
#include "services/kvstore/stop_signal.h"

namespace certkv::kvstore {

// Invariants:
//  1. One movement of at most movement_bytes is under way, and as much is copied meanwhile.
//  2. After an error the communicator was aborted, and nothing of the GPU writes to host memory any
//     more.
//  3. No call waits for the other end for longer than its deadline, or than the stop signal.
//
// Errors of all calls: those of PairCommunicator and DeviceRuntime; Unavailable [NCCL_TIMEOUT];
// [STORE_STOPPING], the signal was set. Then the channel is of no more use. Threads: one, but for
// the signal.
class NcclChannel {
 public:
  struct Dependencies {
    PairCommunicatorLibrary* library = nullptr;
    DevicePlace place;
    const Clock* clock = nullptr;
    StopSignal* stop = nullptr;
  };

  // Takes the memory. Times are of the monotonic clock.
  static absl::StatusOr<std::unique_ptr<NcclChannel>> Create(const Dependencies& with,
                                                             int64_t movement_bytes);
  ~NcclChannel();
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  // Both ends are there when it returns.
  absl::Status Join(const CommunicatorId& id, int32_t rank, int64_t deadline_ns);
  // Sends the bytes of the spans, which the other end receives into as many of its own. The spans
  // may be given up when it returns.
  absl::Status Send(absl::Span<const absl::Span<uint8_t>> spans, int64_t deadline_ns);
  // On an error the spans hold anything.
  absl::Status Receive(absl::Span<const absl::Span<uint8_t>> spans, int64_t deadline_ns);

 private:
  struct Buffer {
    void* device = nullptr;
    uint8_t* host = nullptr;
    bool is_pinned = false;
    int64_t used_bytes = 0;
  };

  NcclChannel(const Dependencies& with, int64_t movement_bytes);
  absl::Status Open();
  absl::Status SendAll(absl::Span<const absl::Span<uint8_t>> spans, int64_t deadline_ns);
  absl::Status ReceiveAll(absl::Span<const absl::Span<uint8_t>> spans, int64_t deadline_ns);
  // Until the communicator is ready, and, with a stream, what was queued there is done.
  absl::Status WaitUntil(int64_t deadline_ns, CUstream_st* stream, const char* what);
  // OK as it is; on an error ends everything.
  absl::Status OrAbort(absl::Status status);

  const Dependencies with_;
  const int64_t movement_bytes_;
  std::array<Buffer, 2> buffers_;
  CUstream_st* movements_ = nullptr;
  CUstream_st* copies_ = nullptr;
  std::unique_ptr<PairCommunicator> communicator_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_CHANNEL_H_
