// Request: one request's account at gate. Holds its policy lease, reports certificates in batches
// off the critical path, and renews the lease before it expires.
#ifndef CERTKV_CLIENTS_CPP_REQUEST_H_
#define CERTKV_CLIENTS_CPP_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "clients/cpp/options.h"
#include "clients/cpp/report_book.h"
#include "kernels/core/policy.h"

namespace certkv::client {

struct RequestOptions {
  std::string label;                       // free text for people
  const Tolerances* tolerances = nullptr;  // null = the policy's; may only be tighter
  ReadMode read_mode = ReadMode::kEnforce;
  std::string tenant;  // whose budget the request shares; "" = Options::tenant
  std::string model;   // "" = unknown
  // W3C trace context of the request's calls to gate and certifier, into their logs and those of
  // the store; "" or what is no traceparent = a new one.
  std::string traceparent;
};

// What gate knows of a request's risk; see RequestRisk in proto/certkv/gate/v1/gate.proto.
struct RiskSummary {
  std::string request;
  bool closed = false;
  int64_t read_count = 0;
  int64_t failed_read_count = 0;
  float risk_score = 0;
  float max_worst_case_tv = 0;
  double sum_worst_case_tv = 0;
  int64_t reads_certified_first = 0;
  int64_t reads_repaired_values = 0;
  int64_t reads_repaired_keys = 0;
  int64_t reads_repaired_head = 0;
  int64_t reads_repaired_layer = 0;
  int64_t reads_exact = 0;
  int64_t reads_observed = 0;
  int64_t repair_bytes = 0;
  int64_t canary_checks = 0;
  int64_t canary_mismatches = 0;
  double budget = 0;            // 0 = none
  double budget_committed = 0;  // given away or spent of it
};

// Threads: all calls are safe from several threads.
class Request {
 public:
  // Errors: InvalidArgument [REQUEST_ID_INVALID | TOLERANCE_INVALID]; ResourceExhausted
  //         [REQUEST_LIMIT]; Unavailable, gate can't be reached (read exact then, see Attention).
  static absl::StatusOr<std::unique_ptr<Request>> Open(const Options& options,
                                                       const std::string& request_id,
                                                       const RequestOptions& request_options);
  // A request without gate: every read is exact. For engines that must go on when gate is down.
  static std::unique_ptr<Request> Ungoverned(const std::string& request_id);
  virtual ~Request() = default;

  // The lease to read under now. After gate was lost and the last lease has expired, or when gate
  // ordered it, its read_mode is kExact. Doesn't block.
  virtual PolicyLease CurrentLease() = 0;
  // The same, for a reader: an output may be used only after account->Spend.
  virtual LeaseInUse UseLease() = 0;
  // The certifier that read under this lease is gone, and with it its account of the slice. What
  // was not spent is returned; with a budget, reads are exact until gate has given another lease.
  virtual void AbandonSlice(int64_t lease_id) = 0;

  // Goes along with the calls that are made for the request; "" = none.
  virtual std::string traceparent() const = 0;

  // Queues what was found of outputs that the engine used.
  virtual void ReportCanaries(absl::Span<const CanaryFinding> findings) = 0;

  // Queues certificates for gate; doesn't block unless 64 batches wait.
  virtual void Report(absl::Span<const ReadCertificate> certificates,
                      int64_t failed_read_count) = 0;
  // Waits until all that was reported is acknowledged.
  // Errors: Unavailable [GATE_UNREACHABLE], DeadlineExceeded [REPORT_TIMEOUT].
  virtual absl::Status Flush() = 0;

  virtual absl::StatusOr<RiskSummary> Risk() = 0;
  // Flushes and closes at gate. Also done by the destructor, which ignores errors.
  virtual absl::StatusOr<RiskSummary> Close() = 0;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_REQUEST_H_
