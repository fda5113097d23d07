#include "services/certifier/attend_stream.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"

namespace certkv::certifier {
namespace {

absl::Status Draining() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                   "this certifier is shutting down; open the view at another one");
}

}  // namespace

absl::Status AttendStreamSet::Add(AttendStream* stream) {
  absl::MutexLock lock(&mutex_);
  if (draining_) return Draining();
  if (static_cast<int64_t>(streams_.size()) >= stream_limit_) {
    return MakeError(absl::StatusCode::kResourceExhausted, "STREAM_LIMIT",
                     absl::StrCat(stream_limit_,
                                  " Attend streams are open, which is the most; "
                                  "close some, or raise stream_limit"));
  }
  streams_.insert(stream);
  return absl::OkStatus();
}

void AttendStreamSet::Remove(AttendStream* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void AttendStreamSet::DrainAll() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  for (AttendStream* stream : streams_) stream->Drain();
}

AttendStream::AttendStream(const ReadContext* context, AttendStreamSet* streams)
    : context_(context), streams_(streams) {
  const absl::Status admitted = streams_->Add(this);
  absl::MutexLock lock(&mutex_);
  if (!admitted.ok()) return End(ToGrpcStatus(admitted, kErrorDomain));
  if (draining_) return End(ToGrpcStatus(Draining(), kErrorDomain));
  at_rest_ = true;
  StartRead(&request_);
}

void AttendStream::OnReadDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    at_rest_ = false;
    if (ended_) return;
    if (!ok) return End(grpc::Status::OK);  // the client has no more, or is gone
    if (request_.reads_size() > kReadsPerAttendMax) {
      return End(ToGrpcStatus(
          MakeError(absl::StatusCode::kInvalidArgument, "READ_LIMIT",
                    absl::StrCat("an AttendRequest has ", request_.reads_size(), " reads, at most ",
                                 kReadsPerAttendMax, "; send several")),
          kErrorDomain));
    }
  }
  response_.Clear();
  response_.set_request_number(request_.request_number());
  const ReadJobOptions options{.want_outputs = !request_.certificates_only(),
                               .audit = request_.audit()};
  StartReadJob(*context_, request_.reads(), options, response_.mutable_results(),
               [this] { Answer(); });
}

void AttendStream::Answer() {
  absl::MutexLock lock(&mutex_);
  StartWrite(&response_);
}

void AttendStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return;
  if (!ok) return End(grpc::Status::CANCELLED);
  if (draining_) return End(ToGrpcStatus(Draining(), kErrorDomain));
  at_rest_ = true;
  StartRead(&request_);
}

void AttendStream::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  // A read that is under way ends with the stream.
  if (at_rest_ && !ended_) End(ToGrpcStatus(Draining(), kErrorDomain));
}

void AttendStream::End(const grpc::Status& status) {
  ended_ = true;
  Finish(status);
}

void AttendStream::OnDone() {
  streams_->Remove(this);
  delete this;
}

}  // namespace certkv::certifier
