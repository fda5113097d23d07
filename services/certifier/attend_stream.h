// The Attend stream: one message of reads at a time, each answered before the next is read.
#ifndef CERTKV_SERVICES_CERTIFIER_ATTEND_STREAM_H_
#define CERTKV_SERVICES_CERTIFIER_ATTEND_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "services/certifier/read_job.h"

namespace certkv::certifier {

class AttendStream;

// The streams that are open, so that they can be counted and drained.
// Lock order: this lock before a stream's own. Threads: safe.
class AttendStreamSet {
 public:
  explicit AttendStreamSet(int32_t stream_limit) : stream_limit_(stream_limit) {}

  // Errors: Unavailable [DRAINING]; ResourceExhausted [STREAM_LIMIT].
  absl::Status Add(AttendStream* stream);
  // No call into the stream is running or begins afterwards.
  void Remove(AttendStream* stream);
  void DrainAll();

 private:
  const int32_t stream_limit_;
  absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<AttendStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

// Invariants: at most one of {read under way, job running, write under way}; Finish is called once,
// and nothing is started after it. Deletes itself when gRPC is done with it.
class AttendStream final : public grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse> {
 public:
  AttendStream(const ReadContext* context, AttendStreamSet* streams);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;
  // Ends the stream with UNAVAILABLE [DRAINING] as soon as no job runs. Threads: safe.
  void Drain();

 private:
  void Answer();
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ReadContext* const context_;
  AttendStreamSet* const streams_;
  v1::AttendRequest request_;
  v1::AttendResponse response_;
  absl::Mutex mutex_;
  bool at_rest_ ABSL_GUARDED_BY(mutex_) = false;  // waiting for the client
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_ATTEND_STREAM_H_
