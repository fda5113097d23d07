#include "clients/cpp/attention.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "clients/cpp/certifier_link.h"
#include "clients/cpp/now.h"
#include "clients/cpp/rpc.h"
#include "clients/cpp/stream_watchdog.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/call_trace.h"
#include "services/common/convert.h"
#include "services/common/random_id.h"

namespace certkv::client {
namespace {

namespace v1 = certkv::certifier::v1;

constexpr int64_t kMessageBudgetBytes = kMessageBytesMax / 2;  // queries or outputs of one message
constexpr int64_t kCertificateBytes = 96;                      // at most, on the wire
const absl::Duration kReopenBackoff = absl::Milliseconds(250);

// The certifier is gone or has forgotten us: reads go on in this process, or a new view is opened.
bool ViewIsGone(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || ReasonOf(status) == "VIEW_NOT_FOUND";
}

bool IsLeaseExpired(const absl::Status& status) {
  return ReasonOf(status) == "POLICY_LEASE_EXPIRED";
}

// May an output with this record be used under `lease`?
bool IsAllowed(const ReadCertificate& certificate, const PolicyLease& lease) {
  const HeadTerms terms = TermsOf(lease, certificate.layer, certificate.query_head);
  switch (certificate.outcome) {
    case Outcome::kExact:
      return true;
    case Outcome::kCertified:
      return (!terms.exact || lease.read_mode == ReadMode::kObserve) &&
             MeetsTolerances(certificate, terms.tolerances) &&
             (certificate.failure_probability == 0 || lease.risk_mode == RiskMode::kUnion);
    case Outcome::kObserved:
      return lease.read_mode == ReadMode::kObserve;
  }
  return false;
}

// The record of one head, if it is that of `head` in `read` and `lease` allows its output.
absl::StatusOr<ReadCertificate> ConvertCertificate(const type::Certificate& record, int32_t head,
                                                   const ReadRequest& read,
                                                   const PolicyLease& lease) {
  const absl::StatusOr<ReadCertificate> converted = ReadCertificateFromProto(record);
  if (!converted.ok()) {
    return MakeError(absl::StatusCode::kInternal, "ANSWER_INVALID",
                     absl::StrCat("the certifier answered layer ", read.layer, " head ", head,
                                  " with an invalid record: ", converted.status().message()));
  }
  const ReadCertificate& certificate = *converted;
  if (IsAllowed(certificate, lease) && certificate.layer == read.layer &&
      certificate.query_head == head && certificate.query_position == read.query_position) {
    return certificate;
  }
  return MakeError(
      absl::StatusCode::kInternal, "ANSWER_INVALID",
      absl::StrCat("the certifier answered layer ", read.layer, " head ", head, " position ",
                   read.query_position, " with an output of layer ", certificate.layer, " head ",
                   certificate.query_head, " position ", certificate.query_position, " that is ",
                   OutcomeName(certificate.outcome), " at worst_case_tv ",
                   certificate.worst_case_tv, ", tolerance ", lease.tolerances.tv_tolerance,
                   ", under a lease of mode ", ReadModeName(lease.read_mode), "; it is not used"));
}

absl::Status StatusOf(const v1::ReadResult& result) {
  if (result.code() == 0) return absl::OkStatus();
  return MakeError(static_cast<absl::StatusCode>(result.code()),
                   result.reason().empty() ? "READ_FAILED" : result.reason(), result.message());
}

// Invariants:
//  1. `view_` is 0 unless the certifier has acknowledged all blocks and tail tokens up to
//     `sent_blocks_` and `sent_tail_`.
//  2. A result with outputs has outcomes that its lease allows, for every head; anything else is
//     turned into an error here, whatever the certifier said.
//  3. Certified outputs were taken from the lease's slice (SliceAccount) before they are given out.
class AttentionImpl final : public Attention {
 public:
  AttentionImpl(Worker& worker, Sequence& sequence, Request& request)
      : worker_(worker),
        sequence_(sequence),
        request_(request),
        link_(worker.options(), worker.certifier_balancer()) {}

  ~AttentionImpl() override {
    CloseStream();
    if (view_ == 0) return;
    v1::CloseViewRequest request;
    request.set_view_id(view_);
    v1::CloseViewResponse response;
    CallUnary(kCloseTimeoutMs, Retry::kNever, [&](grpc::ClientContext& context) {
      SetTraceparent(request_.traceparent(), &context);
      return link_.stub()->CloseView(&context, request, &response);
    }).IgnoreError();
  }

