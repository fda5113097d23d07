// Compiled without -fsanitize=thread even where everything else is (CMakeLists.txt): what happens
// here is the machine, not the program, and tells the tool about fibers and order by its interface.
// What runs in a fiber therefore calls no function that another file may have compiled as well
// (std::string, std::vector of a type that others use), and no intercepted one (memset, malloc).
#include "kernels/cuda/on_cpu/worker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/cuda/on_cpu/sanitizer_fibers.h"

namespace certkv::cuda_on_cpu {
namespace {

namespace context = boost::context::detail;

constexpr size_t kStackBytes = 256 << 10;  // of address space; only what is touched is memory
constexpr size_t kGuardBytes = 4096;

}  // namespace

constinit thread_local Thread* current = nullptr;
uint64_t schedule_seed = 0;

void Worker::MakeFiber(Thread* thread) {
  if (thread->stack == nullptr) {
    void* const memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CERTKV_CHECK(memory != MAP_FAILED, "there is address space for the stack of a fiber");
    CERTKV_CHECK(mprotect(memory, kGuardBytes, PROT_NONE) == 0, "a stack can have a guard page");
    thread->stack = static_cast<uint8_t*>(memory) + kGuardBytes;
  }
  thread->fiber = context::make_fcontext(thread->stack + kStackBytes, kStackBytes, &Enter);
  thread->fake_stack = nullptr;
  if (__tsan_create_fiber != nullptr) thread->tsan_fiber = __tsan_create_fiber(0);
}

// A thread that will not run again. What it has on its stack is not destroyed: kernels hold plain
// data.
void Worker::DropFiber(Thread* thread, bool last) {
  if (__tsan_destroy_fiber != nullptr) __tsan_destroy_fiber(thread->tsan_fiber);
  if (__asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(thread->stack, kStackBytes);
  }
  if (last) munmap(thread->stack - kGuardBytes, kStackBytes + kGuardBytes);
}

// Threads stand where the failure has left them, and will not go on. What they did is over.
void Worker::AbandonBlock() {
  for (auto& thread : threads_) {
    if (__tsan_switch_to_fiber != nullptr) {
      __tsan_switch_to_fiber(thread->tsan_fiber, kSwitchWithoutOrder);
      Release(&block_tag_);
      __tsan_switch_to_fiber(tsan_scheduler_, kSwitchWithoutOrder);
    }
    DropFiber(thread.get(), /*last=*/false);
    MakeFiber(thread.get());
  }
  Acquire(&block_tag_);
}

void Worker::Resume(Thread* thread) {
  current = thread;
  threadIdx = thread->index;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&scheduler_fake_stack_, thread->stack, kStackBytes);
  }
  if (__tsan_switch_to_fiber != nullptr) {
    __tsan_switch_to_fiber(thread->tsan_fiber, kSwitchWithoutOrder);
  }
  thread->fiber = context::jump_fcontext(thread->fiber, thread).fctx;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
  }
  current = nullptr;
}

void Worker::Yield(Thread* thread) {
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&thread->fake_stack, scheduler_stack_, scheduler_stack_bytes_);
  }
  if (__tsan_switch_to_fiber != nullptr) {
    __tsan_switch_to_fiber(tsan_scheduler_, kSwitchWithoutOrder);
  }
  thread->scheduler = context::jump_fcontext(thread->scheduler, nullptr).fctx;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(thread->fake_stack, &scheduler_stack_, &scheduler_stack_bytes_);
  }
}

// A fiber runs one thread of every block.
void Worker::Enter(context::transfer_t from) {
  auto* const thread = static_cast<Thread*>(from.data);
  Worker* const worker = thread->worker;
  thread->scheduler = from.fctx;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &worker->scheduler_stack_,
                                    &worker->scheduler_stack_bytes_);
  }
  for (;;) {
    Acquire(&worker->tags_->begin);
    Acquire(&worker->block_tag_);
    worker->launch_->run(worker->launch_->argument);
    Release(&worker->block_tag_);
    worker->OnExit(thread);
    worker->Yield(thread);
  }
}

void Worker::ReleaseBarrier() {
  at_barrier_ = 0;
  ++barrier_count_;
  for (uint32_t n = 0; n < thread_count_; ++n) {
    if (threads_[n]->state == State::kAtBarrier) threads_[n]->state = State::kReady;
  }
}

