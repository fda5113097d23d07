// The finishing step on a GPU: kernels/ops/finish_certificate.h says what is computed, here is how
// it is launched. One launch finishes all heads of many reads, right after the launches that read
// them. Needs no CUDA to include.
//
// Nothing is allocated and nothing waits, as in attend.h. How the bound is found stands in
// finish_search.cuh; it is a bound of its own, up to a fiftieth above the CPU's.
#ifndef CERTKV_KERNELS_CUDA_FINISH_H_
#define CERTKV_KERNELS_CUDA_FINISH_H_

#include <cstdint>

#include "kernels/cuda/attend.h"
#include "kernels/ops/finish_certificate.h"

namespace certkv::cuda {

// Up to so many atoms of a head the bound is computed from each as it is, above it from bins of
// half-widths, 128 an octave.
inline constexpr int32_t kFinishExactAtomsMax = 512;
// More atoms than a read can have; a head with more gets worst_case_tv 1.
inline constexpr int32_t kFinishAtomsMax = 1 << 21;

// All heads of one read, in device memory; its addresses are of the device. A = atom_stride.
struct FinishRead {
  const float* block_lse;         // [G][A] nats
  const float* block_max_logit;   // [G][A] nats
  const float* logit_half_width;  // [G][A] nats
  const float* top_half_width;    // [G][A] nats, or null: the same
  const float* value_term;        // [G]
  const float* rounding_term;     // [G]
  const float* value_radius;      // [1]
  const float* skipped_lse_nat;   // [G] nats, or null: every token was read
  const int32_t* atom_counts;     // [G] of the head, or null: all A
  const float* tv_tolerance;      // [G], in [0, 1]; 0, and what isn't: as tight as it can
  Certificate* certificates;      // [G] out
  int32_t group_size;             // G
  int32_t atom_stride;
  int32_t sink_index;  // as in FinishArgs
};

// Of what LaunchAttend writes for the read.
FinishRead PlanFinish(const AttendRead& read, const float* tv_tolerance, Certificate* certificates);

struct FinishPlan {
  int32_t read_count;
  int32_t group_size;  // of the read that has most
  int32_t atom_count;  // the same
};
// `reads` are host addresses.
FinishPlan PlanFinishLaunch(const FinishRead* reads, int32_t read_count);

// Queues the kernel. `reads` is a device address. 0, or the number of a cudaError_t; then nothing
// was written.
int LaunchFinish(const FinishPlan& plan, const FinishRead* reads, CUstream_st* stream);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_FINISH_H_
