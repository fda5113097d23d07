// Ticker: calls the engine's Tick() on a timer.
#ifndef CERTKV_SERVICES_KVSTORE_TICKER_H_
#define CERTKV_SERVICES_KVSTORE_TICKER_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Calls the engine's Tick() until it is stopped.
class Ticker : public std::enable_shared_from_this<Ticker> {
 public:
  Ticker(StoreEngine* engine, boost::asio::io_context* io_context)
      : timer_(*io_context), engine_(engine) {}

  void Start() {
    absl::MutexLock lock(&mutex_);
    Wait();
  }
  // No Tick() runs after it.
  void Stop() {
    absl::MutexLock lock(&mutex_);
    engine_ = nullptr;
    timer_.cancel();
  }

 private:
  // How late a lease that nobody asks about expires at most.
  static constexpr std::chrono::milliseconds kTickInterval{50};

  void Wait() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    timer_.expires_after(kTickInterval);
    timer_.async_wait([self = shared_from_this()](const boost::system::error_code& /*error*/) {
      absl::MutexLock lock(&self->mutex_);
      if (self->engine_ == nullptr) return;
      self->engine_->Tick();
      self->Wait();
    });
  }

  absl::Mutex mutex_;
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(mutex_);
  StoreEngine* engine_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_TICKER_H_
