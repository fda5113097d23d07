#include "services/common/health_service.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"

namespace certkv {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch stream: the status at its beginning, and each that it has later.
// Invariants: one write is under way at most; Finish is called once, after the last write.
class HealthService::Watcher : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  Watcher(HealthService* service, std::string name) : service_(service), name_(std::move(name)) {}

  const std::string& name() const { return name_; }

  // The status is this from now on; `last`: for good, and the stream ends. The service has then
  // taken this watcher from its set: nobody else ends it.
  void Set(Status status, bool last) {
    absl::MutexLock lock(&mutex_);
    wanted_ = status;
    last_ = last;
    if (!writing_ && !finished_) Next();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (finished_) return;
    if (!ok) return End(grpc::Status::CANCELLED);
    Next();
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
  // Says what was not said yet, or ends.
  void Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (sent_ == wanted_) {
      if (last_) End(grpc::Status::OK);
      return;
    }
    sent_ = wanted_;
    writing_ = true;
    response_.set_status(sent_);
    StartWrite(&response_);
  }
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    Finish(status);
  }

  HealthService* const service_;
  const std::string name_;
  absl::Mutex mutex_;  // taken after service_->mutex_ when both are held
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool last_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  Status wanted_ ABSL_GUARDED_BY(mutex_) = HealthCheckResponse::UNKNOWN;
  Status sent_ ABSL_GUARDED_BY(mutex_) = HealthCheckResponse::UNKNOWN;
  HealthCheckResponse response_;
};

HealthService::Status HealthService::StatusOf(const std::string& service) const {
  bool is_serving = !draining_;
  if (service.empty()) {
    for (const auto& [name, serves] : services_) is_serving = is_serving && serves;
  } else {
    const auto found = services_.find(service);
    if (found == services_.end()) return HealthCheckResponse::SERVICE_UNKNOWN;
    is_serving = is_serving && found->second;
  }
  return is_serving ? HealthCheckResponse::SERVING : HealthCheckResponse::NOT_SERVING;
}

void HealthService::AddService(const std::string& service) {
  absl::MutexLock lock(&mutex_);
  services_[service] = false;
}

void HealthService::SetServing(const std::string& service) {
  absl::MutexLock lock(&mutex_);
  services_[service] = true;
  if (draining_) return;
  for (Watcher* watcher : watchers_) watcher->Set(StatusOf(watcher->name()), /*last=*/false);
}

void HealthService::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  // Under the lock, so that no watcher is deleted meanwhile: its OnDone waits for the lock.
  for (Watcher* watcher : watchers_) {
    watcher->Set(HealthCheckResponse::NOT_SERVING, /*last=*/true);
  }
  watchers_.clear();
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::MutexLock lock(&mutex_);
  const Status status = StatusOf(request->service());
  if (status == HealthCheckResponse::SERVICE_UNKNOWN) {
    reactor->Finish(
        ToGrpcStatus(MakeError(absl::StatusCode::kNotFound, "SERVICE_NOT_FOUND",
                               absl::StrCat("this server has no service ", request->service())),
                     "health.certkv"));
    return reactor;
  }
  response->set_status(status);
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext*, const HealthCheckRequest* request) {
  auto* watcher = new Watcher(this, request->service());  // deletes itself in OnDone
  absl::MutexLock lock(&mutex_);
  if (draining_) {
    watcher->Set(HealthCheckResponse::NOT_SERVING, /*last=*/true);
  } else {
    watchers_.insert(watcher);
    watcher->Set(StatusOf(request->service()), /*last=*/false);
  }
  return watcher;
}

}  // namespace certkv
