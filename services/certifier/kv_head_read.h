// One read of the query heads of one KV head: attention, certificates, and the repair ladder until
// every head is certified within the tolerances or exact.
#ifndef CERTKV_SERVICES_CERTIFIER_KV_HEAD_READ_H_
#define CERTKV_SERVICES_CERTIFIER_KV_HEAD_READ_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/core/policy.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/finish_certificate.h"
#include "services/certifier/counters.h"
#include "services/certifier/read_kernels.h"
#include "services/certifier/read_plan.h"
#include "services/certifier/read_tiles.h"
#include "services/certifier/read_workspace.h"

namespace certkv::certifier {

// Largest worst_case_tv of an output that may be called exact. Computed from originals, a head has
// only the slack of float sums, c = 2 (d + 2) 2^-24 s ||q|| ||k||, and TV* <= tanh(c / 2): 1/16
// is reached at c = 0.125 nats, where s ||q|| ||k|| = 4000 nats at d = 256. Beyond that, float
// attention itself may be far off, and no output is given.
inline constexpr float kExactWorstCaseTvMax = 0.0625f;

// Reads of fewer tiles don't skip: two passes cost more than they save (docs/performance.md).
inline constexpr int32_t kSkippingTilesMin = 8;

// What one KV head's read writes. G = group size.
struct KvHeadResult {
  absl::Span<ReadCertificate> certificates;  // [G]
  absl::Span<float> outputs;                 // [G][d_v], or empty when not wanted
  absl::Span<uint8_t> tile_sources;          // [G][tile_count of the plan], or empty; also which
                                             // sub-blocks were skipped (kSkippedShift)
  // Taken from the policy's budget for the heads of this result; to be given back when the read
  // ends in an error. Written also on error.
  int64_t reserved_units = 0;
};

// Borrows all arguments as long as it lives.
class KvHeadRead {
 public:
  KvHeadRead(const ReadPlan& plan, int32_t kv_head, const ReadKernels& kernels,
             CertifierCounters* counters, ReadWorkspace* workspace);

  // On success every head of `result` is CERTIFIED within the lease's tolerances, or EXACT, or (in
  // mode OBSERVE) OBSERVED. On error nothing in `result` but reserved_units may be used.
  // Errors: as ReadTiles; FailedPrecondition [ARITHMETIC_LIMIT], float arithmetic itself can't be
  //         bounded, or an output is not finite.
  absl::Status Run(KvHeadResult* result);

 private:
  // Of what a pass read for one head.
  struct Amount {
    int64_t read_tokens = 0;
    int64_t skipped_tokens = 0;
    int64_t bytes = 0;
  };

  int32_t group_size() const { return plan_.cache->spec().group_size; }
  uint8_t* sources(int32_t g) { return workspace_->sources.data() + int64_t{g} * plan_.tile_count; }

  // The failure probability that head g's reads may have: a share of a kUnion lease's slice, where
  // its keys are dithered; 0 = none, its bounds hold for sure.
  float TakeShare(int32_t g);
  // How much of its tolerance head g may spend on skipping in its first read; 0 = it reads all.
  float FirstSkip(int32_t g);
  // Lists in pass_heads_ the pending heads that skip, or those that don't; false when there is
  // none.
  bool SelectHeads(bool skipping);
  // Reads the heads listed in pass_heads_ once and certifies them; the second skips.
  absl::Status Pass(KvHeadResult* result);
  absl::Status SkippingPass(KvHeadResult* result);
  absl::Status HoldOriginalsOfPass();
  AttendArgs PassArgs();
  // `finish_args` of the pass, to which this adds what both kinds of pass have in common.
  absl::Status Finish(FinishArgs finish_args, int32_t pass_index, float value_radius,
                      ReadCertificate* certificate);
  // Accepts head pass_heads_[pass_index], or moves it up the ladder.
  absl::Status Decide(const AttendArgs& args, int32_t pass_index, KvHeadResult* result);
  // Accepts it, or lets it skip less.
  absl::Status DecideSkipping(int32_t pass_index, KvHeadResult* result);
  // Takes it from the budget; false, and the head is to be exact, when there is too little.
  bool TakeFromBudget(int32_t g, KvHeadResult* result);
  absl::Status Accept(int32_t pass_index, Outcome outcome, const Amount& amount,
                      KvHeadResult* result);
  bool IsExact(int32_t g);
  int64_t RepairBytes(int32_t g);
  int64_t TailBytes() const;
  Amount AmountOf(int32_t g);
  Amount SkippingAmountOf(int32_t pass_index) const;

  const ReadPlan& plan_;
  const int32_t kv_head_;
  const ReadKernels& kernels_;
  CertifierCounters* const counters_;
  ReadWorkspace* const workspace_;
  ReadTiles tiles_;
  int32_t pass_count_ = 0;                  // heads in the present pass
  int32_t pass_heads_[kGroupSizeMax] = {};  // their numbers in the group
  // Of each head of the group.
  HeadTerms terms_[kGroupSizeMax];       // what it must satisfy
  bool is_pending_[kGroupSizeMax] = {};  // not accepted yet
  bool was_read_[kGroupSizeMax] = {};
  float share_[kGroupSizeMax] = {};  // failure probability
  float skip_[kGroupSizeMax] = {};   // what its next read may skip; 0: nothing, from now on
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_KV_HEAD_READ_H_
