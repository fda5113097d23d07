#include "clients/cpp/request.h"

#include <unistd.h>

#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cpp/now.h"
#include "clients/cpp/report_book.h"
#include "clients/cpp/rpc.h"
#include "clients/cpp/stream_watchdog.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/call_trace.h"
#include "services/common/convert.h"
#include "services/common/random_id.h"

namespace certkv::client {
namespace {

namespace v1 = certkv::gate::v1;

constexpr int32_t kCertificatesPerBatch = 4096;  // about 300 KB on the wire
const absl::Duration kReconnectBackoff = absl::Milliseconds(100);
const absl::Duration kCloseOnDestruction = absl::Seconds(1);

RiskSummary SummaryFromProto(const v1::RequestRisk& risk) {
  RiskSummary summary;
  summary.request = risk.request();
  summary.closed = risk.closed();
  summary.read_count = risk.read_count();
  summary.failed_read_count = risk.failed_read_count();
  summary.risk_score = risk.risk_score();
  summary.max_worst_case_tv = risk.max_worst_case_tv();
  summary.sum_worst_case_tv = risk.sum_worst_case_tv();
  summary.reads_certified_first = risk.reads_certified_first();
  summary.reads_repaired_values = risk.reads_repaired_values();
  summary.reads_repaired_keys = risk.reads_repaired_keys();
  summary.reads_repaired_head = risk.reads_repaired_head();
  summary.reads_repaired_layer = risk.reads_repaired_layer();
  summary.reads_exact = risk.reads_exact();
  summary.reads_observed = risk.reads_observed();
  summary.repair_bytes = risk.repair_bytes();
  summary.canary_checks = risk.canary_checks();
  summary.canary_mismatches = risk.canary_mismatches();
  summary.budget = risk.budget();
  summary.budget_committed = risk.budget_committed();
  return summary;
}

// One batch on the wire.
v1::ReportRequest ReportToProto(const std::string& name, int64_t reporter_id,
                                const OutgoingReport& report) {
  v1::ReportRequest batch;
  batch.set_request(name);
  batch.set_reporter_id(reporter_id);
  batch.set_batch_number(report.batch_number);
  batch.set_lease_id(report.lease_id);
  for (const ReadCertificate& certificate : report.certificates) {
    *batch.add_certificates() = ReadCertificateToProto(certificate);
  }
  batch.set_failed_read_count(report.failed_read_count);
  for (const CanaryFinding& finding : report.canaries) {
    v1::CanaryResult* canary = batch.add_canaries();
    canary->set_layer(finding.layer);
    canary->set_query_head(finding.query_head);
    canary->set_query_position(finding.query_position);
    canary->set_error(finding.error);
    canary->set_bound(finding.bound);
  }
  for (const SpentSlice& returned : report.returned) {
    v1::ReturnedSlice* slice = batch.add_returned_slices();
    slice->set_lease_id(returned.lease_id);
    slice->set_spent(returned.spent);
  }
  batch.set_is_last(report.is_last);
  return batch;
}

// A lease that is malformed is none. `asked_ms` is from before the report was sent.
ReportAnswer AnswerFromProto(const v1::ReportResponse& response, int64_t asked_ms) {
  ReportAnswer answer;
  answer.batch_number = response.batch_number();
  answer.release = response.directive().action() == v1::DIRECTIVE_ACTION_RELEASE;
  answer.force_exact = response.directive().action() == v1::DIRECTIVE_ACTION_FORCE_EXACT;
  if (!response.has_lease()) return answer;
  absl::StatusOr<PolicyLease> lease = PolicyLeaseFromProto(response.lease(), asked_ms);
  if (lease.ok()) answer.lease = *std::move(lease);
  return answer;
}

class UngovernedRequest final : public Request {
 public:
  explicit UngovernedRequest(std::string name) : name_(std::move(name)) {}
  PolicyLease CurrentLease() override { return ExactLease(name_); }
  LeaseInUse UseLease() override { return {ExactLease(name_), nullptr}; }
  void AbandonSlice(int64_t) override {}
  std::string traceparent() const override { return ""; }
  void ReportCanaries(absl::Span<const CanaryFinding>) override {}
  void Report(absl::Span<const ReadCertificate>, int64_t) override {}
  absl::Status Flush() override { return absl::OkStatus(); }
  absl::StatusOr<RiskSummary> Risk() override { return NoLedger(); }
  absl::StatusOr<RiskSummary> Close() override { return NoLedger(); }