  absl::Status OpenView(const PolicyLease& lease);
  // The tail's last token fills its block, which isn't sealed yet: no certifier takes such a tail.
  bool TailIsFull() const { return sequence_.tail().token_count == worker_.spec().block_tokens; }
  absl::Status Refresh() override;
  void SetAudit(bool audit) override { audit_ = audit; }
  absl::StatusOr<std::vector<ReadResult>> Attend(absl::Span<const ReadRequest> reads) override;
  absl::Status CheckUsed(const ReadRequest& read, const ReadResult& result,
                         absl::Span<const float> used) override;

 private:
  static constexpr int64_t kCloseTimeoutMs = 1000;

  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<v1::AttendRequest, v1::AttendResponse>> calls;
  };

  absl::Status CheckReads(absl::Span<const ReadRequest> reads) const;
  size_t ReadsPerMessage() const;
  void SetTail(v1::Tail* tail) const;
  // Makes sure that view and stream are there and know `lease`.
  absl::Status Prepare(const PolicyLease& lease);
  absl::Status UpdateView(const PolicyLease& lease);
  // One message there and back. Results of reads that failed have their status.
  absl::StatusOr<std::vector<ReadResult>> Exchange(absl::Span<const ReadRequest> reads,
                                                   const PolicyLease& lease);
  std::vector<ReadResult> AttendPart(absl::Span<const ReadRequest> reads);
  absl::StatusOr<ReadResult> ConvertResult(v1::ReadResult&& result, const ReadRequest& read,
                                           const PolicyLease& lease) const;
  ReadResult ReadInProcess(const ReadRequest& read) const;
  // Takes what failed reads may have taken of a slice of failure_probability.
  void SpendFailed(const LeaseInUse& use, absl::Span<const ReadResult> results) const;
  // Takes the outputs from the slice; what does not fit is read exactly here instead.
  void SpendOrReadExactly(const LeaseInUse& use, absl::Span<const ReadRequest> reads,
                          std::vector<ReadResult>* results) const;
  void CloseStream();
  void DropView() {
    CloseStream();
    view_ = 0;
  }

