#include "services/certifier/service_attend.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/certifier/convert.h"
#include "services/common/errors.h"

namespace certkv::certifier {

absl::Status DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                   "this certifier is shutting down; open the view again at another one, or here "
                   "when it is back");
}

absl::Status AttendStreamSet::Add(const std::shared_ptr<AttendStream>& stream) {
  absl::MutexLock lock(&mutex_);
  if (draining_) return DrainingError();
  if (static_cast<int64_t>(streams_.size()) >= stream_limit_) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "STREAM_LIMIT",
        absl::StrCat(streams_.size(), " Attend streams are open, at most ", stream_limit_,
                     "; use one for many views, or raise certifier.stream_limit"));
  }
  streams_.insert(stream);
  return absl::OkStatus();
}

void AttendStreamSet::Remove(const std::shared_ptr<AttendStream>& stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void AttendStreamSet::DrainAll() {
  std::vector<std::shared_ptr<AttendStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    streams.assign(streams_.begin(), streams_.end());
  }
  for (const std::shared_ptr<AttendStream>& stream : streams) stream->EndWith(DrainingError());
}

grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse>* AttendStream::Start(
    std::shared_ptr<const void> owner, BatchRunner* runner, AttendStreamSet* streams,
    int32_t messages_in_flight_max, AdmitCaller admit) {
  const absl::Status caller = admit().status();
  std::shared_ptr<AttendStream> stream(new AttendStream(std::move(owner), runner, streams,
                                                        messages_in_flight_max, std::move(admit)));
  stream->self_ = stream;
  const absl::Status admitted = caller.ok() ? streams->Add(stream) : caller;
  if (!admitted.ok()) {
    stream->EndWith(admitted);
    return stream.get();
  }
  absl::MutexLock lock(&stream->mutex_);
  stream->Advance();
  return stream.get();
}

void AttendStream::OnReadDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<Message> message = std::move(incoming_);
  if (!ok) {
    no_more_reads_ = true;
  } else if (!is_broken_ && !is_finished_) {
    const absl::Status status = BeginBatch(message.get());
    if (status.ok()) {
      ++batches_running_;
      messages_.push_back(std::move(message));
    } else {
      no_more_reads_ = true;
      final_status_ = ToGrpcStatus(status, kErrorDomain);
    }
  }
  Advance();
}

absl::Status AttendStream::BeginBatch(Message* message) {
  CERTKV_ASSIGN_OR_RETURN(IdentityPtr caller, admit_());
  CERTKV_ASSIGN_OR_RETURN(message->reads, ReadsFromProto(message->request.reads()));
  message->response.set_request_number(message->request.request_number());
  BatchOptions options;
  options.want_outputs = !message->request.certificates_only();
  options.want_tile_sources = message->request.audit();
  options.is_cancelled = &is_broken_;
  options.caller = std::move(caller);
  message->request.clear_reads();  // the queries were copied
  runner_->Run(&message->reads, options, [self = self_, message] { self->OnBatchDone(message); });
  return absl::OkStatus();
}

void AttendStream::OnBatchDone(Message* message) {
  ReadsToProto(message->reads, message->response.mutable_results());
  message->reads.clear();
  absl::MutexLock lock(&mutex_);
  message->is_ready = true;
  --batches_running_;
  Advance();
}

void AttendStream::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mutex_);
  is_writing_ = false;
  messages_.pop_front();
  if (!ok) is_broken_ = true;
  Advance();
}

void AttendStream::OnCancel() {
  absl::MutexLock lock(&mutex_);
  is_broken_ = true;
  Advance();
}

void AttendStream::EndWith(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  no_more_reads_ = true;
  if (final_status_.ok()) final_status_ = ToGrpcStatus(status, kErrorDomain);
  Advance();
}

void AttendStream::Advance() {
  if (is_finished_) return;
  if (!is_broken_ && !is_writing_ && !messages_.empty() && messages_.front()->is_ready) {
    is_writing_ = true;
    StartWrite(&messages_.front()->response);
  }
  const bool is_idle = !is_writing_ && batches_running_ == 0;
  if (is_idle && (is_broken_ || (no_more_reads_ && messages_.empty()))) {
    is_finished_ = true;
    // A read that still runs ends with the call.
    return Finish(is_broken_ ? grpc::Status::CANCELLED : final_status_);
  }
  if (is_broken_ || no_more_reads_ || incoming_ != nullptr) return;
  if (static_cast<int64_t>(messages_.size()) >= messages_in_flight_max_) return;
  incoming_ = std::make_unique<Message>();
  StartRead(&incoming_->request);
}

void AttendStream::OnDone() {
  streams_->Remove(self_);
  // The last use of this object, unless a thread is just leaving Advance.
  const std::shared_ptr<AttendStream> last = std::move(self_);
}

}  // namespace certkv::certifier
