// What one Attend of the CPU backend works on. Plain data in the caller's workspace: attend.cc
// prepares it, the kernels of one instruction set run over it, attend.cc turns it into results.
//
// This header is read by translation units compiled for different instruction sets. It therefore
// has no inline functions: the linker keeps one copy of those, and it could be the wrong one.
//
// Units: logits in nats. Softmax weights are powers of two relative to a head's reference, an
// integer `ref` in log2 units: weight = 2^(logit * log2(e) - ref). As references are integers, a
// change of reference is exact.
#ifndef CERTKV_KERNELS_CPU_ATTEND_STATE_H_
#define CERTKV_KERNELS_CPU_ATTEND_STATE_H_

#include <cstdint>

#include "kernels/core/limits.h"
#include "kernels/core/tile_layout.h"
#include "kernels/cpu/finish_state.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/backend.h"

namespace certkv::cpu {

// Rows of the workspace arrays have fixed lengths, so that a kernel finds the rows of several heads
// at constant distances. Rotated values are summed in the kernels' own order, in whole vectors (80
// channels are stored as 96 and may be summed as 128); 256 holds every d_v.
inline constexpr int kRow = kHeadDimMax;
inline constexpr int kTermRow = kHeadDimMax / 2;

// kDitherLattice of kernels/bounds/dither.h, which has too much for this header; attend.cc
// compares.
inline constexpr float kDitherLatticeFloat = 0x1p-13f;

// Heads that kernels take at once where they need one number for each (attend_quad.h), and room for
// so many from any head on.
inline constexpr int kQuadHeads = 4;
inline constexpr int kHeadLanes = kGroupSizeMax + kQuadHeads;

// What is known of each query head of the read. Sums are relative to 2^ref and in double, where
// scaling by a power of two is exact (weights below 2^-1000 of the largest vanish; attend.cc adds
// that back).
struct HeadStates {
  float ref[kHeadLanes];                          // log2 units, integers; kRefNone at first
  float query_norm[kHeadLanes];                   // >= logit_scale * ||q||
  float band_norm[kWitnessBandsMax][kHeadLanes];  // >= logit_scale * ||q_b|| per witness band
  float dither_factor[kHeadLanes];   // DitherFactor of the failure probability; 0: not to be used
  double mass[kHeadLanes];           // sum of weights, sink included
  double zero[kHeadLanes];           // sum of weight * value zero, and the weights' rounding at the
                                     // middle code
  double weight_error[kHeadLanes];   // sum of |weight * value scale - its 15-bit rounding|, rounded
                                     // up
  double skipped[kHeadLanes];        // mass of the tokens whose values were not read
  double rotated_reach[kHeadLanes];  // sum of weight * (largest |scale| * levels + |zero|) of the
                                     // tile
  double plain_reach[kHeadLanes];    // sum of weight * (bound on ||v||_2) over 16-bit values
  double eta[kHeadLanes];            // sum of weight * eta
  bool poisoned[kHeadLanes];         // a logit may be infinite or NaN
};

inline constexpr float kRefNone = -0x1p120f;

struct AttendState {
  const AttendArgs* args;
  const AttendResult* result;
  int32_t head_dim;
  int32_t value_dim;
  int32_t atoms_per_tile;
  int32_t atom_count;       // atoms a head has room for
  int32_t first_tail_atom;  // those of the tail begin here
  int32_t tile_begin;       // tiles that the range touches: tile_begin <= t < tile_end
  int32_t tile_end;
  float code_centre;  // AffineDepth of the key format
  float code_half_range;
  float value_levels;   // 15, 255, or 0 for 16-bit values
  int32_t key_lines;    // cache lines to prefetch per step of the score loops, or -1: not set
  int32_t value_lines;  // and of the value loops
  float value_radius;   // running maximum of ||v||_2
  HeadStates heads;