  Worker& worker_;
  Sequence& sequence_;
  Request& request_;
  CertifierLink link_;
  StreamWatchdog watchdog_;
  std::unique_ptr<Stream> stream_;
  int64_t view_ = 0;
  size_t sent_blocks_ = 0;
  int32_t sent_tail_ = 0;
  int64_t sent_lease_sequence_ = -1;
  bool audit_ = false;
  std::mt19937_64 canary_random_{static_cast<uint64_t>(RandomId())};
  int64_t next_request_ = 1;
  absl::Time reopen_time_ = absl::InfinitePast();
};

void AttentionImpl::SetTail(v1::Tail* tail) const {
  const TailRef& ref = sequence_.tail();
  tail->set_staging_id(ref.token_count > 0 ? ref.staging_id : 0);
  tail->set_staging_slot(std::max(ref.staging_slot, 0));
  tail->set_token_count(ref.token_count);
}

absl::Status AttentionImpl::OpenView(const PolicyLease& lease) {
  if (absl::Now() < reopen_time_) {
    return MakeError(absl::StatusCode::kUnavailable, "CERTIFIER_UNREACHABLE",
                     "the certifier was unreachable a moment ago; it is tried again shortly");
  }
  v1::OpenViewRequest request;
  request.set_spec_digest(std::string(worker_.spec_digest().view()));
  const size_t block_count = std::min<size_t>(sequence_.blocks().size(), kBlocksPerCallMax);
  for (size_t i = 0; i < block_count; ++i) {
    *request.add_blocks() = BlockHandleToProto(sequence_.blocks()[i]);
  }
  const bool whole = block_count == sequence_.blocks().size();  // else UpdateView sends the rest
  if (whole) SetTail(request.mutable_tail());
  *request.mutable_policy() = PolicyLeaseToProto(lease, NowMs());
  request.set_tenant(worker_.options().tenant);
  v1::OpenViewResponse response;
  const absl::Status status = link_.OpenView(request_.traceparent(), request, &response);
  if (!status.ok()) {
    if (ViewIsGone(status)) reopen_time_ = absl::Now() + kReopenBackoff;
    return status;
  }
  view_ = response.view_id();
  sent_blocks_ = block_count;
  sent_tail_ = whole ? sequence_.tail().token_count : 0;
  sent_lease_sequence_ = lease.sequence;
  return whole ? absl::OkStatus() : UpdateView(lease);
}

absl::Status AttentionImpl::UpdateView(const PolicyLease& lease) {
  bool whole = false;
  while (!whole) {
    v1::UpdateViewRequest request;
    request.set_view_id(view_);
    const size_t end = std::min(sequence_.blocks().size(), sent_blocks_ + kBlocksPerCallMax);
    for (size_t i = sent_blocks_; i < end; ++i) {
      *request.add_appended_blocks() = BlockHandleToProto(sequence_.blocks()[i]);
    }
    whole = end == sequence_.blocks().size();
    v1::Tail* tail = request.mutable_tail();
    if (whole) SetTail(tail);  // else there is none: it comes after the last block
    *request.mutable_policy() = PolicyLeaseToProto(lease, NowMs());
    v1::UpdateViewResponse response;
    CERTKV_RETURN_IF_ERROR(CallUnary(
        worker_.options().rpc_timeout_ms, Retry::kNever, [&](grpc::ClientContext& context) {
          SetTraceparent(request_.traceparent(), &context);
          return link_.stub()->UpdateView(&context, request, &response);
        }));
    sent_blocks_ = end;
  }
  sent_tail_ = sequence_.tail().token_count;
  sent_lease_sequence_ = lease.sequence;
  return absl::OkStatus();
}

absl::Status AttentionImpl::Refresh() {
  if (view_ == 0 || TailIsFull())
    return absl::OkStatus();  // the next read opens a view on what is there then
  const PolicyLease lease = request_.CurrentLease();
  if (lease.lease_id == 0) return absl::OkStatus();
  const absl::Status status = UpdateView(lease);
  if (status.ok()) return status;
  DropView();  // it may know half of the update
  return ViewIsGone(status) ? absl::OkStatus() : status;
}

absl::Status AttentionImpl::Prepare(const PolicyLease& lease) {
  if (view_ == 0) {
    CERTKV_RETURN_IF_ERROR(OpenView(lease));
  } else if (lease.sequence != sent_lease_sequence_ || sent_blocks_ != sequence_.blocks().size() ||
             sent_tail_ != sequence_.tail().token_count) {
    CERTKV_RETURN_IF_ERROR(UpdateView(lease));
  }
  if (stream_ == nullptr) {
    stream_ = std::make_unique<Stream>();
    SetTraceparent(request_.traceparent(), &stream_->context);
    stream_->calls = link_.stub()->Attend(&stream_->context);
  }
  return absl::OkStatus();
}

void AttentionImpl::CloseStream() {
  if (stream_ == nullptr) return;
  stream_->context.TryCancel();
  stream_->calls->Finish();
  stream_.reset();
}

absl::Status AttentionImpl::CheckReads(absl::Span<const ReadRequest> reads) const {
  for (const ReadRequest& read : reads) {
    if (read.queries == nullptr) {
      return MakeError(absl::StatusCode::kInvalidArgument, "READ_INVALID",
                       "a read has no queries; point at [query_head_count][head_dim] floats");
    }
    CERTKV_RETURN_IF_ERROR(sequence_.CheckWritten(read.layer, read.query_position));
  }
  return absl::OkStatus();
}

size_t AttentionImpl::ReadsPerMessage() const {
  const CacheSpec& spec = worker_.spec();
  const int64_t heads = spec.query_head_count();
  const int64_t bytes =
      heads * (std::max(4 * spec.head_dim, 4 * spec.value_dim) + kCertificateBytes);
  return static_cast<size_t>(
      std::clamp<int64_t>(kMessageBudgetBytes / bytes, 1, kReadsPerAttendMax));
}

absl::StatusOr<ReadResult> AttentionImpl::ConvertResult(v1::ReadResult&& result,
                                                        const ReadRequest& read,
                                                        const PolicyLease& lease) const {
  const CacheSpec& spec = worker_.spec();
  CERTKV_RETURN_IF_ERROR(StatusOf(result));
  const auto heads = static_cast<size_t>(spec.query_head_count());
  const size_t output_bytes = heads * spec.value_dim * sizeof(float);
  if (result.certificates_size() != spec.query_head_count() ||
      result.outputs().size() != output_bytes) {
    return MakeError(
        absl::StatusCode::kInternal, "ANSWER_INVALID",
        absl::StrCat("the certifier answered layer ", read.layer, " with ",
                     result.certificates_size(), " certificates and ", result.outputs().size(),
                     " output bytes, expected ", heads, " and ", output_bytes));
  }
  ReadResult converted;
  converted.read_time_ns = result.read_time_ns();
  for (const auto& record : result.certificates()) {
    const auto head = static_cast<int32_t>(converted.certificates.size());
    CERTKV_ASSIGN_OR_RETURN(const ReadCertificate certificate,
                            ConvertCertificate(record, head, read, lease));
    converted.certificates.push_back(certificate);
  }
  converted.outputs.resize(heads * spec.value_dim);
  std::memcpy(converted.outputs.data(), result.outputs().data(), output_bytes);
  converted.tile_sources.assign(result.tile_sources().begin(), result.tile_sources().end());
  converted.first_tile = result.first_tile();
  return converted;
}

absl::StatusOr<std::vector<ReadResult>> AttentionImpl::Exchange(absl::Span<const ReadRequest> reads,
                                                                const PolicyLease& lease) {
  CERTKV_RETURN_IF_ERROR(Prepare(lease));
  const CacheSpec& spec = worker_.spec();
  v1::AttendRequest request;
  request.set_request_number(next_request_++);
  request.set_audit(audit_);
  for (const ReadRequest& read : reads) {
    v1::Read* proto = request.add_reads();
    proto->set_view_id(view_);
    proto->set_layer(read.layer);
    proto->set_query_position(read.query_position);
    proto->set_queries(reinterpret_cast<const char*>(read.queries),
                       sizeof(float) * spec.query_head_count() * spec.head_dim);
    if (read.sink_logits != nullptr) {
      proto->mutable_sink_logits()->Add(read.sink_logits,
                                        read.sink_logits + spec.query_head_count());
    }
  }
  v1::AttendResponse response;
  const StreamWatchdog::Guard guard(watchdog_, &stream_->context,
                                    absl::Milliseconds(worker_.options().rpc_timeout_ms));
  if (!stream_->calls->Write(request) || !stream_->calls->Read(&response)) {
    const grpc::Status status = stream_->calls->Finish();
    stream_.reset();
    const absl::Status converted = FromGrpcStatus(status);
    return converted.ok() ? absl::UnavailableError("the certifier closed the stream") : converted;
  }
  if (response.request_number() != request.request_number() ||
      response.results_size() != request.reads_size()) {
    return MakeError(absl::StatusCode::kInternal, "ANSWER_INVALID",
                     "the certifier's answer is not that of the request");
  }
  std::vector<ReadResult> results(reads.size());
  for (size_t i = 0; i < reads.size(); ++i) {
    absl::StatusOr<ReadResult> result =
        ConvertResult(std::move(*response.mutable_results(static_cast<int>(i))), reads[i], lease);
    if (result.ok()) {
      results[i] = *std::move(result);
    } else {
      results[i].status = result.status();
    }
  }
  return results;
}

ReadResult AttentionImpl::ReadInProcess(const ReadRequest& read) const {
  absl::StatusOr<ReadResult> result = AttendExactInProcess(worker_, sequence_, read);
  if (absl::IsDataLoss(result.status()) && worker_.RepairBlocks(sequence_).ok()) {
    result = AttendExactInProcess(worker_, sequence_, read);
  }
  if (result.ok()) return *std::move(result);
  ReadResult failed;
  failed.status = result.status();
  failed.in_process = true;
  return failed;
}

void AttentionImpl::SpendOrReadExactly(const LeaseInUse& use, absl::Span<const ReadRequest> reads,
                                       std::vector<ReadResult>* results) const {
  for (size_t i = 0; i < reads.size(); ++i) {
    ReadResult& result = (*results)[i];
    if (!result.status.ok() || use.account->Spend(use.lease, result.certificates)) continue;
    ReadResult exact = ReadInProcess(reads[i]);
    // What the quantized read would have been tells gate why this one is exact.
    for (size_t head = 0; head < exact.certificates.size(); ++head) {
      exact.certificates[head].first_worst_case_tv = result.certificates[head].first_worst_case_tv;
    }
    result = std::move(exact);
  }
}

void AttentionImpl::SpendFailed(const LeaseInUse& use, absl::Span<const ReadResult> results) const {
  const int32_t heads = IsDithered(worker_.spec()) ? worker_.spec().query_head_count() : 0;
  for (const ReadResult& result : results) {
    const bool failed = !result.status.ok() && !IsLeaseExpired(result.status);
    if (failed) use.account->SpendFailed(use.lease, heads);
  }
}

std::vector<ReadResult> AttentionImpl::AttendPart(absl::Span<const ReadRequest> reads) {
  // A restarted certifier, a renewed lease or a repaired block deserves a second one.
  constexpr int kTries = 2;
  std::vector<ReadResult> results(reads.size());
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const LeaseInUse use = request_.UseLease();
    if (use.lease.lease_id == 0 || TailIsFull()) break;  // exact, here; gate may be gone
    absl::StatusOr<std::vector<ReadResult>> answered = Exchange(reads, use.lease);
    if (!answered.ok()) {
      DropView();
      if (ViewIsGone(answered.status())) request_.AbandonSlice(use.lease.lease_id);
      if (ViewIsGone(answered.status()) || IsLeaseExpired(answered.status())) continue;
      for (ReadResult& result : results) result.status = answered.status();
      return results;
    }
    SpendFailed(use, *answered);
    const bool again =
        std::any_of(answered->begin(), answered->end(), [](const ReadResult& result) {
          return !result.status.ok() &&
                 (ViewIsGone(result.status) || IsLeaseExpired(result.status));
        });
    if (again) {
      const bool forgotten = std::any_of(
          answered->begin(), answered->end(),
          [](const ReadResult& result) { return ReasonOf(result.status) == "VIEW_NOT_FOUND"; });
      if (forgotten) request_.AbandonSlice(use.lease.lease_id);
      DropView();
      continue;
    }
    const bool damaged =
        std::any_of(answered->begin(), answered->end(),
                    [](const ReadResult& result) { return absl::IsDataLoss(result.status); });
    const bool repaired = damaged && attempt == 0 && worker_.RepairBlocks(sequence_).ok();
    if (!repaired) {
      SpendOrReadExactly(use, reads, &*answered);
      return *std::move(answered);
    }
  }
  for (size_t i = 0; i < reads.size(); ++i) results[i] = ReadInProcess(reads[i]);
  return results;
}