void Worker::SyncThreads(Thread* thread) {
  char* const tag = &barrier_tags_[barrier_count_ % 2];
  Release(tag);
  if (++at_barrier_ == live_) {
    ReleaseBarrier();
  } else {
    thread->state = State::kAtBarrier;
    Yield(thread);
  }
  Acquire(tag);
}

void Worker::Complete(Meeting* meeting, uint32_t warp) {
  meeting->complete = true;
  meeting->leaving = meeting->arrived;
  for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
    if ((meeting->arrived >> lane & 1) == 0) continue;
    Thread& thread = *threads_[warp * kWarpLanes + lane];
    if (thread.state == State::kInWarp && thread.meeting == meeting) thread.state = State::kReady;
  }
}

// Lanes that the block doesn't have need not come: __shfl_sync(~0u, ...) in a last warp that is not
// full is fine on a GPU as well.
void Worker::CompleteIfAllThere(Meeting* meeting, uint32_t warp) {
  const uint32_t there = meeting->arrived | ~warps_[warp]->existing;
  if ((there & meeting->mask) == meeting->mask) Complete(meeting, warp);
}

Meeting* Worker::Arrive(Thread* thread, Collective collective, uint32_t mask, uint64_t value) {
  const uint32_t warp_number = thread->number / kWarpLanes;
  Warp& warp = *warps_[warp_number];
  if ((mask >> thread->lane() & 1) == 0) {
    Fail(Fault::kMaskWithoutOwnLane, thread->number, mask);
  }
  if ((mask & warp.exited) != 0) {
    Fail(Fault::kWaitForExitedLanes, thread->number, mask & warp.exited);
  }
  Meeting* meeting = nullptr;
  Meeting* unused = nullptr;
  for (Meeting& candidate : warp.meetings) {
    if (candidate.mask == mask && !candidate.complete) meeting = &candidate;
    if (candidate.mask == 0 && unused == nullptr) unused = &candidate;
  }
  if (meeting == nullptr) {
    meeting = unused;
    meeting->mask = mask;
    meeting->arrived = 0;
    meeting->complete = false;
    meeting->collective = collective;
  } else if (meeting->collective != collective) {
    Fail(Fault::kOtherFunction, thread->number, meeting->arrived);
  }
  meeting->value[thread->lane()] = value;
  meeting->arrived |= 1u << thread->lane();
  thread->meeting = meeting;
  // Shuffles and votes exchange values and order nothing else.
  const bool orders = collective == Collective::kSyncWarp;
  if (orders) Release(meeting);
  CompleteIfAllThere(meeting, warp_number);
  if (!meeting->complete) {
    thread->state = State::kInWarp;
    Yield(thread);
  }
  if (orders) Acquire(meeting);
  return meeting;
}

void* Worker::SharedVariableOf(const void* tag, size_t size_bytes) {
  for (size_t n = 0; n < variable_count_; ++n) {
    if (variables_[n].tag == tag) return static_shared_.get() + variables_[n].offset;
  }
  const size_t offset = static_shared_used_;
  static_shared_used_ += (size_bytes + 15) / 16 * 16 + kSharedGap;
  if (variable_count_ == kSharedVariablesMax || static_shared_used_ > kStaticSharedBytes) {
    Fail(Fault::kTooMuchSharedMemory, current->number, 0);
    Yield(current);  // for ever: the launch has failed
  }
  variables_[variable_count_++] = {tag, offset};
  uint8_t* const variable = static_shared_.get() + offset;
  if (__asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(variable, size_bytes);
  }
  return variable;
}

// New memory for the block, so that nothing of the last one is in it.
void Worker::MakeSharedMemory() {
  dynamic_shared_.reset(new uint8_t[launch_->shared_bytes]);
  std::memset(dynamic_shared_.get(), 0xff, launch_->shared_bytes);
  static_shared_.reset(new uint8_t[kStaticSharedBytes]);
  std::memset(static_shared_.get(), 0xff, kStaticSharedBytes);
  if (__asan_poison_memory_region != nullptr) {
    __asan_poison_memory_region(static_shared_.get(), kStaticSharedBytes);
  }
  variable_count_ = 0;
  static_shared_used_ = 0;
}

void Worker::DropSharedMemory() {
  dynamic_shared_.reset();
  if (__asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(static_shared_.get(), kStaticSharedBytes);
  }
  static_shared_.reset();
}

