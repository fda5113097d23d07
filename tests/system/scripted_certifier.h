// A certifier whose answers a test writes: for what the client library does with answers that no
// honest certifier gives.
#ifndef CERTKV_TESTS_SYSTEM_SCRIPTED_CERTIFIER_H_
#define CERTKV_TESTS_SYSTEM_SCRIPTED_CERTIFIER_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "kernels/core/cache_spec.h"

namespace certkv {

// Serves on a Unix socket until destroyed. Threads: the script runs on gRPC's.
class ScriptedCertifier final : public certifier::v1::Certifier::Service {
 public:
  // Gets what an honest certifier would answer, with bounds of 0.01 and outputs of 1, to spoil.
  // Another status than OK ends the stream without this answer.
  using Script = std::function<grpc::Status(certifier::v1::AttendResponse*)>;

  ScriptedCertifier(const CacheSpec& spec, const std::string& socket)
      : spec_(spec), target_(absl::StrCat("unix:", socket)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(target_, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~ScriptedCertifier() override { server_->Shutdown(std::chrono::system_clock::now()); }

  const std::string& target() const { return target_; }
  void SetScript(Script script) {
    absl::MutexLock lock(&mutex_);
    script_ = std::move(script);
  }
  int opened_views() const {
    absl::MutexLock lock(&mutex_);
    return opened_views_;
  }
  int attended_messages() const {
    absl::MutexLock lock(&mutex_);
    return attended_messages_;
  }

 private:
  grpc::Status OpenView(grpc::ServerContext*, const certifier::v1::OpenViewRequest*,
                        certifier::v1::OpenViewResponse* response) override {
    absl::MutexLock lock(&mutex_);
    response->set_view_id(++opened_views_);
    return grpc::Status::OK;
  }
  grpc::Status UpdateView(grpc::ServerContext*, const certifier::v1::UpdateViewRequest*,
                          certifier::v1::UpdateViewResponse*) override {
    return grpc::Status::OK;
  }
  grpc::Status CloseView(grpc::ServerContext*, const certifier::v1::CloseViewRequest*,
                         certifier::v1::CloseViewResponse*) override {
    return grpc::Status::OK;
  }
  grpc::Status Attend(grpc::ServerContext*,
                      grpc::ServerReaderWriter<certifier::v1::AttendResponse,
                                               certifier::v1::AttendRequest>* stream) override {
    certifier::v1::AttendRequest request;
    while (stream->Read(&request)) {
      certifier::v1::AttendResponse response = HonestAnswer(request);
      Script script;
      {
        absl::MutexLock lock(&mutex_);
        ++attended_messages_;
        script = script_;
      }
      if (script != nullptr) {
        const grpc::Status status = script(&response);
        if (!status.ok()) return status;
      }
      stream->Write(response);
    }
    return grpc::Status::OK;
  }

  certifier::v1::AttendResponse HonestAnswer(const certifier::v1::AttendRequest& request) const {
    certifier::v1::AttendResponse response;
    response.set_request_number(request.request_number());
    for (const auto& read : request.reads()) {
      certifier::v1::ReadResult* result = response.add_results();
      for (int32_t head = 0; head < spec_.query_head_count(); ++head) {
        type::Certificate* certificate = result->add_certificates();
        certificate->set_layer(read.layer());
        certificate->set_query_head(head);
        certificate->set_query_position(read.query_position());
        certificate->set_worst_case_tv(0.01f);
        certificate->set_first_worst_case_tv(0.01f);
        certificate->set_value_term(0.01f);
        certificate->set_value_radius(1.0f);
        certificate->set_output_error_bound(0.03f);
        certificate->set_rung(type::RUNG_NONE);
        certificate->set_outcome(type::OUTCOME_CERTIFIED);
      }
      const std::string one("\x00\x00\x80\x3f", 4);  // 1.0f, little-endian
      for (int64_t i = 0; i < int64_t{spec_.query_head_count()} * spec_.value_dim; ++i) {
        result->mutable_outputs()->append(one);
      }
    }
    return response;
  }

  const CacheSpec spec_;
  const std::string target_;
  mutable absl::Mutex mutex_;
  Script script_ ABSL_GUARDED_BY(mutex_);
  int opened_views_ ABSL_GUARDED_BY(mutex_) = 0;
  int attended_messages_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<grpc::Server> server_;  // last: it calls the others
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_SCRIPTED_CERTIFIER_H_
