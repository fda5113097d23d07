// Progressive reads on a GPU: kernels/ops/attend_progressive.h says what is computed, here is how
// it is launched. Seven launches, whatever the reads: the tail; the scan of the coarse planes; the
// first choice and the sub-blocks that it reads; the second choice, by what they came out to, and
// the sub-blocks that it adds; the combination. Nothing is allocated and nothing waits, as in
// attend.h. Needs no CUDA to include.
//
// All heads of a KV head read a tile together, as in a dense read: a sub-block is loaded once when
// one of them reads it, and weighs nothing for those that skipped it.
//
// Atoms of a head lie as kernels/ops/attend_progressive.h says: the tail, the sink, then four of
// every tile in their order, empty where the head skipped them.
#ifndef CERTKV_KERNELS_CUDA_PROGRESSIVE_H_
#define CERTKV_KERNELS_CUDA_PROGRESSIVE_H_

#include <cstdint>

#include "kernels/cuda/attend.h"
#include "kernels/cuda/finish.h"
#include "kernels/ops/attend_progressive.h"

namespace certkv::cuda {

enum ProgressivePart : int { kPartTail, kPartScan, kPartFirst, kPartSecond, kPartAll };
inline constexpr int kProgressiveParts = 5;

// What the choices of a read work on. B = 4 T.
struct SkipState {
  const float* skip_tolerance;  // [G], each in (0, 1)
  float* upper_lse;             // [G][B] log of a bound on sum e^l, nats; -infinity: no token
  float* coarse_lse;            // [G][B] of the coarse logits as they are, nats
  float* top;                   // [G] largest finite upper_lse
  int32_t* cut;                 // [G] buckets below it are skipped
  uint8_t* reading;             // [G][T] bit b: the head reads the sub-block in this pass
  uint8_t* sub_blocks_read;     // [G][T] result
  float* skipped_lse_nat;       // [G] result
  int32_t* atom_count;          // [G] result
};

// One read, in device memory. Made by PlanProgressive.
struct ProgressiveRead {
  AttendRead parts[kProgressiveParts];
  SkipState skip;
};

struct ProgressivePlan {
  int32_t read_count;
  int32_t group_size;
  int32_t part_splits[kProgressiveParts];  // of the read that has most; 0: nothing to launch
  int64_t shared_bytes;
};

// As PlanRead; `skip_tolerance` [G] and everything in `args.read` and `result` are device
// addresses, but the layout's. `scratch` is aligned to 8 bytes.
ProgressiveRead PlanProgressive(const ProgressiveArgs& args, const ProgressiveResult& result,
                                int32_t block_target, void* scratch, const QueryRows& queries = {});
int64_t ProgressiveScratchBytes(const AttendArgs& args, int32_t block_target);
ProgressivePlan PlanProgressiveLaunch(const ProgressiveRead* reads, int32_t read_count);

// Queues all of it. `reads` is a device address. 0, or the number of a cudaError_t; then what was
// queued before it says nothing.
int LaunchProgressive(const ProgressivePlan& plan, const ProgressiveRead* reads,
                      CUstream_st* stream);

// Of what LaunchProgressive writes for the read.
FinishRead PlanProgressiveFinish(const ProgressiveRead& read, const float* tv_tolerance,
                                 Certificate* certificates);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_PROGRESSIVE_H_
