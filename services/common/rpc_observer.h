// RpcObserver: how long RPCs take and how they end, for metrics; and a log line of each, with its
// traceparent. One for all services of a server.
//
// A call that ends in an error of the server's own (INTERNAL, UNKNOWN, DATA_LOSS) is a warning;
// all others are debug lines.
#ifndef CERTKV_SERVICES_COMMON_RPC_OBSERVER_H_
#define CERTKV_SERVICES_COMMON_RPC_OBSERVER_H_

#include <grpcpp/support/server_interceptor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "services/common/metrics.h"

namespace certkv {

// Threads: all methods are safe. Outlives the server that it observes.
class RpcObserver {
 public:
  static absl::Span<const MetricInfo> MetricInfos();
  void CollectMetrics(MetricSink* sink) ABSL_LOCKS_EXCLUDED(mutex_);

  // For grpc::ServerBuilder::experimental().SetInterceptorCreators.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeFactory();

 private:
  static constexpr int kCodeCount = 17;
  struct Method {
    explicit Method(absl::string_view path);
    std::string service;  // "gate", or the full name when it is not one of ours
    std::string name;
    LatencyHistogram seconds;                 // unary calls
    std::atomic<int64_t> streams_open{0};     // the others
    std::atomic<int64_t> ends[kCodeCount]{};  // index: grpc::StatusCode
  };
  class Call;
  class Factory;

  Method* MethodOf(absl::string_view path) ABSL_LOCKS_EXCLUDED(mutex_);

  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, std::unique_ptr<Method>> methods_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_RPC_OBSERVER_H_
