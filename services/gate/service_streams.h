// The two streams of the Gate service.
#ifndef CERTKV_SERVICES_GATE_SERVICE_STREAMS_H_
#define CERTKV_SERVICES_GATE_SERVICE_STREAMS_H_

#include <grpcpp/grpcpp.h>

#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "services/gate/request_registry.h"
#include "services/gate/service_ledger.h"

namespace certkv::gate {

inline constexpr char kErrorDomain[] = "gate.certkv";

// A stream that the service can end. Streams delete themselves when gRPC is done with them.
class OpenStream {
 public:
  // Ends the stream with UNAVAILABLE [DRAINING] as soon as it is at rest. Threads: safe.
  virtual void Drain() = 0;
  // Called ten times a second. Threads: safe.
  virtual void Tick() {}

 protected:
  ~OpenStream() = default;
};

// The streams that are open, so that they can be ticked and drained.
// Lock order: this lock before a stream's own. Threads: safe.
class StreamSet {
 public:
  // Registers a stream. False: the server drains, or `limit` streams of the kind are open; the
  // stream is not registered then.
  enum class Admission : uint8_t { kAdmitted, kDraining, kFull };
  Admission Add(OpenStream* stream, bool is_watch, int32_t watch_limit);
  // A stream calls this before it is deleted; no call into it is running or begins afterwards.
  void Remove(OpenStream* stream);
  void DrainAll();
  void TickAll();

 private:
  absl::Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<OpenStream*> reports_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_set<OpenStream*> watches_ ABSL_GUARDED_BY(mutex_);
};

// Certificates in, directives out: one batch at a time, each answered before the next is read.
//
// Invariants: at most one of {read under way, batch being counted, write under way}; Finish is
// called once, and nothing is started after it.
class ReportStream final : public grpc::ServerBidiReactor<v1::ReportRequest, v1::ReportResponse>,
                           public OpenStream {
 public:
  // May the caller report for the request, or ("") at all?
  using AdmitReport = std::function<absl::Status(absl::string_view request)>;

  // `traceparent` of the caller, or "", for logs.
  ReportStream(RequestRegistry* registry, StreamSet* streams, boost::asio::io_context* io_context,
               LedgerRunner* ledger, std::string traceparent, AdmitReport admit);

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;
  void Drain() override;

 private:
  void CountBatch();
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  RequestRegistry* const registry_;
  StreamSet* const streams_;
  boost::asio::io_context* const io_context_;
  LedgerRunner* const ledger_;
  const std::string traceparent_;
  const AdmitReport admit_;
  v1::ReportRequest request_;
  v1::ReportResponse response_;
  absl::Mutex mutex_;
  bool at_rest_ ABSL_GUARDED_BY(mutex_) = false;  // waiting for the client
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// A request's risk now and whenever it changed, at most ten times a second.
//
// Invariants: one write is under way at most; Finish is called once, and nothing after it.
class WatchStream final : public grpc::ServerWriteReactor<v1::RequestRisk>, public OpenStream {
 public:
  WatchStream(const RequestRegistry* registry, StreamSet* streams, std::string request,
              int32_t watch_limit, const absl::Status& admitted);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void Drain() override;
  void Tick() override;

 private:
  void Step() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RequestRegistry* const registry_;
  StreamSet* const streams_;
  const std::string request_;
  v1::RequestRisk response_;
  absl::Mutex mutex_;
  int64_t change_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_SERVICE_STREAMS_H_
