// The standard health service, for a server whose services are up from when they are ready to
// drain.
//
// gRPC's built-in one keeps Watch streams open when the server drains, which makes a drain last for
// its whole timeout whenever a load balancer watches; this one ends them.
#ifndef CERTKV_SERVICES_COMMON_HEALTH_SERVICE_H_
#define CERTKV_SERVICES_COMMON_HEALTH_SERVICE_H_

#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace certkv {

// Invariant: each watcher in `watchers_` has not been finished. Threads: all calls are safe.
class HealthService : public grpc::health::v1::Health::CallbackService {
 public:
  // From now on `service` (a full name) is known, and NOT_SERVING. The server as a whole, "", is
  // known anyhow, and SERVING when all of its services are.
  void AddService(const std::string& service);
  // `service`, which is known, is SERVING from now on; watchers are told so.
  void SetServing(const std::string& service);
  // All services are NOT_SERVING from now on; watchers are told so, and their streams end.
  void Drain();

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* context,
      const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  class Watcher;
  using Status = grpc::health::v1::HealthCheckResponse::ServingStatus;

  Status StatusOf(const std::string& service) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<std::string, bool> services_ ABSL_GUARDED_BY(mutex_);  // is it serving?
  absl::flat_hash_set<Watcher*> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_HEALTH_SERVICE_H_