 private:
  absl::Status NoLedger() const {
    return MakeError(absl::StatusCode::kFailedPrecondition, "REQUEST_UNGOVERNED",
                     absl::StrCat("request ", name_, " was opened without gate and has no ledger"));
  }
  const std::string name_;
};

// What a ReportBook says is done on a thread of its own: one batch after the other over one stream.
class GovernedRequest final : public Request {
 public:
  GovernedRequest(const Options& options, PolicyLease lease)
      : options_(options),
        name_(lease.request),
        reporter_id_(RandomId()),
        stub_(v1::Gate::NewStub(MakeChannel(options.gate_target, options))),
        lease_duration_ms_(std::max<int64_t>(lease.expire_time_ms - NowMs(), 100)),
        book_(std::move(lease)),
        thread_([this] { Run(); }) {}

  ~GovernedRequest() override {
    if (!closed_) CloseWithin(kCloseOnDestruction).status().IgnoreError();
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
  }

  std::string traceparent() const override { return options_.traceparent; }
  PolicyLease CurrentLease() override { return UseLease().lease; }
  LeaseInUse UseLease() override {
    absl::MutexLock lock(&mutex_);
    return book_.UseLease(NowMs());
  }
  void AbandonSlice(int64_t lease_id) override {
    absl::MutexLock lock(&mutex_);
    book_.AbandonSlice(lease_id);
  }

  void ReportCanaries(absl::Span<const CanaryFinding> findings) override;
  void Report(absl::Span<const ReadCertificate> certificates, int64_t failed_read_count) override;
  absl::Status Flush() override { return FlushWithin(absl::Milliseconds(options_.rpc_timeout_ms)); }
  absl::StatusOr<RiskSummary> Risk() override;
  absl::StatusOr<RiskSummary> Close() override {
    return CloseWithin(absl::Milliseconds(options_.rpc_timeout_ms));
  }

 private:
  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::ReportRequest, v1::ReportResponse>> calls;
  };

  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || book_.Front() != nullptr || book_.wants_lease();
  }
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || book_.HasRoom();
  }
  bool IsDrained() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return book_.Front() == nullptr; }

  absl::Status FlushWithin(absl::Duration timeout);
  absl::StatusOr<RiskSummary> CloseWithin(absl::Duration timeout);
  void Run();
  // Sends one batch and takes the answer in. False when the stream broke.
  bool Exchange(Stream& stream, const v1::ReportRequest& batch);

  const Options options_;
  const std::string name_;
  const int64_t reporter_id_;
  const std::unique_ptr<v1::Gate::Stub> stub_;
  const int64_t lease_duration_ms_;
  bool closed_ = false;
  StreamWatchdog watchdog_;

  absl::Mutex mutex_;
  ReportBook book_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

void GovernedRequest::Report(absl::Span<const ReadCertificate> certificates,
                             int64_t failed_read_count) {
  do {
    const auto part = certificates.subspan(0, kCertificatesPerBatch);
    certificates.remove_prefix(part.size());
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(this, &GovernedRequest::HasRoom),
                                 absl::Milliseconds(options_.rpc_timeout_ms))) {
      book_.NoteLoss();  // gate is gone for longer than we can keep its certificates
      return;
    }
    book_.AddReport(part, std::exchange(failed_read_count, 0));
  } while (!certificates.empty());
}

void GovernedRequest::ReportCanaries(absl::Span<const CanaryFinding> findings) {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(this, &GovernedRequest::HasRoom),
                               absl::Milliseconds(options_.rpc_timeout_ms))) {
    book_.NoteLoss();
    return;
  }
  book_.AddCanaries(findings);
}

bool GovernedRequest::Exchange(Stream& stream, const v1::ReportRequest& batch) {
  v1::ReportResponse response;
  const int64_t asked_ms = NowMs();
  {
    const StreamWatchdog::Guard guard(watchdog_, &stream.context,
                                      absl::Milliseconds(options_.rpc_timeout_ms));
    if (!stream.calls->Write(batch) || !stream.calls->Read(&response)) return false;
  }
  absl::MutexLock lock(&mutex_);
  book_.TakeAnswer(AnswerFromProto(response, asked_ms));
  return true;
}

