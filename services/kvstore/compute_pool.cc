#include "services/kvstore/compute_pool.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "services/common/clock.h"

namespace certkv::kvstore {
namespace {

// One ParallelFor. Helpers that start after its end find nothing to do, and touch `body` no more.
struct Loop {
  Loop(int64_t count, const std::function<void(int64_t)>* body) : count(count), body(body) {}

  void Run() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      (*body)(i);
      absl::MutexLock lock(&mutex);
      ++done;
    }
  }
  void WaitUntilDone() {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(
        +[](Loop* loop) { return loop->done == loop->count; }, this));
  }

  const int64_t count;
  const std::function<void(int64_t)>* const body;
  std::atomic<int64_t> next{0};
  absl::Mutex mutex;
  int64_t done = 0;  // guarded by mutex
};

}  // namespace

ComputePool::ComputePool(int32_t thread_count, int32_t job_limit)
    : thread_count_(thread_count),
      job_limit_(job_limit),
      pool_(std::make_unique<boost::asio::thread_pool>(static_cast<size_t>(thread_count))) {}

ComputePool::~ComputePool() { Join(); }

bool ComputePool::TryPost(std::function<void()> job) {
  if (joined_.load()) return false;
  if (job_count_.fetch_add(1) >= job_limit_) {
    job_count_.fetch_sub(1);
    return false;
  }
  boost::asio::post(*pool_, [this, job = std::move(job)] {
    const int64_t start_ns = RealClock()->MonotonicNs();
    job();
    const int64_t took_us = (RealClock()->MonotonicNs() - start_ns) / 1000;
    // Two jobs that end at once may lose one of their updates: it is an estimate.
    const int64_t mean_us = mean_job_us_.load();
    mean_job_us_.store(mean_us + (took_us - mean_us) / 8);
    job_count_.fetch_sub(1);
  });
  return true;
}

absl::Status ComputePool::ParallelTry(int64_t count,
                                      const std::function<absl::Status(int64_t)>& body) {
  std::atomic<int64_t> failed_index{count};
  absl::Mutex mutex;
  absl::Status first;
  ParallelFor(count, [&](int64_t index) {
    if (index > failed_index.load(std::memory_order_relaxed)) return;
    const absl::Status status = body(index);
    if (status.ok()) return;
    absl::MutexLock lock(&mutex);
    if (index >= failed_index.load(std::memory_order_relaxed)) return;
    failed_index.store(index, std::memory_order_relaxed);
    first = status;
  });
  return first;
}

int64_t ComputePool::WaitEstimateMs() const {
  const int64_t jobs_to_end = job_count_.load() / 2 / thread_count_ + 1;
  return std::max<int64_t>(1, jobs_to_end * mean_job_us_.load() / 1000);
}

void ComputePool::ParallelFor(int64_t count, const std::function<void(int64_t)>& body) {
  if (count <= 0) return;
  const auto loop = std::make_shared<Loop>(count, &body);
  const auto helper_count = std::min<int64_t>(thread_count_ - 1, count - 1);
  for (int64_t i = 0; i < helper_count; ++i) {
    boost::asio::post(*pool_, [loop] { loop->Run(); });
  }
  loop->Run();
  loop->WaitUntilDone();
}

void ComputePool::Join() {
  joined_.store(true);
  pool_->join();
}

}  // namespace certkv::kvstore
