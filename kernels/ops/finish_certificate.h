// The finishing step: from what Attend emits for one query head to its certificate.
#ifndef CERTKV_KERNELS_OPS_FINISH_CERTIFICATE_H_
#define CERTKV_KERNELS_OPS_FINISH_CERTIFICATE_H_

#include <cstdint>
#include <limits>
#include <memory>

#include "absl/status/status.h"
#include "kernels/ops/backend.h"

namespace certkv {

struct FinishArgs {
  int32_t atom_count;             // A, >= 1
  const float* block_lse;         // [A] nats, -infinity = empty atom
  const float* block_max_logit;   // [A] nats
  const float* logit_half_width;  // [A] nats
  int32_t sink_index;             // atom of the sink (c = 0, no value), or -1
  float value_term;
  float rounding_term;
  float value_radius;
  // The finishing step may stop tightening once the bound is within this; 0 = as tight as it can.
  float tv_tolerance;
  // log of an upper bound on sum_S e^l over the tokens S that no atom holds because the read
  // skipped them (kernels/ops/attend_progressive.h); -infinity: every token was read. value_radius
  // covers them.
  float skipped_lse_nat = -std::numeric_limits<float>::infinity();
  // [A] nats, of the token with the largest logit; null: the same as logit_half_width.
  const float* top_half_width = nullptr;
};

struct Certificate {
  float worst_case_tv = 1.0f;       // TV* (with skipping: u + (1 - u) TV*), in [0, 1]
  float skipped_share = 0.0f;       // u, in [0, 1]: the part of it that skipping costs
  float value_term = 0.0f;          // sum p^ eta, value units
  float output_error_bound = 0.0f;  // value_term + 2 worst_case_tv R_v + rounding_term
  float value_radius = 0.0f;        // R_v
  // kCpu: floats could say nothing, so that the reference bounded worst_case_tv, in double and
  // slowly: more than 2^17 atoms, or numbers that aren't finite.
  bool left_to_reference = false;
};

// Scratch of one thread, reused between calls; grows to the largest read seen, then never
// allocates.
class FinishWorkspace {
 public:
  FinishWorkspace();
  ~FinishWorkspace();
  FinishWorkspace(const FinishWorkspace&) = delete;
  FinishWorkspace& operator=(const FinishWorkspace&) = delete;
  struct State;
  State* state() { return state_.get(); }

 private:
  std::unique_ptr<State> state_;
};

// The reported masses are rounded, and a heavy token is set apart from the rest of its atom; both
// are paid for in worst_case_tv (about 2^-14, and 2^-12 more when a heavy token was enumerated).
// kReference always tightens as far as it can; kCpu and kCuda stop at tv_tolerance. kCuda finds a
// bound of its own (kernels/cuda/finish.h); host memory is copied there and back.
// Anything that can't be computed gives worst_case_tv 1 and infinite bounds, never less.
// Errors: InvalidArgument [FINISH_ARGS_INVALID], an array or the workspace is null, or a count,
//         sink_index or tv_tolerance is out of range; kCuda: as kernels/ops/device.h.
//         *certificate is unchanged.
// Threads: concurrent calls are safe with a workspace each. Does not block.
absl::Status FinishCertificate(Backend backend, const FinishArgs& args, FinishWorkspace* workspace,
                               Certificate* certificate);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_FINISH_CERTIFICATE_H_
