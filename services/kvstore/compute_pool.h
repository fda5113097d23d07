// ComputePool: the threads that seal, promote and verify blocks, apart from those that serve.
#ifndef CERTKV_SERVICES_KVSTORE_COMPUTE_POOL_H_
#define CERTKV_SERVICES_KVSTORE_COMPUTE_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace boost::asio {
class thread_pool;
}  // namespace boost::asio

namespace certkv::kvstore {

// Invariants:
//  1. At most job_limit posted jobs are queued or running.
//  2. ParallelFor ends even when every thread is busy with something that does not end: its caller
//     does what nobody else does.
// Threads: all calls are safe concurrently, also from a job, but for Join().
class ComputePool {
 public:
  ComputePool(int32_t thread_count, int32_t job_limit);
  ~ComputePool();  // joins

  // Runs `job` on a thread of the pool, in order of posting. False when the limit is reached or the
  // pool was joined; the job is not run then.
  bool TryPost(std::function<void()> job);
  // Calls body(i) once for each i in [0, count), in ascending order of start, on the caller's
  // thread and on threads of the pool that are free; returns when all calls have returned.
  void ParallelFor(int64_t count, const std::function<void(int64_t)>& body);
  // The same for a body that may fail, until one does: the error of the smallest index that has
  // one, whatever the order of the threads. Bodies of smaller indices have run, of others some.
  absl::Status ParallelTry(int64_t count, const std::function<absl::Status(int64_t)>& body);
  // About how long a job that were posted now would wait for the queue to empty by half; at least
  // 1. From the mean duration of the last jobs.
  int64_t WaitEstimateMs() const;
  // Runs what was posted to its end and stops the threads. Idempotent.
  void Join();

 private:
  const int32_t thread_count_;
  const int32_t job_limit_;
  std::atomic<int32_t> job_count_{0};
  std::atomic<int64_t> mean_job_us_{1000};
  std::atomic<bool> joined_{false};
  std::unique_ptr<boost::asio::thread_pool> pool_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_COMPUTE_POOL_H_
