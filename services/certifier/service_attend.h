// One Attend stream.
#ifndef CERTKV_SERVICES_CERTIFIER_SERVICE_ATTEND_H_
#define CERTKV_SERVICES_CERTIFIER_SERVICE_ATTEND_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "services/certifier/read_batch.h"
#include "services/common/access_file.h"

namespace certkv::certifier {

inline constexpr absl::string_view kErrorDomain = "certifier.certkv";

// UNAVAILABLE [DRAINING].
absl::Status DrainingError();

class AttendStream;

// The open streams, to be drained together. Threads: all methods may be called concurrently.
class AttendStreamSet {
 public:
  explicit AttendStreamSet(int32_t stream_limit) : stream_limit_(stream_limit) {}

  // Errors: Unavailable [DRAINING]; ResourceExhausted [STREAM_LIMIT].
  absl::Status Add(const std::shared_ptr<AttendStream>& stream);
  void Remove(const std::shared_ptr<AttendStream>& stream);
  void DrainAll();

 private:
  const int32_t stream_limit_;
  absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<std::shared_ptr<AttendStream>> streams_ ABSL_GUARDED_BY(mutex_);
};

// Messages are read while fewer than a limit are in flight, their reads run in parallel, and the
// answers go out in the order of the messages.
//
// Invariants:
//  1. messages_ holds the messages taken and not yet answered, in order; at most the limit.
//  2. One write runs at a time, and it is the answer of messages_.front().
//  3. Finish is called once, when no write runs and no batch is under way.
// Threads: gRPC's reactions and the ends of batches come from any thread.
class AttendStream final : public grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse> {
 public:
  // Who calls, asked for each message.
  using AdmitCaller = std::function<absl::StatusOr<IdentityPtr>()>;

  // Keeps itself alive until the call is done, and `owner`, which owns the other arguments, until
  // no thread works on its reads.
  static grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse>* Start(
      std::shared_ptr<const void> owner, BatchRunner* runner, AttendStreamSet* streams,
      int32_t messages_in_flight_max, AdmitCaller admit);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  // Takes no more messages; ends with `status` when those taken are answered.
  void EndWith(const absl::Status& status);

 private:
  // A message that was taken, until its answer is written.
  struct Message {
    v1::AttendRequest request;
    std::vector<BatchRead> reads;
    v1::AttendResponse response;
    bool is_ready = false;  // the answer is complete
  };

  AttendStream(std::shared_ptr<const void> owner, BatchRunner* runner, AttendStreamSet* streams,
               int32_t messages_in_flight_max, AdmitCaller admit)
      : owner_(std::move(owner)),
        runner_(runner),
        streams_(streams),
        messages_in_flight_max_(messages_in_flight_max),
        admit_(std::move(admit)) {}

  // Begins the reads of a message, or returns why it can't.
  absl::Status BeginBatch(Message* message);
  void OnBatchDone(Message* message);
  // Does what can be done now: write, read, or finish.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<const void> owner_;
  BatchRunner* const runner_;
  AttendStreamSet* const streams_;
  const int32_t messages_in_flight_max_;
  const AdmitCaller admit_;
  std::shared_ptr<AttendStream> self_;  // until OnDone
  absl::Mutex mutex_;
  std::deque<std::unique_ptr<Message>> messages_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Message> incoming_ ABSL_GUARDED_BY(mutex_);  // while a read runs
  int32_t batches_running_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_reads_ ABSL_GUARDED_BY(mutex_) = false;  // the client is done, or we are
  std::atomic<bool> is_broken_{false};                  // nobody takes answers any more
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status final_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_SERVICE_ATTEND_H_
