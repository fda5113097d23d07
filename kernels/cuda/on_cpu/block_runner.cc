#include "kernels/cuda/on_cpu/block_runner.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/cuda/on_cpu/sanitizer_fibers.h"
#include "kernels/cuda/on_cpu/worker.h"

namespace certkv::cuda_on_cpu {
namespace {

constexpr uint64_t kWorkerCount = 2;

// The second worker: a thread that waits for launches.
//
// Two mutexes, because a mutex is an order for ThreadSanitizer: were there one, who launches could
// lock it after his last block and before this thread wakes, and no race between the two would be
// seen.
class Helper {
 public:
  Helper() : thread_([this] { Serve(); }) {}
  ~Helper() {
    {
      const std::lock_guard lock(start_mutex_);
      stop_ = true;
    }
    started_.notify_all();
    thread_.join();
  }
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  void Start(const GridLaunch& launch, LaunchTags* tags) {
    const std::lock_guard lock(start_mutex_);
    launch_ = &launch;
    tags_ = tags;
    started_.notify_all();
  }
  // Waits for the launch; what Worker::Run said.
  std::string Finish() {
    std::unique_lock lock(finish_mutex_);
    finished_.wait(lock, [this] { return is_finished_; });
    is_finished_ = false;
    return failure_;
  }

 private:
  void Serve() {
    Worker worker;
    for (;;) {
      std::unique_lock lock(start_mutex_);
      started_.wait(lock, [this] { return stop_ || launch_ != nullptr; });
      if (stop_) return;
      const GridLaunch* const launch = launch_;
      launch_ = nullptr;
      lock.unlock();
      std::string failure = worker.Run(*launch, 1, kWorkerCount, tags_);
      Release(&tags_->end);
      const std::lock_guard finish_lock(finish_mutex_);
      failure_ = std::move(failure);
      is_finished_ = true;
      finished_.notify_all();
    }
  }

  std::mutex start_mutex_;
  std::condition_variable started_;
  const GridLaunch* launch_ = nullptr;
  LaunchTags* tags_ = nullptr;
  bool stop_ = false;
  std::mutex finish_mutex_;
  std::condition_variable finished_;
  std::string failure_;
  bool is_finished_ = false;
  std::thread thread_;
};

std::mutex launch_mutex;

}  // namespace

std::string RunGrid(const GridLaunch& launch) {
  const uint64_t thread_count = launch.block.count();
  if (launch.grid.count() == 0 || thread_count == 0 || thread_count > kBlockThreadsMax) {
    return absl::StrCat("a launch of ", launch.grid.count(), " blocks of ", thread_count,
                        " threads, must be at least 1 block of 1 to ", kBlockThreadsMax);
  }
  CERTKV_CHECK(current == nullptr, "kernels launch no kernels");
  const std::lock_guard lock(launch_mutex);
  thread_local Worker worker;
  static Helper helper;
  LaunchTags tags{};
  Release(&tags.begin);
  const bool is_shared = launch.grid.count() > 1;
  if (is_shared) helper.Start(launch, &tags);
  std::string failure = worker.Run(launch, 0, kWorkerCount, &tags);
  if (is_shared) {
    const std::string other = helper.Finish();
    if (failure.empty()) failure = other;
  }
  Acquire(&tags.end);
  return failure;
}

void SetScheduleSeed(uint64_t seed) {
  const std::lock_guard lock(launch_mutex);
  schedule_seed = seed;
}

void SyncThreads() { current->worker->SyncThreads(current); }

const WarpValues& ArriveInWarp(Collective collective, uint32_t mask, uint64_t value) {
  return *current->worker->Arrive(current, collective, mask, value);
}

void LeaveWarp() {
  Meeting* const meeting = current->meeting;
  meeting->leaving &= ~(1u << current->lane());
  if (meeting->leaving == 0) meeting->mask = 0;
}

uint32_t LaneIndex() { return current->lane(); }
uint8_t* DynamicSharedMemory() { return current->worker->dynamic_shared(); }
void* StaticSharedMemory(const void* tag, size_t size_bytes) {
  return current->worker->SharedVariableOf(tag, size_bytes);
}

}  // namespace certkv::cuda_on_cpu
