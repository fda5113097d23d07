// Attention of G query heads over one KV head that reads only a part of the sequence in full, with
// everything that its certificate needs (docs/bounds.md, section 9).
//
// Two passes. The first scans the coarse keys of every tile in the range and bounds, for each head
// and each sub-block of 16 tokens, what its exact weights can add up to. Each head then skips the
// sub-blocks of the smallest bounds, as many as its skip_tolerance allows. The second pass reads
// the rest in full, keys and values, and serves the softmax over them alone.
//
// Served distribution: p^ = softmax(l^ over R, and the sink logit), R = the tokens of the tail and
// of the sub-blocks that the head read; S = the others of the range.
//
// Contract of every backend, against exact arithmetic on the ORIGINALS:
//   skipped_lse_nat >= log sum_{t in S} e^{l_t} for the exact logits l_t, every rounding included
//                      (-infinity when S is empty);
//   for the tokens of R everything that kernels/ops/attend.h promises of l^, c, value_term,
//   rounding_term and the atoms; value_radius >= ||v_t||_2 for every t in R AND S.
// The share u = U / (U + L) that follows is at most skip_tolerance, except where even reading all
// sub-blocks of a finite bound can't reach it; then all are read.
// All bounds are rounded up; unknown is +infinity; none is ever NaN.
#ifndef CERTKV_KERNELS_OPS_ATTEND_PROGRESSIVE_H_
#define CERTKV_KERNELS_OPS_ATTEND_PROGRESSIVE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/backend.h"

namespace certkv {

// Can reads of this layout skip? The coarse plane of K8, K6 and K4 bounds a key by its scales; of
// other formats nothing is known from half of a code.
inline bool CanSkip(const TileLayout& layout) {
  return layout.key_format == KeyFormat::kK8 || layout.key_format == KeyFormat::kK6 ||
         layout.key_format == KeyFormat::kK4;
}

struct ProgressiveArgs {
  AttendArgs read;              // tile_sources null: originals are not read
  const float* skip_tolerance;  // [G], each in (0, 1)
};

// Atoms of a head: ceil(tail_count / 64) of the tail, the sink, then one per sub-block that was
// read, in any order, and empty ones (block_lse and block_max_logit -infinity, half-width 0).
inline int32_t ProgressiveSinkAtom(const AttendArgs& args) {
  return (args.tail_count + kTileTokens - 1) / kTileTokens;
}
// A: room for every sub-block, and for two batches that are not full.
inline int32_t ProgressiveAtomsMax(const AttendArgs& args) {
  return ProgressiveSinkAtom(args) + 1 + kSubBlocksPerTile * (args.tile_count + 2);
}

// In a record of where tiles were read from (kSource bits): bit kSkippedShift + b says that
// sub-block b was skipped. Never an argument of Attend.
inline constexpr int kSkippedShift = 4;

// G, T, d_v as in AttendResult, A = ProgressiveAtomsMax.
struct ProgressiveResult {
  float* outputs;            // [G][d_v], or null when not wanted
  float* lse_nat;            // [G] of R and the sink; +infinity: nothing is known of the head
  int32_t* atom_count;       // [G] atoms of the head: that many entries of its rows are written
  float* block_lse;          // [G][A] nats
  float* block_max_logit;    // [G][A] nats
  float* logit_half_width;   // [G][A] nats
  float* value_term;         // [G] sum_R p^ eta; value units
  float* rounding_term;      // [G] value units
  float* value_radius;       // [1] R_v, of R and S
  float* skipped_lse_nat;    // [G] nats
  uint8_t* sub_blocks_read;  // [G][T] bit b: the head read sub-block b of the tile
};

// Where a dense read of what isn't skipped writes: rows of A atoms as they are here.
inline AttendResult AttendedPart(const ProgressiveResult& result) {
  return {.outputs = result.outputs,
          .lse_nat = result.lse_nat,
          .block_lse = result.block_lse,
          .block_max_logit = result.block_max_logit,
          .logit_half_width = result.logit_half_width,
          .tile_value_error = nullptr,
          .value_term = result.value_term,
          .rounding_term = result.rounding_term,
          .value_radius = result.value_radius};
}

int64_t ProgressiveWorkspaceBytes(const AttendArgs& args);

// Errors: as Attend; InvalidArgument [ATTEND_ARGS_INVALID] also when a skip_tolerance is out of
//         range, tile_sources is not null or the layout can't skip. On error the results are
//         unspecified and must not be used.
// Threads: as Attend.
absl::Status AttendProgressive(Backend backend, const ProgressiveArgs& args,
                               const ProgressiveResult& result, void* workspace);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_ATTEND_PROGRESSIVE_H_
