// Reads: from a plan to certificates and outputs, one KV head at a time, on the caller's threads.
//
// The contract of CertKV lives here: every head of a read that ends without an error is CERTIFIED
// within each tolerance of its policy lease, or EXACT, or, in mode OBSERVE, says that it is
// neither. Depends on kernels alone, so that a client may run it in its own process.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_ENGINE_H_
#define CERTKV_SERVICES_CERTIFIER_READ_ENGINE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/core/policy.h"
#include "services/certifier/counters.h"
#include "services/certifier/kv_head_read.h"
#include "services/certifier/read_kernels.h"
#include "services/certifier/read_plan.h"
#include "services/certifier/read_workspace.h"

namespace certkv::certifier {

// Where a read goes. Owned by the caller; unspecified, and not to be used, after an error.
struct ReadOutput {
  absl::Span<ReadCertificate> certificates;  // [query heads]
  absl::Span<float> outputs;                 // [query heads][d_v], or empty: not wanted
  // For an audit: where each tile of the plan was read from, kSource bits, [query heads][tile_count
  // of the plan]; or empty: not wanted.
  absl::Span<uint8_t> tile_sources = {};
};

// Threads: all methods may be called concurrently; a workspace by one call at a time.
class ReadEngine {
 public:
  // `counters` outlives the engine.
  ReadEngine(ReadKernels kernels, CertifierCounters* counters)
      : kernels_(std::move(kernels)), counters_(counters) {}

  // The query heads of one KV head. Adds to *reserved_units what was taken from the plan's budget,
  // also on error. Different KV heads of a plan may run at the same time.
  // Errors: as KvHeadRead::Run.
  absl::Status ReadKvHead(const ReadPlan& plan, int32_t kv_head, ReadWorkspace* workspace,
                          const ReadOutput& output, int64_t* reserved_units) const;

  // After all KV heads: `status` is the first error among them, or OK. Settles the budget with
  // `reserved_units`, the sum over KV heads, and completes the certificates. Returns `status`.
  absl::Status EndRead(const ReadPlan& plan, const absl::Status& status, int64_t reserved_units,
                       const ReadOutput& output) const;

  // A whole read on the calling thread.
  absl::Status Read(const ReadPlan& plan, ReadWorkspace* workspace, const ReadOutput& output) const;

 private:
  const ReadKernels kernels_;
  CertifierCounters* const counters_;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_ENGINE_H_
