#include "services/common/health_service.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"

namespace certkv {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch stream: at most two messages, the status at its beginning and NOT_SERVING.
// Invariants: one write is under way at most; Finish is called once, after the last write.
class HealthService::Watcher : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  explicit Watcher(HealthService* service) : service_(service) {}

  void Start(HealthCheckResponse::ServingStatus status, bool last) {
    absl::MutexLock lock(&mutex_);
    last_ = last;
    Write(status);
  }

  // The service has taken this watcher from its set: nobody else ends it.
  void EndNotServing() {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    last_ = true;
    if (!writing_) Write(HealthCheckResponse::NOT_SERVING);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (finished_) return;
    if (!ok) return End(grpc::Status::CANCELLED);
    if (!last_) return;
    if (sent_ == HealthCheckResponse::NOT_SERVING) return End(grpc::Status::OK);
    Write(HealthCheckResponse::NOT_SERVING);
  }

  void OnCancel() override {
    {
      absl::MutexLock lock(&service_->mutex_);
      service_->watchers_.erase(this);
    }
    absl::MutexLock lock(&mutex_);
    if (!finished_) End(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    {
      absl::MutexLock lock(&service_->mutex_);
      service_->watchers_.erase(this);
    }
    delete this;
  }

 private:
  void Write(HealthCheckResponse::ServingStatus status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    sent_ = status;
    writing_ = true;
    response_.set_status(status);
    StartWrite(&response_);
  }
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    Finish(status);
  }

  HealthService* const service_;
  absl::Mutex mutex_;  // taken after service_->mutex_ when both are held
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool last_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  HealthCheckResponse::ServingStatus sent_ ABSL_GUARDED_BY(mutex_) = HealthCheckResponse::UNKNOWN;
  HealthCheckResponse response_;
};

void HealthService::AddService(const std::string& service) {
  absl::MutexLock lock(&mutex_);
  services_.insert(service);
}

void HealthService::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  // Under the lock, so that no watcher is deleted meanwhile: its OnDone waits for the lock.
  for (Watcher* watcher : watchers_) watcher->EndNotServing();
  watchers_.clear();
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::MutexLock lock(&mutex_);
  if (!services_.contains(request->service())) {
    reactor->Finish(
        ToGrpcStatus(MakeError(absl::StatusCode::kNotFound, "SERVICE_NOT_FOUND",
                               absl::StrCat("this server has no service ", request->service())),
                     "health.certkv"));
    return reactor;
  }
  response->set_status(draining_ ? HealthCheckResponse::NOT_SERVING : HealthCheckResponse::SERVING);
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext*, const HealthCheckRequest* request) {
  auto* watcher = new Watcher(this);  // deletes itself in OnDone
  absl::MutexLock lock(&mutex_);
  if (draining_) {
    watcher->Start(HealthCheckResponse::NOT_SERVING, /*last=*/true);
  } else {
    watchers_.insert(watcher);
    watcher->Start(services_.contains(request->service()) ? HealthCheckResponse::SERVING
                                                          : HealthCheckResponse::SERVICE_UNKNOWN,
                   /*last=*/false);
  }
  return watcher;
}

}  // namespace certkv
