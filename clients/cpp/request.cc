#include "clients/cpp/request.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
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

constexpr int32_t kBatchesWaitingMax = 64;
constexpr int32_t kSlicesReturnableMax = 7;      // and the lease in use: 8, as at gate
constexpr int32_t kCertificatesPerBatch = 4096;  // about 300 KB on the wire
const absl::Duration kReconnectBackoff = absl::Milliseconds(100);
const absl::Duration kCloseOnDestruction = absl::Seconds(1);

int64_t NowMs() { return absl::ToUnixMillis(absl::Now()); }

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
  summary.budget = risk.budget();
  summary.budget_committed = risk.budget_committed();
  return summary;
}

PolicyLease ExactLease(const std::string& request) {
  PolicyLease lease;
  lease.request = request;
  lease.read_mode = ReadMode::kExact;
  return lease;
}

class UngovernedRequest final : public Request {
 public:
  explicit UngovernedRequest(std::string name) : name_(std::move(name)) {}
  PolicyLease CurrentLease() override { return ExactLease(name_); }
  LeaseInUse UseLease() override { return {ExactLease(name_), nullptr}; }
  void AbandonSlice(int64_t) override {}
  std::string traceparent() const override { return ""; }
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

// Invariants:
//  1. Batches are acknowledged in order; the front of `waiting_` is the one that is (re)sent.
//  2. The lease only moves forward in `sequence`.
//  3. Once gate has said RELEASE, or certificates could not be kept for it, every lease given out
//     is exact, and Close() says so.
//  4. `account_` is that of `lease_`; the accounts of leases before it are in `retired_` until they
//     are returned.
class GovernedRequest final : public Request {
 public:
  GovernedRequest(const Options& options, PolicyLease lease)
      : options_(options),
        name_(lease.request),
        reporter_id_(RandomId()),
        stub_(v1::Gate::NewStub(MakeChannel(options.gate_target))),
        lease_duration_ms_(std::max<int64_t>(lease.expire_time_ms - NowMs(), 100)),
        lease_(std::move(lease)),
        account_(std::make_shared<SliceAccount>(lease_)),
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
  PolicyLease CurrentLease() override {
    absl::MutexLock lock(&mutex_);
    return UsableLease();
  }
  LeaseInUse UseLease() override {
    absl::MutexLock lock(&mutex_);
    LeaseInUse use{UsableLease(), nullptr};
    if (use.lease.lease_id != 0) use.account = account_;
    return use;
  }
  void AbandonSlice(int64_t lease_id) override {
    absl::MutexLock lock(&mutex_);
    if (account_ != nullptr && account_->lease_id() == lease_id && account_->has_slice()) {
      account_->Close();
      retired_.push_back(std::move(account_));
      account_ = nullptr;
    }
  }

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

