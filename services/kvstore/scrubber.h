// Scrubber: has the engine check its blocks in the background, at a limited rate.
#ifndef CERTKV_SERVICES_KVSTORE_SCRUBBER_H_
#define CERTKV_SERVICES_KVSTORE_SCRUBBER_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/store_engine.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace certkv::kvstore {

// Invariant: one job at a time, so it takes one thread of the pool at most.
// Threads: all calls are safe. Jobs run on the pool, which is joined before the engine goes.
class Scrubber : public std::enable_shared_from_this<Scrubber> {
 public:
  Scrubber(StoreEngine* engine, ComputePool* pool, boost::asio::io_context* io_context,
           int64_t bytes_per_second);

  void Start();  // does nothing at a rate of 0
  void Stop();   // no job starts after it

 private:
  void Wait() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnTimer();
  void Run(int64_t budget_bytes);

  StoreEngine* const engine_;
  ComputePool* const pool_;
  const int64_t bytes_per_second_;
  absl::Mutex mutex_;
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(mutex_);
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_running_ ABSL_GUARDED_BY(mutex_) = false;
  // Below zero after a block that was larger than what there was.
  int64_t budget_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SCRUBBER_H_
