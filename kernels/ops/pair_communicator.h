// Movement of bytes between the GPUs of two processes, by a library that both have (NCCL). Nothing
// here needs it: kernels/nccl opens it where it is installed.
#ifndef CERTKV_KERNELS_OPS_PAIR_COMMUNICATOR_H_
#define CERTKV_KERNELS_OPS_PAIR_COMMUNICATOR_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct CUstream_st;

namespace certkv {

// What names a communicator before it is there. One rank makes it, the other one is told.
using CommunicatorId = std::array<uint8_t, 128>;

// One end of a communicator of two ranks. No method waits for the other end.
//
// What is sent arrives in order: the n-th Receive of one end takes what the n-th Send of the other
// sends, of the same size. Before each of them IsReady() has said true.
//
// Errors of all methods: Unavailable [NCCL_FAILED], what the library says; the communicator is of
// no more use then. Threads: one at a time.
class PairCommunicator {
 public:
  // Ends it as Abort() does.
  virtual ~PairCommunicator() = default;

  // Are both ends there, and has the library taken what was asked of it last? Whether bytes have
  // moved, the stream says (DeviceRuntime::IsDone). Errors also of what went wrong since.
  virtual absl::StatusOr<bool> IsReady() = 0;

  // Queue a movement on the stream, of memory of the GPU that was the thread's when it joined.
  virtual absl::Status Send(const void* memory, int64_t size_bytes, CUstream_st* stream) = 0;
  virtual absl::Status Receive(void* memory, int64_t size_bytes, CUstream_st* stream) = 0;

  // Ends what is on its way: streams pass it, and memory holds anything. Nothing else may be called
  // afterwards.
  virtual void Abort() = 0;
};

// Threads: all methods may be called concurrently.
class PairCommunicatorLibrary {
 public:
  virtual ~PairCommunicatorLibrary() = default;

  // As the library codes it: 22809 is 2.28.9. Both ends must have the same.
  virtual int32_t version() const = 0;
  virtual const std::string& path() const = 0;

  // Errors: Unavailable [NCCL_FAILED], such as no network interface that it could use.
  virtual absl::StatusOr<CommunicatorId> MakeId() = 0;
  // Begins to make the communicator with this thread's GPU (DeviceRuntime::Use); the other end does
  // the same with the other rank, 0 or 1, on another GPU. The library outlives the communicator.
  // Errors: as MakeId.
  virtual absl::StatusOr<std::unique_ptr<PairCommunicator>> Join(const CommunicatorId& id,
                                                                 int32_t rank) = 0;
};

// "2.28.9".
std::string CommunicatorVersionText(int32_t version);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_PAIR_COMMUNICATOR_H_