void GovernedRequest::Run() {
  std::unique_ptr<Stream> stream;
  for (;;) {
    v1::ReportRequest batch;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(this, &GovernedRequest::HasWork),
                              absl::Milliseconds(lease_duration_ms_ / 3));
      if (stopping_) break;
      if (book_.Front() == nullptr) {
        if (book_.is_closing()) continue;  // the last batch was acknowledged
        book_.QueueRenewal(/*is_last=*/false);
      }
      batch = ReportToProto(name_, reporter_id_, *book_.Front());
    }
    if (stream == nullptr) {
      stream = std::make_unique<Stream>();
      SetTraceparent(options_.traceparent, &stream->context);
      stream->calls = stub_->Report(&stream->context);
    }
    if (Exchange(*stream, batch)) continue;
    stream.reset();
    absl::MutexLock lock(&mutex_);
    mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kReconnectBackoff);
  }
  if (stream != nullptr) {
    stream->context.TryCancel();
    stream->calls->Finish();
  }
}

absl::Status GovernedRequest::FlushWithin(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(absl::Condition(this, &GovernedRequest::IsDrained), timeout)) {
    return MakeError(
        absl::StatusCode::kDeadlineExceeded, "REPORT_TIMEOUT",
        absl::StrCat(book_.waiting_count(), " batches of ", name_,
                     " are not acknowledged by gate after ", absl::FormatDuration(timeout),
                     "; they are sent again while the request is open"));
  }
  if (!book_.is_incomplete()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "LEDGER_INCOMPLETE",
                   absl::StrCat("gate was unreachable for so long that certificates of ", name_,
                                " were lost; its reads were exact since"));
}

absl::StatusOr<RiskSummary> GovernedRequest::Risk() {
  v1::GetRequestRiskRequest request;
  request.set_request(name_);
  v1::RequestRisk response;
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->GetRequestRisk(&context, request, &response);
      }));
  return SummaryFromProto(response);
}

absl::StatusOr<RiskSummary> GovernedRequest::CloseWithin(absl::Duration timeout) {
  closed_ = true;
  {
    absl::MutexLock lock(&mutex_);
    book_.Close();
  }
  CERTKV_RETURN_IF_ERROR(FlushWithin(timeout));
  v1::CloseRequestRequest request;
  request.set_request(name_);
  v1::RequestRisk response;
  CERTKV_RETURN_IF_ERROR(CallUnary(absl::ToInt64Milliseconds(timeout), Retry::kIdempotent,
                                   [&](grpc::ClientContext& context) {
                                     SetTraceparent(options_.traceparent, &context);
                                     return stub_->CloseRequest(&context, request, &response);
                                   }));
  return SummaryFromProto(response);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Request>> Request::Open(const Options& options,
                                                       const std::string& request_id,
                                                       const RequestOptions& request_options) {
  Options resolved = ResolveTargets(options);
  resolved.gate_target = StartAnywhere(resolved.gate_target, static_cast<uint64_t>(RandomId()));
  resolved.traceparent = TraceparentOrNone(request_options.traceparent);
  if (resolved.traceparent.empty()) resolved.traceparent = MakeTraceparent();
  CERTKV_RETURN_IF_ERROR(CheckAccess(resolved));
  const auto stub = v1::Gate::NewStub(MakeChannel(resolved.gate_target, resolved));
  v1::OpenRequestRequest request;
  request.set_request_id(request_id);
  request.set_label(request_options.label);
  if (request_options.tolerances != nullptr) {
    *request.mutable_tolerances() = TolerancesToProto(*request_options.tolerances);
  }
  request.set_read_mode(ReadModeToProto(request_options.read_mode));
  request.set_tenant(request_options.tenant.empty() ? options.tenant : request_options.tenant);
  request.set_model(request_options.model);
  v1::OpenRequestResponse response;
  const int64_t asked_ms = NowMs();
  CERTKV_RETURN_IF_ERROR(
      CallUnary(resolved.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(resolved.traceparent, &context);
        return stub->OpenRequest(&context, request, &response);
      }));
  CERTKV_ASSIGN_OR_RETURN(PolicyLease lease, PolicyLeaseFromProto(response.lease(), asked_ms));
  return std::make_unique<GovernedRequest>(resolved, std::move(lease));
}

std::unique_ptr<Request> Request::Ungoverned(const std::string& request_id) {
  return std::make_unique<UngovernedRequest>(absl::StrCat("requests/", request_id));
}

}  // namespace certkv::client