absl::StatusOr<std::vector<ReadResult>> AttentionImpl::Attend(absl::Span<const ReadRequest> reads) {
  CERTKV_RETURN_IF_ERROR(CheckReads(reads));
  std::vector<ReadResult> results;
  results.reserve(reads.size());
  std::vector<ReadCertificate> certificates;
  int64_t failed_count = 0;
  const size_t part_max = ReadsPerMessage();
  for (size_t first = 0; first < reads.size(); first += part_max) {
    const auto part = reads.subspan(first, part_max);
    const absl::Status lease = sequence_.CheckLease();
    if (!lease.ok()) {
      results.resize(results.size() + part.size());
      for (size_t i = 0; i < part.size(); ++i) results[first + i].status = lease;
      failed_count += static_cast<int64_t>(part.size());
      continue;
    }
    for (ReadResult& result : AttendPart(part)) {
      if (result.status.ok()) {
        certificates.insert(certificates.end(), result.certificates.begin(),
                            result.certificates.end());
      } else {
        result.outputs.clear();
        ++failed_count;
      }
      results.push_back(std::move(result));
    }
  }
  if (!certificates.empty() || failed_count > 0) request_.Report(certificates, failed_count);
  const float share = request_.CurrentLease().canary_share;
  for (ReadResult& result : results) {
    result.canary = result.status.ok() && share > 0 &&
                    std::uniform_real_distribution<float>(0, 1)(canary_random_) < share;
  }
  return results;
}

absl::Status AttentionImpl::CheckUsed(const ReadRequest& read, const ReadResult& result,
                                      absl::Span<const float> used) {
  CERTKV_ASSIGN_OR_RETURN(const std::vector<CanaryFinding> findings,
                          CompareWithExact(worker_, sequence_, read, result, used));
  request_.ReportCanaries(findings);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Attention>> Attention::Open(Worker& worker, Sequence& sequence,
                                                           Request& request) {
  CERTKV_RETURN_IF_ERROR(sequence.CheckLease());
  auto attention = std::make_unique<AttentionImpl>(worker, sequence, request);
  const PolicyLease lease = request.CurrentLease();
  if (lease.lease_id != 0 && !attention->TailIsFull()) {
    const absl::Status status = attention->OpenView(lease);
    if (!status.ok() && !ViewIsGone(status) && !IsLeaseExpired(status)) return status;
  }
  return attention;
}

}  // namespace certkv::client
