// The fibers of an OS thread, and the block that they run. Internal to on_cpu.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_WORKER_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_WORKER_H_

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/on_cpu/block_runner.h"
#include "kernels/cuda/on_cpu/cuda_language.h"

namespace certkv::cuda_on_cpu {

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kDone };

// One meeting of lanes of a warp. Lanes of disjoint masks may be in several at once.
struct Meeting : WarpValues {
  uint32_t mask = 0;     // 0: free
  uint32_t leaving = 0;  // lanes that have not called LeaveWarp
  Collective collective = Collective::kSyncWarp;
  bool complete = false;
};

struct Warp {
  Meeting meetings[2 * kWarpLanes];
  uint32_t existing = 0;  // lanes that the block has
  uint32_t exited = 0;
};

// What orders a launch: its begin before everything, everything before its end. Two, because what
// one worker has done comes before the other's end, not before its begin.
struct LaunchTags {
  char begin;
  char end;
};

class Worker;

struct Thread {
  Worker* worker = nullptr;
  uint32_t number = 0;  // in the block
  State state = State::kDone;
  Meeting* meeting = nullptr;
  uint3 index{};
  uint8_t* stack = nullptr;
  boost::context::detail::fcontext_t fiber = nullptr;  // where the thread goes on
  boost::context::detail::fcontext_t scheduler = nullptr;
  void* fake_stack = nullptr;
  void* tsan_fiber = nullptr;

  uint32_t lane() const { return number % kWarpLanes; }
};

// One variable in static shared memory.
struct SharedVariable {
  const void* tag;
  size_t offset;
};
inline constexpr size_t kStaticSharedBytes = 48 << 10;
inline constexpr size_t kSharedVariablesMax = 32;
inline constexpr size_t kSharedGap =
    32;  // between variables, where AddressSanitizer stops accesses

// What a block did wrong, for Describe: by plain numbers, because fibers record it.
enum class Fault : uint8_t {
  kNone,
  kMaskWithoutOwnLane,
  kWaitForExitedLanes,
  kOtherFunction,
  kExitWhileAwaited,
  kTooMuchSharedMemory,
  kDeadlock,
};

// Used by one OS thread. Only SyncThreads, Arrive and SharedVariableOf are called in fibers.
class Worker {
 public:
  Worker() = default;
  ~Worker() {
    for (auto& thread : threads_) DropFiber(thread.get(), /*last=*/true);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs blocks first, first + step, ... of the launch; empty, or what one of them did wrong.
  // One launch after the other.
  std::string Run(const GridLaunch& launch, uint64_t first, uint64_t step, LaunchTags* tags);

  void SyncThreads(Thread* thread);
  Meeting* Arrive(Thread* thread, Collective collective, uint32_t mask, uint64_t value);
  void* SharedVariableOf(const void* tag, size_t size_bytes);
  uint8_t* dynamic_shared() { return dynamic_shared_.get(); }

 private:
  static void Enter(boost::context::detail::transfer_t from);
  void MakeSharedMemory();
  void DropSharedMemory();
  void MakeFiber(Thread* thread);
  void AbandonBlock();
  void DropFiber(Thread* thread, bool last);
  void Resume(Thread* thread);
  void Yield(Thread* thread);
  void Prepare(const GridLaunch& launch);
  void RunBlock(uint64_t number);
  bool RunWarp(uint32_t warp);
  void OnExit(Thread* thread);
  void ReleaseBarrier();
  void Complete(Meeting* meeting, uint32_t warp);
  void CompleteIfAllThere(Meeting* meeting, uint32_t warp);
  std::string Describe() const;
  std::string DescribeDeadlock() const;
  void Fail(Fault fault, uint32_t thread, uint32_t lanes) {
    if (fault_ != Fault::kNone) return;
    fault_ = fault;
    fault_thread_ = thread;
    fault_lanes_ = lanes;
  }
  uint64_t Random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::unique_ptr<Warp>> warps_;
  const GridLaunch* launch_ = nullptr;
  LaunchTags* tags_ = nullptr;
  uint32_t thread_count_ = 0;
  uint32_t live_ = 0;
  uint32_t at_barrier_ = 0;
  uint64_t barrier_count_ = 0;
  std::unique_ptr<uint8_t[]> dynamic_shared_;
  std::unique_ptr<uint8_t[]> static_shared_;
  SharedVariable variables_[kSharedVariablesMax] = {};
  size_t variable_count_ = 0;
  size_t static_shared_used_ = 0;
  Fault fault_ = Fault::kNone;
  uint32_t fault_thread_ = 0;
  uint32_t fault_lanes_ = 0;
  uint64_t random_ = 1;
  char barrier_tags_[2] = {};
  char block_tag_ = 0;  // orders the blocks of one worker, which share its shared memory
  void* tsan_scheduler_ = nullptr;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
};

// The CUDA thread that runs, or null.
extern constinit thread_local Thread* current;
// Of SetScheduleSeed.
extern uint64_t schedule_seed;

}  // namespace certkv::cuda_on_cpu

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_WORKER_H_