  PolicyLease UsableLease() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool usable = !released_ && !incomplete_ && !closing_ && account_ != nullptr &&
                        NowMs() < lease_.expire_time_ms;
    return usable ? lease_ : ExactLease(name_);
  }
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool wants_lease = account_ == nullptr && !released_ && !closing_;
    return stopping_ || !waiting_.empty() || wants_lease;
  }
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopping_ || waiting_.size() < kBatchesWaitingMax;
  }
  bool IsDrained() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return waiting_.empty(); }

  void TakeLease(PolicyLease lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Queues a batch without certificates, which renews the lease and returns the slices of retired
  // accounts that no read uses any more. The last one returns all, and asks for no lease.
  void QueueRenewal(bool is_last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  PolicyLease lease_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SliceAccount> account_ ABSL_GUARDED_BY(mutex_);  // null: abandoned
  std::vector<std::shared_ptr<SliceAccount>> retired_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  bool incomplete_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_batch_ ABSL_GUARDED_BY(mutex_) = 1;
  std::deque<v1::ReportRequest> waiting_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses the others
};

void GovernedRequest::Report(absl::Span<const ReadCertificate> certificates,
                             int64_t failed_read_count) {
  do {
    const auto part = certificates.subspan(0, kCertificatesPerBatch);
    certificates.remove_prefix(part.size());
    v1::ReportRequest batch;
    batch.set_request(name_);
    batch.set_reporter_id(reporter_id_);
    for (const ReadCertificate& certificate : part) {
      *batch.add_certificates() = ReadCertificateToProto(certificate);
    }
    batch.set_failed_read_count(std::exchange(failed_read_count, 0));
    absl::MutexLock lock(&mutex_);
    if (!mutex_.AwaitWithTimeout(absl::Condition(this, &GovernedRequest::HasRoom),
                                 absl::Milliseconds(options_.rpc_timeout_ms))) {
      incomplete_ = true;  // gate is gone for longer than we can keep its certificates
      return;
    }
    batch.set_batch_number(next_batch_++);
    batch.set_lease_id(lease_.lease_id);
    waiting_.push_back(std::move(batch));
  } while (!certificates.empty());
}

bool GovernedRequest::Exchange(Stream& stream, const v1::ReportRequest& batch) {
  v1::ReportResponse response;
  {
    const StreamWatchdog::Guard guard(watchdog_, &stream.context,
                                      absl::Milliseconds(options_.rpc_timeout_ms));
    if (!stream.calls->Write(batch) || !stream.calls->Read(&response)) return false;
  }
  absl::MutexLock lock(&mutex_);
  if (response.directive().action() == v1::DIRECTIVE_ACTION_RELEASE) released_ = true;
  if (response.has_lease()) {
    absl::StatusOr<PolicyLease> lease = PolicyLeaseFromProto(response.lease());
    if (lease.ok() && lease->sequence >= lease_.sequence) {
      TakeLease(*std::move(lease));
      if (response.directive().action() == v1::DIRECTIVE_ACTION_FORCE_EXACT) {
        lease_.read_mode = ReadMode::kExact;
      }
    }
  }
  if (!waiting_.empty() && waiting_.front().batch_number() == response.batch_number()) {
    waiting_.pop_front();
  }
  return true;
}

void GovernedRequest::TakeLease(PolicyLease lease) {
  const bool is_new = lease.lease_id != lease_.lease_id;
  lease_ = std::move(lease);
  if (!is_new) return;
  if (account_ != nullptr && account_->has_slice()) retired_.push_back(std::move(account_));
  // Gate keeps no more of them returnable either; what an older one did not spend stays spent.
  if (retired_.size() > kSlicesReturnableMax) retired_.erase(retired_.begin());
  account_ = std::make_shared<SliceAccount>(lease_);
}

void GovernedRequest::QueueRenewal(bool is_last) {
  v1::ReportRequest batch;
  batch.set_request(name_);
  batch.set_reporter_id(reporter_id_);
  batch.set_batch_number(next_batch_++);
  batch.set_lease_id(lease_.lease_id);
  batch.set_is_last(is_last);
  if (is_last && account_ != nullptr && account_->has_slice()) retired_.push_back(account_);
  // Nobody gets a reference to a retired account any more, so that the last user is this vector. A
  // read that still runs under a closed account finds that it cannot spend, and is exact.
  const auto ends = std::partition(
      retired_.begin(), retired_.end(), [this, is_last](const std::shared_ptr<SliceAccount>& one) {
        return !is_last && one.use_count() > 1 && one->lease_id() != lease_.lease_id;
      });
  for (auto account = ends; account != retired_.end(); ++account) {
    v1::ReturnedSlice* slice = batch.add_returned_slices();
    slice->set_lease_id((*account)->lease_id());
    slice->set_spent((*account)->Close());
  }
  retired_.erase(ends, retired_.end());
  waiting_.push_back(std::move(batch));
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
      if (waiting_.empty()) {
        if (closing_) continue;  // the last batch was acknowledged
        QueueRenewal(/*is_last=*/false);
      }
      batch = waiting_.front();
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
        absl::StrCat(waiting_.size(), " batches of ", name_, " are not acknowledged by gate after ",
                     absl::FormatDuration(timeout),
                     "; they are sent again while the request is open"));
  }
  if (!incomplete_) return absl::OkStatus();
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
    if (!std::exchange(closing_, true)) QueueRenewal(/*is_last=*/true);
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
  resolved.traceparent = TraceparentOrNone(request_options.traceparent);
  if (resolved.traceparent.empty()) resolved.traceparent = MakeTraceparent();
  const auto stub = v1::Gate::NewStub(MakeChannel(resolved.gate_target));
  v1::OpenRequestRequest request;
  request.set_request_id(request_id);
  request.set_label(request_options.label);
  if (request_options.tolerances != nullptr) {
    *request.mutable_tolerances() = TolerancesToProto(*request_options.tolerances);
  }
  request.set_read_mode(ReadModeToProto(request_options.read_mode));
  request.set_tenant(request_options.tenant);
  request.set_model(request_options.model);
  v1::OpenRequestResponse response;
  CERTKV_RETURN_IF_ERROR(
      CallUnary(resolved.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(resolved.traceparent, &context);
        return stub->OpenRequest(&context, request, &response);
      }));
  CERTKV_ASSIGN_OR_RETURN(PolicyLease lease, PolicyLeaseFromProto(response.lease()));
  return std::make_unique<GovernedRequest>(resolved, std::move(lease));
}

std::unique_ptr<Request> Request::Ungoverned(const std::string& request_id) {
  return std::make_unique<UngovernedRequest>(absl::StrCat("requests/", request_id));
}

}  // namespace certkv::client
