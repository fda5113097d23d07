// CallCounter: how many RPCs of a server are running, and a wait until none is.
//
// gRPC's own graceful shutdown waits for idle connections too: it asks each client to confirm, and
// a client without a call under way doesn't poll its socket, so that the wait lasts to its timeout.
#ifndef CERTKV_SERVICES_COMMON_CALL_COUNTER_H_
#define CERTKV_SERVICES_COMMON_CALL_COUNTER_H_

#include <grpcpp/support/server_interceptor.h>

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace certkv {

// Threads: all methods are safe. Outlives the server that it counts for.
class CallCounter {
 public:
  // For grpc::ServerBuilder::experimental().SetInterceptorCreators.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeFactory() {
    return std::make_unique<Factory>(this);
  }
  // False when calls still run after `timeout`.
  bool WaitUntilIdle(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(this, &CallCounter::IsIdle), timeout);
  }

 private:
  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return running_ == 0; }
  void Add(int64_t count) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    running_ += count;
  }

  // Lives as long as one call.
  class Call final : public grpc::experimental::Interceptor {
   public:
    explicit Call(CallCounter* counter) : counter_(counter) { counter_->Add(1); }
    ~Call() override { counter_->Add(-1); }
    void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
      methods->Proceed();
    }

   private:
    CallCounter* const counter_;
  };
  class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
   public:
    explicit Factory(CallCounter* counter) : counter_(counter) {}
    grpc::experimental::Interceptor* CreateServerInterceptor(
        grpc::experimental::ServerRpcInfo*) override {
      return new Call(counter_);
    }

   private:
    CallCounter* const counter_;
  };

  absl::Mutex mutex_;
  int64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CALL_COUNTER_H_
