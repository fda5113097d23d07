#include "services/gate/service_streams.h"

#include <boost/asio/post.hpp>
#include <chrono>
#include <optional>
#include <vector>

#include "kernels/core/status.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/gate/convert.h"

namespace certkv::gate {
namespace {

// A batch of this many certificates takes about 50 microseconds to count; a larger one is counted
// on the io_context's threads.
constexpr int kCertificatesInline = 256;

grpc::Status DrainingStatus() {
  return ToGrpcStatus(MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                                "this gate is shutting down; connect again and go on there"),
                      kErrorDomain);
}

}  // namespace

StreamSet::Admission StreamSet::Add(OpenStream* stream, bool is_watch, int32_t watch_limit) {
  absl::MutexLock lock(&mutex_);
  if (draining_) return Admission::kDraining;
  if (is_watch && static_cast<int64_t>(watches_.size()) >= watch_limit) return Admission::kFull;
  (is_watch ? watches_ : reports_).insert(stream);
  return Admission::kAdmitted;
}

void StreamSet::Remove(OpenStream* stream) {
  absl::MutexLock lock(&mutex_);
  reports_.erase(stream);
  watches_.erase(stream);
}

void StreamSet::DrainAll() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  for (OpenStream* stream : reports_) stream->Drain();
  for (OpenStream* stream : watches_) stream->Drain();
}

void StreamSet::TickAll() {
  absl::MutexLock lock(&mutex_);
  for (OpenStream* stream : watches_) stream->Tick();
}

ReportStream::ReportStream(RequestRegistry* registry, StreamSet* streams,
                           boost::asio::io_context* io_context, LedgerRunner* ledger,
                           std::string traceparent, AdmitReport admit)
    : registry_(registry),
      streams_(streams),
      io_context_(io_context),
      ledger_(ledger),
      traceparent_(std::move(traceparent)),
      admit_(std::move(admit)) {
  const absl::Status caller = admit_("");
  const auto admission = streams_->Add(this, /*is_watch=*/false, 0);
  absl::MutexLock lock(&mutex_);
  if (!caller.ok()) {
    End(ToGrpcStatus(caller, kErrorDomain));
  } else if (admission != StreamSet::Admission::kAdmitted || draining_) {
    End(DrainingStatus());
  } else {
    at_rest_ = true;
    StartRead(&request_);
  }
}

void ReportStream::OnReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    at_rest_ = false;
    if (ended_) return;
    if (!ok) return End(grpc::Status::OK);  // the client has no more, or is gone
  }
  if (ledger_->ledger() != nullptr) {
    ledger_->Run([this] { CountBatch(); });
  } else if (request_.certificates_size() <= kCertificatesInline) {
    CountBatch();
  } else {
    boost::asio::post(*io_context_, [this] { CountBatch(); });
  }
}

void ReportStream::CountBatch() {
  const auto count = [this]() -> absl::StatusOr<ReportAnswer> {
    const absl::Status admitted = admit_(request_.request());
    if (absl::IsNotFound(admitted)) return RequestRegistry::ReleaseAnswer(admitted.message());
    CERTKV_RETURN_IF_ERROR(admitted);
    CERTKV_ASSIGN_OR_RETURN(const std::vector<ReadCertificate> certificates,
                            CertificatesFromProto(request_));
    CERTKV_ASSIGN_OR_RETURN(const std::vector<ReturnedSlice> returned,
                            ReturnedSlicesFromProto(request_));
    CERTKV_ASSIGN_OR_RETURN(const std::vector<CanaryResult> canaries, CanariesFromProto(request_));
    return registry_->Report(request_.request(), {.reporter_id = request_.reporter_id(),
                                                  .batch_number = request_.batch_number(),
                                                  .lease_id = request_.lease_id(),
                                                  .certificates = certificates,
                                                  .failed_read_count = request_.failed_read_count(),
                                                  .returned = returned,
                                                  .is_last = request_.is_last(),
                                                  .canaries = canaries});
  };
  const auto begin = std::chrono::steady_clock::now();
  const absl::StatusOr<ReportAnswer> answer = count();
  registry_->mutable_counters()->batch_seconds.Observe(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin)
          .count());
  if (answer.ok() && answer->outside_tolerance > 0) {
    Log(LogLevel::kWarning, "reads_outside_tolerance",
        {{"request", request_.request()},
         {"reporter", request_.reporter_id()},
         {"reads", answer->outside_tolerance},
         {"traceparent", traceparent_}});
  }
  if (answer.ok() && answer->canary_mismatches > 0) {
    Log(LogLevel::kError, "canary_mismatch",
        {{"request", request_.request()},
         {"reporter", request_.reporter_id()},
         {"heads", answer->canary_mismatches},
         {"traceparent", traceparent_}});
  }
  absl::MutexLock lock(&mutex_);
  if (!answer.ok()) return End(ToGrpcStatus(answer.status(), kErrorDomain));
  response_.Clear();
  response_.set_request(request_.request());
  response_.set_batch_number(request_.batch_number());
  ReportAnswerToProto(*answer, registry_->NowMs(), &response_);
  StartWrite(&response_);
}

void ReportStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  if (!ok) return End(grpc::Status::CANCELLED);
  if (draining_) return End(DrainingStatus());
  at_rest_ = true;
  StartRead(&request_);
}

void ReportStream::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  // A read that is under way ends with the stream.
  if (at_rest_ && !ended_) End(DrainingStatus());
}

void ReportStream::End(const grpc::Status& status) {
  ended_ = true;
  Finish(status);
}

void ReportStream::OnDone() {
  streams_->Remove(this);
  delete this;
}

WatchStream::WatchStream(const RequestRegistry* registry, StreamSet* streams, std::string request,
                         int32_t watch_limit, const absl::Status& admitted)
    : registry_(registry), streams_(streams), request_(std::move(request)) {
  // Asked first, so that a watch of nothing never takes a place.
  const absl::Status known = admitted.ok() ? registry_->GetRisk(request_).status() : admitted;
  const auto admission = known.ok() ? streams_->Add(this, /*is_watch=*/true, watch_limit)
                                    : StreamSet::Admission::kAdmitted;
  absl::MutexLock lock(&mutex_);
  if (!known.ok()) {
    End(ToGrpcStatus(known, kErrorDomain));
  } else if (admission == StreamSet::Admission::kFull) {
    End(ToGrpcStatus(MakeError(absl::StatusCode::kResourceExhausted, "WATCH_LIMIT",
                               absl::StrCat(watch_limit,
                                            " watches are open, which is the most; close some, or "
                                            "raise watcher_limit in gate's config")),
                     kErrorDomain));
  } else if (admission == StreamSet::Admission::kDraining) {
    End(DrainingStatus());
  } else {
    Step();
  }
}

void WatchStream::Step() {
  if (ended_ || writing_) return;
  if (draining_) return End(DrainingStatus());
  absl::StatusOr<std::optional<RequestRisk>> risk =
      registry_->GetRiskIfChanged(request_, &change_count_);
  if (!risk.ok()) return End(ToGrpcStatus(risk.status(), kErrorDomain));
  if (!risk->has_value()) return;
  response_.Clear();
  RequestRiskToProto(**risk, &response_);
  writing_ = true;
  StartWrite(&response_);
}

void WatchStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  if (ended_) return;
  if (!ok) return End(grpc::Status::CANCELLED);
  if (response_.closed()) return End(grpc::Status::OK);
  if (draining_) End(DrainingStatus());
}

void WatchStream::Tick() {
  absl::MutexLock lock(&mutex_);
  Step();
}

void WatchStream::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  Step();
}

void WatchStream::OnCancel() {
  absl::MutexLock lock(&mutex_);
  if (!ended_ && !writing_) End(grpc::Status::CANCELLED);
}

void WatchStream::End(const grpc::Status& status) {
  ended_ = true;
  Finish(status);
}

void WatchStream::OnDone() {
  streams_->Remove(this);
  delete this;
}

}  // namespace certkv::gate
