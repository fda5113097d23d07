// PeriodicJob: runs something that computes every now and then, on the compute pool.
#ifndef CERTKV_SERVICES_KVSTORE_PERIODIC_JOB_H_
#define CERTKV_SERVICES_KVSTORE_PERIODIC_JOB_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/kvstore/compute_pool.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace certkv::kvstore {

// Invariant: one run at a time; while one lasts, or the pool is full, turns are left out.
// Threads: all calls are safe. Runs end when the pool is joined, which comes before what they use
// goes.
class PeriodicJob : public std::enable_shared_from_this<PeriodicJob> {
 public:
  PeriodicJob(ComputePool* pool, boost::asio::io_context* io_context,
              std::chrono::milliseconds interval, std::function<void()> job);

  void Start();
  void Stop();  // no run starts after it

 private:
  void Wait() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnTimer();

  ComputePool* const pool_;
  const std::chrono::milliseconds interval_;
  const std::function<void()> job_;
  absl::Mutex mutex_;
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(mutex_);
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_running_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_PERIODIC_JOB_H_