void Worker::OnExit(Thread* thread) {
  thread->state = State::kDone;
  --live_;
  Warp& warp = *warps_[thread->number / kWarpLanes];
  warp.exited |= 1u << thread->lane();
  for (const Meeting& meeting : warp.meetings) {
    if (meeting.mask == 0 || meeting.complete || (meeting.mask >> thread->lane() & 1) == 0) {
      continue;
    }
    Fail(Fault::kExitWhileAwaited, thread->number, meeting.arrived);
  }
  if (live_ > 0 && at_barrier_ == live_) ReleaseBarrier();
}

// Gives every thread of the warp that can go on its turn, until none can. True if one could.
bool Worker::RunWarp(uint32_t warp) {
  const uint32_t first = warp * kWarpLanes;
  bool progress = false;
  for (bool again = true; again && fault_ == Fault::kNone;) {
    again = false;
    const uint32_t swap = schedule_seed != 0 ? Random() % kWarpLanes : 0;
    for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      const uint32_t n = first + (lane ^ swap);
      if (n >= thread_count_ || threads_[n]->state != State::kReady) continue;
      Resume(threads_[n].get());
      again = progress = true;
    }
    if (schedule_seed != 0 && Random() % 4 == 0) break;  // another warp's turn
  }
  return progress;
}

void Worker::RunBlock(uint64_t number) {
  const Size3& grid = launch_->grid;
  blockIdx = {static_cast<uint32_t>(number % grid.x),
              static_cast<uint32_t>(number / grid.x % grid.y),
              static_cast<uint32_t>(number / grid.x / grid.y)};
  Acquire(&block_tag_);
  MakeSharedMemory();
  Release(&block_tag_);
  live_ = thread_count_;
  at_barrier_ = 0;
  for (uint32_t n = 0; n < thread_count_; ++n) threads_[n]->state = State::kReady;
  const auto warp_count = static_cast<uint32_t>(warps_.size());
  for (uint32_t w = 0; w < warp_count; ++w) {
    Warp& warp = *warps_[w];
    const uint32_t lanes = std::min(kWarpLanes, thread_count_ - w * kWarpLanes);
    warp.existing = lanes == kWarpLanes ? ~0u : (1u << lanes) - 1;
    warp.exited = 0;
    for (Meeting& meeting : warp.meetings) meeting.mask = 0;
  }
  while (live_ > 0 && fault_ == Fault::kNone) {
    bool progress = false;
    const uint32_t offset = schedule_seed != 0 ? Random() % warp_count : 0;
    for (uint32_t w = 0; w < warp_count; ++w) progress |= RunWarp((w + offset) % warp_count);
    if (!progress && live_ > 0) Fail(Fault::kDeadlock, 0, 0);
  }
  Acquire(&block_tag_);
  DropSharedMemory();
  Release(&block_tag_);
}

void Worker::Prepare(const GridLaunch& launch) {
  launch_ = &launch;
  fault_ = Fault::kNone;
  random_ = schedule_seed * 0x9E3779B97F4A7C15u + 1;
  if (__tsan_get_current_fiber != nullptr) tsan_scheduler_ = __tsan_get_current_fiber();
  thread_count_ = static_cast<uint32_t>(launch.block.count());
  while (threads_.size() < thread_count_) {
    auto thread = std::make_unique<Thread>();
    thread->worker = this;
    thread->number = static_cast<uint32_t>(threads_.size());
    MakeFiber(thread.get());
    threads_.push_back(std::move(thread));
  }
  warps_.clear();
  for (uint32_t n = 0; n < thread_count_; n += kWarpLanes) {
    warps_.push_back(std::make_unique<Warp>());
  }
  for (uint32_t n = 0; n < thread_count_; ++n) {
    threads_[n]->index = {n % launch.block.x, n / launch.block.x % launch.block.y,
                          n / launch.block.x / launch.block.y};
  }
  blockDim = {launch.block.x, launch.block.y, launch.block.z};
  gridDim = {launch.grid.x, launch.grid.y, launch.grid.z};
}

std::string Worker::Run(const GridLaunch& launch, uint64_t first, uint64_t step, LaunchTags* tags) {
  tags_ = tags;
  Prepare(launch);
  for (uint64_t block = first; block < launch.grid.count(); block += step) {
    RunBlock(block);
    if (fault_ == Fault::kNone) continue;
    AbandonBlock();
    return absl::StrCat("block ", block, ": ", Describe());
  }
  Acquire(&block_tag_);
  return "";
}

}  // namespace certkv::cuda_on_cpu
