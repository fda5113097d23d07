// Attention of G query heads over one KV head of one sequence, with everything that its certificate
// needs, in one pass over the stored blocks. docs/bounds.md has the mathematics.
//
// The sequence is `tile_count` tiles of 64 tokens, then `tail_count` tokens in their original
// 16-bit form. Token t lies in tile t / 64, or in the tail at t - 64 * tile_count. The read covers
// tokens token_begin <= t < token_end (causal limit and sliding window are such ranges); tiles
// outside it are not touched, tokens outside it have weight exactly 0.
//
// Served logit of token t and head g, nats:  l^ = cap(logit_scale * q_g . k^_t)
// Served distribution:                       p^ = softmax(l^ over the range, and the sink logit)
// Output:                                    o^_g = sum_t p^_t v^_t
// where k^, v^ are the dequantized key and value, or the originals where tile_sources says so and
// in the tail.
//
// Contract of every backend, against exact arithmetic on the ORIGINAL keys and values:
//   |l^_t - l_t| <= logit_half_width of t's atom (K8D: but for failure_probability), arithmetic and
//   query rounding included, for the
//                   logits l^ of the distribution that was really served (the rounding of exp and
//                   of the softmax sum is inside logit_half_width too);
//   sum_t p^_t ||v_t - v^_t||_2 <= value_term;
//   || o^ - sum_t p^_t v^_t ||_2 <= rounding_term  (weight rounding, sums, rotation);
//   ||v_t||_2 <= value_radius for every t in the range;
//   |block_lse - exact log of the atom's served mass| <= BlockLseSlackNat(block_lse), and the same
//                   for block_max_logit and the atom's largest served logit; or both lie more than
//                   kNegligibleNat below lse_nat, where it doesn't matter what is reported.
// All bounds are rounded up; unknown is +infinity; none is ever NaN.
#ifndef CERTKV_KERNELS_OPS_ATTEND_H_
#define CERTKV_KERNELS_OPS_ATTEND_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/backend.h"

namespace certkv {

// Rounding of a block_lse or block_max_logit, nats: sums and exp (2^-14 covers 64 terms and a
// relative error of exp of 1e-6), and the spacing of floats at its magnitude. 0 for an empty atom.
// FinishCertificate adds it to the atom's half-width and to the result.
inline float BlockLseSlackNat(float block_lse) {
  if (block_lse == -std::numeric_limits<float>::infinity()) return 0;
  return 0x1p-14f + std::fabs(block_lse) * 0x1p-22f;
}

// Kernels may clamp weights at 2^-125 = e^-86.6 of the largest, so that an atom of 64 such tokens
// (+4.2 nats) is reported too high. A half-width above kLogitHalfWidthMaxNat is reported as
// +infinity, so such tokens have at most 2^24 * 2^-125 * e^(2 * 20) < 2^-43 of the exact
// probability, which FinishCertificate adds to its result.
inline constexpr float kNegligibleNat = 80.0f;
inline constexpr float kLogitHalfWidthMaxNat = 20.0f;

struct AttendTile {
  const uint8_t* scan;              // scan record, 64-byte aligned
  const uint8_t* detail;            // detail record, 64-byte aligned
  const uint16_t* original_keys;    // [64][d] token-major, or null when no source asks for it
  const uint16_t* original_values;  // [64][d_v], or null
};

// Where one head reads one tile from; bits of AttendArgs::tile_sources.
inline constexpr uint8_t kSourceQuantized = 0;
inline constexpr uint8_t kSourceOriginalKeys = 1;
inline constexpr uint8_t kSourceOriginalValues = 2;

// G = group_size, d and d_v of the layout, T = tile_count. Row-major. Host memory, borrowed until
// the call returns; outputs overlap nothing.
struct AttendArgs {
  const TileLayout* layout;
  OriginalDtype original_dtype;  // of tail and original_* arrays
  float logit_scale;             // > 0
  float soft_cap;                // nats, 0 = none
  int32_t group_size;            // G, [1, 16]
  const float* queries;          // [G][d], finite
  const float* sink_logits;      // [G] nats, or null; -infinity = none
  // [G], each in [0, 1), or null: all 0. K8D alone; 0: the half-widths hold for sure. Above 0: they
  // hold for all tokens of the range at once but for that probability, if the query does not depend
  // on the dither (docs/bounds.md, section 10).
  const float* failure_probability;
  // [d], LayerSpec::witness_weights of the KV head. Not null exactly when the layout has weights.
  const float* witness_weights;
  const AttendTile* tiles;      // [T]
  int32_t tile_count;           // T, [0, kTilesPerReadMax]
  const uint8_t* tile_sources;  // [G][T] kSource bits, or null: all quantized
  const uint16_t* tail_keys;    // [tail_count] rows of d
  const uint16_t* tail_values;  // [tail_count] rows of d_v
  int32_t tail_count;           // [0, kBlockTokensMax]
  int64_t tail_key_stride;      // elements, >= d
  int64_t tail_value_stride;    // elements, >= d_v
  int64_t token_begin;          // [0, token_end)
  int64_t token_end;            // (token_begin, 64 T + tail_count]
};

// Atoms: for each tile layout.atoms_per_tile() atoms in token order; then ceil(tail_count / 64)
// atoms of the tail; then one atom of the sink. Atoms without a token in the range have block_lse
// and block_max_logit -infinity, and logit_half_width and top_half_width 0.
inline int32_t AttendAtomCount(const AttendArgs& args) {
  const int32_t tail_atoms = (args.tail_count + kTileTokens - 1) / kTileTokens;
  return args.tile_count * args.layout->atoms_per_tile() + tail_atoms + 1;
}

// A = AttendAtomCount(args). Every array is written in full on success.
struct AttendResult {
  float* outputs;           // [G][d_v], or null when not wanted
  float* lse_nat;           // [G] log sum_t exp(l^_t), sink included; nats
  float* block_lse;         // [G][A] log sum over the atom's tokens; nats
  float* block_max_logit;   // [G][A] largest l^ of the atom; nats
  float* logit_half_width;  // [G][A] c of the atom's tokens; nats
  float* tile_value_error;  // [G][T] sum over the tile's tokens of p^_t eta_t; value units
  float* value_term;        // [G] sum_t p^_t eta_t; value units
  float* rounding_term;     // [G] value units
  float* value_radius;      // [1] R_v
  // [G][A] c of the token that has the atom's largest l^, at most logit_half_width, and less only
  // where tokens have witnesses of their own; nats. Null when not wanted.
  float* top_half_width = nullptr;
};

// Bytes of scratch that Attend needs for a read of that shape, any backend. The workspace is
// 64-byte aligned, owned by the caller, used by one call at a time. Attend allocates nothing.
int64_t AttendWorkspaceBytes(const AttendArgs& args);

// Errors: InvalidArgument [ATTEND_ARGS_INVALID], a range above is broken, or a query is not finite
//         (which head and channel); DataLoss [TILE_FORMAT_MISMATCH], a tile in the range is not of
//         this layout; FailedPrecondition [ORIGINAL_MISSING], a source asks for originals that are
//         null. On error the results are unspecified and must not be used.
// Threads: concurrent calls are safe when results and workspaces differ. Blocks until done.
absl::Status Attend(Backend backend, const AttendArgs& args, const AttendResult& result,
                    void* workspace);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_ATTEND_H_