  // Workspace arrays, G = group_size rows unless said otherwise.
  float* queries;       // [G][kRow] logit_scale * q
  float* pair_queries;  // [G][kRow] the same in the channel order of byte quads; FP8 only
  float* scores;        // [G][64] logits of a tile; then its weights, where values are 16-bit
  int16_t* weights;     // [G][64] 15-bit weights of a tile, where values are quantized
  float* weight_unit;   // [G + kQuadHeads]
  int32_t* terms;       // [G][kTermRow] query terms of the tile
  float* term_unit;     // [G + kQuadHeads]
  float* term_base;     // [G + kQuadHeads]
  int32_t* term_bias;   // [G + kQuadHeads]
  float* rotated;       // [G][kRow] sums of weight * scale * code, in kernel order
  float* plain;         // [G][kRow] sums of weight * value, of 16-bit values
  float* tile_scale;    // [kRow] scale of each key channel of the tile
  float* tile_middle;   // [kRow] key at code 128
  float* witness;       // [4][64] decoded witnesses of the tile, by band
  const float* witness_table;  // [256] w(code) at exponent 0
  float* atom_ref;             // [G][A] reference of the mass in result->block_lse
  float* tile_ref;             // [G][T] reference of the sum in result->tile_value_error
};

// What the coarse scan of a progressive read leaves, G = group_size, T = tile_count. A tile's
// bounds are relative to 2^tile_ref.
struct ScanState {
  float* upper;     // [G][4 T] per sub-block: bound on sum 2^(l log2(e)); 0 outside the range,
                    // +infinity where the coarse logits say nothing
  float* shrink;    // [G][T] 2^(-c log2(e)) of the tile's coarse half-width c
  float* tile_ref;  // [G][T] log2 units, integers; kRefNone where the bounds are +infinity
  float* ref;       // [G] the largest tile_ref
  float* top;       // [G] log2 units: no bound is above 16 * 2^top, but for its rounding
};

// The kernels of one instruction set.
struct AttendKernels {
  // Tiles and tail. Leaves in result: block_lse = mass of the atom relative to 2^atom_ref
  // (+infinity where poisoned), block_max_logit and logit_half_width final, tile_value_error = sum
  // of weight * eta relative to 2^tile_ref.
  void (*run)(AttendState* state);
  // block_lse to nats; tile_value_error divided by the head's mass, rounded up.
  void (*finish_atoms)(const AttendState* state);
  // Where rotated channel i lies in a row of `rotated`.
  int (*rotated_index)(const AttendState* state, int channel);
  FinishMassesFunction finish_masses;
  // The parts of a progressive read. Tail: as `run`, without the tiles.
  void (*run_tail)(AttendState* state);
  void (*scan)(AttendState* state, const ScanState* scan);
  // Reads `count` sub-blocks (numbered 4 tile + sub-block) in full for head g, into atoms from
  // `first_atom` on, as `run` does; 4 atoms for every 4 sub-blocks begun.
  void (*read_sub_blocks)(AttendState* state, int g, const int32_t* sub_blocks, int32_t count,
                          int32_t first_atom);
  // block_lse of head g's first `count` atoms to nats.
  void (*finish_head_atoms)(const AttendState* state, int g, int32_t count);
};

extern const AttendKernels kAttendPortable;
extern const AttendKernels kAttendAvx2;
extern const AttendKernels kAttendAvx512;

// K8D, for the tile whose scales are in `tile_scale`: takes sum_i q_i scale_i u_i, which is what
// the dither added, off the scores of the tokens first <= t < last, of the heads in `heads` (bit
// g). One function for all instruction sets.
void SubtractDither(AttendState* state, uint64_t identity_tag, int first, int last, uint32_t heads);

// Those of `isa`, one of SupportedIsas().
const AttendKernels& AttendKernelsOf(CpuIsa isa);

// Cache lines that one step of the loops over keys and over values asks for, each in [0, 8].
struct PrefetchSchedule {
  int32_t key_lines;
  int32_t value_lines;
};

// Attend with given kernels; `Attend` of cpu.h chooses them. A null schedule is the kernels' own;
// benchmarks try others.
void AttendWith(const AttendKernels& kernels, const AttendArgs& args, const AttendResult& result,
                void* workspace, const PrefetchSchedule* schedule);

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_STATE_H_
