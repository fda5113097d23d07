// What a block did wrong, in words.
#include "absl/strings/str_cat.h"
#include "kernels/cuda/on_cpu/worker.h"

namespace certkv::cuda_on_cpu {

std::string Worker::DescribeDeadlock() const {
  uint32_t at_barrier = 0;
  uint32_t in_warp = 0;
  std::string first;
  for (uint32_t n = 0; n < thread_count_; ++n) {
    const Thread& thread = *threads_[n];
    at_barrier += thread.state == State::kAtBarrier ? 1 : 0;
    if (thread.state != State::kInWarp) continue;
    if (in_warp++ == 0) {
      const uint32_t missing = thread.meeting->mask & ~thread.meeting->arrived;
      first = absl::StrCat("; thread ", n, " waits for lanes 0x", absl::Hex(missing));
    }
  }
  return absl::StrCat("deadlock: ", at_barrier, " threads wait at __syncthreads, ", in_warp,
                      " in warp functions, ", thread_count_ - live_, " have exited", first);
}

std::string Worker::Describe() const {
  const std::string thread = absl::StrCat("thread ", fault_thread_);
  const std::string lanes = absl::StrCat("0x", absl::Hex(fault_lanes_));
  switch (fault_) {
    case Fault::kNone:
      return "";
    case Fault::kMaskWithoutOwnLane:
      return absl::StrCat(thread, " calls a warp function with the mask ", lanes,
                          ", which doesn't have its lane");
    case Fault::kWaitForExitedLanes:
      return absl::StrCat(thread, " waits in a warp function for lanes ", lanes,
                          " that have exited");
    case Fault::kOtherFunction:
      return absl::StrCat(thread, " calls another warp function than the lanes ", lanes,
                          " that it would meet");
    case Fault::kExitWhileAwaited:
      return absl::StrCat(thread, " exits, and lanes ", lanes,
                          " of its warp wait for it in a warp function");
    case Fault::kTooMuchSharedMemory:
      return absl::StrCat("more than ", kStaticSharedBytes, " bytes or ", kSharedVariablesMax,
                          " variables of static shared memory");
    case Fault::kDeadlock:
      return DescribeDeadlock();
  }
  return "?";
}

}  // namespace certkv::cuda_on_cpu
