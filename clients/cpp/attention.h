// Attention: certified reads of one sequence.
//
// An output is certified within the tolerances of the request's policy lease, or exact, or an
// error. When the certifier can't be reached, or the lease has expired and gate is gone, the
// originals are read in this process (exact); when that is impossible too the read fails.
#ifndef CERTKV_CLIENTS_CPP_ATTENTION_H_
#define CERTKV_CLIENTS_CPP_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "kernels/core/policy.h"

namespace certkv::client {

// One layer and position, all query heads.
struct ReadRequest {
  int32_t layer = 0;
  int64_t query_position = 0;          // reads tokens 0 .. query_position, or the layer's window
  const float* queries = nullptr;      // [query_head_count][d]
  const float* sink_logits = nullptr;  // [query_head_count] nats, or null
};

struct ReadResult {
  absl::Status status;                        // of this read alone; no outputs unless OK
  std::vector<float> outputs;                 // [query_head_count][d_v]
  std::vector<ReadCertificate> certificates;  // one per query head
  bool in_process = false;                    // read here, because the certifier couldn't be used
  // Gate wants to know what the engine makes of this read: hand its outputs, as they were used, to
  // CheckUsed.
  bool canary = false;
  int64_t read_time_ns = 0;
  // With SetAudit(true): [query_head_count][tiles], kSource bits of kernels/ops/attend.h, and from
  // bit kSkippedShift of kernels/ops/attend_progressive.h on the sub-blocks that were skipped, for
  // the tiles that the read looked at, the sequence's tile `first_tile` first.
  std::vector<uint8_t> tile_sources;
  int32_t first_tile = 0;
};

// Threads: one call at a time.
class Attention {
 public:
  // Opens a view at the certifier, or one of several; when that one is gone, reads open it again at
  // another. If none can be reached, reads are exact in this process until a later call reaches
  // one. `worker`, `sequence`, `request` must outlive the result. Errors: FailedPrecondition
  // [LEASE_LOST]; Aborted [BLOCK_REUSED]; InvalidArgument.
  static absl::StatusOr<std::unique_ptr<Attention>> Open(Worker& worker, Sequence& sequence,
                                                         Request& request);
  virtual ~Attention() = default;

  // From now on results say where each tile was read from (for auditors; costs message bytes).
  virtual void SetAudit(bool audit) = 0;

  // Tells the certifier of blocks and tail tokens that were appended to the sequence since.
  // Errors: as Open.
  virtual absl::Status Refresh() = 0;

  // Reads in order; one result per read. Certificates are reported to gate. A read that meets
  // damaged bytes is done again once the store has repaired them, or fails with DATA_LOSS. A failed
  // read is in its result; the call itself fails only on misuse (InvalidArgument [READ_INVALID]).
  virtual absl::StatusOr<std::vector<ReadResult>> Attend(absl::Span<const ReadRequest> reads) = 0;

  // Compares the outputs that the engine used of a read, [query_head_count][d_v] as its next step
  // saw them, with exact attention, computed here from the originals, and reports what it finds to
  // gate. A defect of the engine's own kernels or memory shows there; certificates can't see it.
  // Errors: InvalidArgument [READ_INVALID], not that many numbers, or `result` is no result with
  //         outputs; as AttendExactInProcess. Nothing is reported then.
  virtual absl::Status CheckUsed(const ReadRequest& read, const ReadResult& result,
                                 absl::Span<const float> used) = 0;
};

// The outputs `used` of a read against its exact attention: one finding for each query head.
// Errors: as Attention::CheckUsed.
absl::StatusOr<std::vector<CanaryFinding>> CompareWithExact(const Worker& worker,
                                                            const Sequence& sequence,
                                                            const ReadRequest& read,
                                                            const ReadResult& result,
                                                            absl::Span<const float> used);

// The exact attention of one read from the originals that the worker maps: no certifier involved.
// Every tile is compared with its checksums first.
// Errors: Aborted [BLOCK_REUSED]; FailedPrecondition [LEASE_LOST]; InvalidArgument [READ_INVALID];
//         DataLoss [SCAN_CHECKSUM | DETAIL_CHECKSUM | ORIGINAL_CHECKSUM_MISMATCH |
//         TILE_FORMAT_MISMATCH | TILE_IDENTITY_MISMATCH].
absl::StatusOr<ReadResult> AttendExactInProcess(const Worker& worker, const Sequence& sequence,
                                                const ReadRequest& read);

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_ATTENTION_H_
