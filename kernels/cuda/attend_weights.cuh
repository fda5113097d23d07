// From the scores of one unit to softmax weights, and to everything that the certificate needs of
// it: masses and largest logits of the atoms, half-widths, value errors. A warp does one head, a
// lane two tokens: its number, and 32 more.
//
// Weights are powers of two relative to integer references, so a change of reference is exact. An
// atom has its own, from its own largest logit, so that what it reports is precise however far it
// lies below others; the head has one that grows with the units.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_WEIGHTS_CUH_
#define CERTKV_KERNELS_CUDA_ATTEND_WEIGHTS_CUH_

#include "kernels/core/witness_code.h"
#include "kernels/cuda/attend_scores.cuh"

namespace certkv::cuda {

inline constexpr int kSlots = kTileTokens / 32;  // tokens of a lane
// Bound on |logit| up to which logits are used. Above it the half-width exceeds
// kLogitHalfWidthMaxNat in any case (64 u of it), and a logit could be infinite or NaN.
inline constexpr float kReachMax = 0x1p24f;
// Weights of an atom that lies further below the head's reference are left out of the values: they
// would become subnormal. 2^24 tokens weigh less than 2^-75 of all then (attend_combine.cuh).
inline constexpr float kAbsentExponent = -100.0f;

// What a lane knows of its two tokens, slot k is token lane + 32 k. Values of an atom or a
// sub-block are the same in all lanes that hold its tokens.
struct TokenWeights {
  bool is_in_range[kSlots];
  bool is_top[kSlots];           // has the atom's largest logit
  float atom_max[kSlots];        // largest logit, nats
  float atom_ref[kSlots];        // log2 units, an integer; kRefNone when empty
  float weight[kSlots];          // relative to 2^atom_ref
  float sub_block_mass[kSlots];  // the same
  float atom_mass[kSlots];       // the same
  float unit_ref;                // the largest atom_ref
  float unit_mass;               // relative to 2^unit_ref
};

// Do sub-blocks of 16 tokens have atoms of their own in this unit?
__device__ inline bool HasSubBlockAtoms(const AttendRead& read, const Unit& unit) {
  return unit.tile >= 0 && read.has_sub_block_atoms;
}

__device__ inline TokenWeights WeighTokens(const AttendRead& read, const BlockMemory& memory,
                                           const Unit& unit, int g) {
  const int lane = ThreadIndex() % 32;
  const bool by_sub_block = HasSubBlockAtoms(read, unit);
  const float cap = read.args.soft_cap;
  const uint32_t sub_blocks = SubBlocksOf(read, unit.tile, g);
  TokenWeights w;
  float logit[kSlots];
  for (int k = 0; k < kSlots; ++k) {
    const int token = lane + 32 * k;
    float score = 0;
    for (int part = 0; part < kParts; ++part) {
      score += memory.scores[(part * read.args.group_size + g) * kTileTokens + token];
    }
    w.is_in_range[k] =
        token >= unit.begin && token < unit.end && (sub_blocks >> token / kSubBlockTokens & 1) != 0;
    logit[k] = !w.is_in_range[k] ? -kInfinity : cap > 0 ? SoftCap(score, cap) : score;
    w.atom_max[k] = WarpMax(logit[k], kSubBlockTokens);
  }
  if (!by_sub_block) {
    const float max = fmaxf(w.atom_max[0], w.atom_max[1]);
    w.atom_max[0] = w.atom_max[1] = fmaxf(max, __shfl_xor_sync(~0u, max, kSubBlockTokens));
  }
  for (int k = 0; k < kSlots; ++k) {
    w.is_top[k] = w.is_in_range[k] && logit[k] == w.atom_max[k];
    w.atom_ref[k] = w.atom_max[k] == -kInfinity ? kRefNone : ceilf(w.atom_max[k] * kLog2E);
    w.weight[k] = w.is_in_range[k] ? Exp2(fmaf(logit[k], kLog2E, -w.atom_ref[k])) : 0.0f;
    w.sub_block_mass[k] = w.atom_mass[k] = WarpSum(w.weight[k], kSubBlockTokens);
  }
  float mass = w.sub_block_mass[0] + w.sub_block_mass[1];
  w.unit_ref = fmaxf(w.atom_ref[0], w.atom_ref[1]);
  if (by_sub_block) {
    w.unit_ref = fmaxf(w.unit_ref, __shfl_xor_sync(~0u, w.unit_ref, kSubBlockTokens));
    mass = w.sub_block_mass[0] * PowerOfTwo(w.atom_ref[0] - w.unit_ref) +
           w.sub_block_mass[1] * PowerOfTwo(w.atom_ref[1] - w.unit_ref);
  }
  w.unit_mass = mass + __shfl_xor_sync(~0u, mass, kSubBlockTokens);
  if (!by_sub_block) w.atom_mass[0] = w.atom_mass[1] = w.unit_mass;
  return w;
}

// Largest of the unit's tokens; `parts`: [kParts][64].
__device__ inline float LargestRowNorm(const float* parts) {
  static_assert(kParts == 2);
  float norm = 0;
  for (int k = 0; k < kSlots; ++k) {
    const int token = ThreadIndex() % 32 + 32 * k;
    norm = fmaxf(norm, JoinNorms(parts[token], parts[kTileTokens + token]));
  }
  return WarpMax(norm, 32);
}

// Bound on ||k^|| of the unit's tokens in the range, as head g reads them.
__device__ inline float KeyNorm(const Unit& unit, const BlockMemory& memory, bool from_rows) {
  if (!from_rows) return unit.header().key_norm;
  return LargestRowNorm(memory.row_key_norm);
}

// Half-width that the scales of the tile's channels allow (Hoelder).
__device__ inline float ScaleHalfWidth(const AttendRead& read, const BlockMemory& memory, int g) {
  const int head_dim = read.layout.head_dim;
  float sum = 0;
  for (int i = ThreadIndex() % 32; i < head_dim; i += 32) {
    sum = __fmaf_ru(fabsf(QueryAt(read, g * head_dim + i)), memory.key_scale[i], sum);
  }
  const float scaled = __fmul_ru(WarpSumUp(sum, 32), read.depth.half_range);
  return __fmul_ru(scaled, read.args.logit_scale);
}

// Half-width that the witness of the lane's token in a slot allows.
__device__ inline float WitnessHalfWidth(const AttendRead& read, const BlockMemory& memory,
                                         const Unit& unit, int g, int slot) {
  const int bands = read.layout.witness_bands;
  const int lane = ThreadIndex() % 32;
  const int sub_block = 2 * slot + lane / kSubBlockTokens;
  const uint8_t* const witness = unit.scan + read.layout.witness_offset +
                                 sub_block * bands * kSubBlockTokens + lane % kSubBlockTokens;
  const int16_t exponent = unit.header().witness_exponent;
  float width = 0;
  for (int b = 0; b < bands; ++b) {
    const float norm = code::DecodeWitness(witness[b * kSubBlockTokens], exponent);
    // A norm that is unknown stays so where the query is 0.
    width = norm < kInfinity ? __fmaf_ru(memory.band_norm[g * kWitnessBandsMax + b], norm, width)
                             : kInfinity;
  }
  return width;
}

// Half-widths of a lane's tokens and of their atoms, arithmetic included; nats, rounded up.
__device__ inline void HalfWidths(const AttendRead& read, const BlockMemory& memory,
                                  const Unit& unit, int g, float key_norm, bool from_rows,
                                  float* own, float* half_width) {
  const float query_norm = memory.query_norm[g];
  const float reach = __fmul_ru(query_norm, key_norm);
  float slack = ScoreSlackNat(read.layout.head_dim, query_norm, key_norm);
  slack = __fmaf_ru(kLog2ESlack, reach, slack);
  slack = __fmaf_ru(kSoftCapSlack, read.args.soft_cap, slack);
  slack = __fadd_ru(slack, kWeightSlackNat);
  const bool is_exact = from_rows || Has16BitKeys(read.layout);
  const float from_scales =
      !is_exact && HasAffineKeys(read.layout) ? ScaleHalfWidth(read, memory, g) : kInfinity;
  for (int k = 0; k < kSlots; ++k) {
    float width = from_scales;
    if (!is_exact && read.layout.witness_bands != 0) {
      width = fminf(width, WitnessHalfWidth(read, memory, unit, g, k));
    }
    width = __fadd_ru(is_exact ? 0.0f : width, slack);
    own[k] = width <= kLogitHalfWidthMaxNat ? width : kInfinity;
    half_width[k] = WarpMax(own[k], kSubBlockTokens);
  }
}

// Does the range have tokens of the unit's sub-block? Every unit has one.
__device__ inline bool HasTokens(const Unit& unit, int sub_block) {
  const int first = sub_block * kSubBlockTokens;
  return first < unit.end && first + kSubBlockTokens > unit.begin;
}

__device__ inline void WriteAtoms(const AttendRead& read, const Unit& unit, int g,
                                  const TokenWeights& w, const float* own, const float* half_width,
                                  bool is_known) {
  const int lane = ThreadIndex() % 32;
  const bool by_sub_block = HasSubBlockAtoms(read, unit);
  const uint32_t sub_blocks = SubBlocksOf(read, unit.tile, g);
  float top[kSlots];
  for (int k = 0; k < kSlots; ++k) top[k] = WarpMax(w.is_top[k] ? own[k] : 0.0f, kSubBlockTokens);
  if (lane % kSubBlockTokens != 0 || (!by_sub_block && lane != 0)) return;
  for (int k = 0; k < (by_sub_block ? kSlots : 1); ++k) {
    if (by_sub_block && (sub_blocks >> (2 * k + lane / kSubBlockTokens) & 1) == 0) continue;
    const int atom = unit.first_atom + (by_sub_block ? 2 * k + lane / kSubBlockTokens : 0);
    const int64_t place = int64_t{g} * read.atom_count + atom;
    const bool is_empty = by_sub_block && !HasTokens(unit, 2 * k + lane / kSubBlockTokens);
    const bool is_reported = is_known || is_empty;
    read.result.block_lse[place] = !is_reported ? kInfinity
                                   : is_empty   ? -kInfinity
                                                : fmaf(w.atom_ref[k], kLn2, LogNat(w.atom_mass[k]));
    read.result.block_max_logit[place] = is_reported ? w.atom_max[k] : kInfinity;
    read.result.logit_half_width[place] = is_empty ? 0.0f : half_width[k];
    if (read.result.top_half_width == nullptr) continue;
    // Without witnesses all tokens of the unit have one half-width.
    read.result.top_half_width[place] = is_empty ? 0.0f : by_sub_block ? top[k] : half_width[k];
  }
}

// Sum over the unit's tokens of weight * eta, relative to 2^unit_ref, rounded up. Sub-block masses
// are off by at most 5 roundings, which the last division pays for. A weight that is 0 counts as
// 2^-126, so that an unknown eta stays unknown.
__device__ inline float ValueError(const Unit& unit, uint32_t sub_blocks, const TokenWeights& w) {
  float error = 0;
  for (int k = 0; k < kSlots; ++k) {
    const int sub_block = 2 * k + ThreadIndex() % 32 / kSubBlockTokens;
    if (!HasTokens(unit, sub_block) || (sub_blocks >> sub_block & 1) == 0) continue;
    const float mass = w.sub_block_mass[k] * PowerOfTwo(w.atom_ref[k] - w.unit_ref);
    const float eta = code::F16ToFloat(unit.header().value_error_bound[sub_block]);
    error = __fadd_ru(error, __fmul_ru(__fadd_ru(mass, 0x1p-126f), eta));
  }
  return __fadd_ru(error, __shfl_xor_sync(~0u, error, kSubBlockTokens));
}

// Bounds on the norms of the unit's values.
struct ValueNorms {
  float original;  // ||v||
  float decoded;   // ||v^||, however they are read
};

// Bound on ||v^|| from the tile's scales, where eta is unknown: larger than what the values are,
// but finite as they are.
__device__ inline float NormOfCodes(const TileLayout& layout, const BlockMemory& memory) {
  const float levels = layout.value_format == ValueFormat::kV4 ? 15.0f : 255.0f;
  float largest = 0;
  for (int k = 0; k < kSlots; ++k) {
    const int token = ThreadIndex() % 32 + 32 * k;
    const float magnitude =
        __fmaf_ru(levels, memory.value_scale[token], fabsf(memory.value_zero[token]));
    largest = fmaxf(largest, magnitude);
  }
  return __fmul_ru(WarpMax(largest, 32), __fsqrt_ru(static_cast<float>(layout.value_dim)));
}

__device__ inline ValueNorms NormsOfValues(const AttendRead& read, const BlockMemory& memory,
                                           const Unit& unit) {
  if (unit.tile < 0) {
    const float norm = LargestRowNorm(memory.row_value_norm);
    return {norm, norm};
  }
  const TileHeader& header = unit.header();
  float eta = 0;
  for (int s = 0; HasRotatedValues(read.layout) && s < kSubBlocksPerTile; ++s) {
    eta = fmaxf(eta, code::F16ToFloat(header.value_error_bound[s]));
  }
  const float decoded = __fadd_ru(header.value_radius, eta);
  return {header.value_radius, decoded < kInfinity ? decoded : NormOfCodes(read.layout, memory)};
}

// The head's sums with the unit's added. Called by one lane.
__device__ inline void AddToHead(const BlockMemory& memory, int g, float last_ref, float ref,
                                 const TokenWeights& w, float value_error, float value_norm) {
  const float factor = PowerOfTwo(last_ref - ref);
  const float unit_factor = PowerOfTwo(w.unit_ref - ref);
  memory.ref[g] = ref;
  memory.factor[g] = factor;
  memory.mass[g] = memory.mass[g] * factor + w.unit_mass * unit_factor;
  memory.eta[g] =
      __fadd_ru(ScaleBound(memory.eta[g], factor), ScaleBound(value_error, unit_factor));
  const float mass_bound = __fadd_ru(w.unit_mass * unit_factor, 0x1p-126f);
  memory.reach[g] =
      __fadd_ru(ScaleBound(memory.reach[g], factor), __fmul_ru(mass_bound, value_norm));
}

// The head reads nothing of the unit.
__device__ inline void SkipUnit(const BlockMemory& memory, int g) {
  const int lane = ThreadIndex() % 32;
  for (int k = 0; k < kSlots; ++k) memory.weights[g * kTileTokens + lane + 32 * k] = 0;
  if (lane == 0) memory.factor[g] = 1;
}

// All of the above for head g of the unit.
__device__ inline void WeighUnit(const AttendRead& read, const BlockMemory& memory,
                                 const Unit& unit, int g) {
  const int lane = ThreadIndex() % 32;
  const ValueNorms norms = NormsOfValues(read, memory, unit);
  if (g == 0 && lane == 0) {
    memory.radius[0] = fmaxf(memory.radius[0], norms.original);
    memory.norm[0] = fmaxf(memory.norm[0], norms.decoded);
  }
  const uint32_t sub_blocks = SubBlocksOf(read, unit.tile, g);
  if (sub_blocks == 0) {
    SkipUnit(memory, g);
    return;
  }
  const uint32_t source = SourceOf(read, unit, g);
  const bool from_rows = (source & kSourceOriginalKeys) != 0;
  const float key_norm = KeyNorm(unit, memory, from_rows);
  const bool is_known = __fmul_ru(memory.query_norm[g], key_norm) <= kReachMax;
  const TokenWeights w = WeighTokens(read, memory, unit, g);
  float own[kSlots];
  float half_width[kSlots];
  HalfWidths(read, memory, unit, g, key_norm, from_rows, own, half_width);
  WriteAtoms(read, unit, g, w, own, half_width, is_known);

  const bool has_error = HasRotatedValues(read.layout) && (source & kSourceOriginalValues) == 0;
  const float value_error = has_error && unit.tile >= 0 ? ValueError(unit, sub_blocks, w) : 0.0f;
  const float last_ref = memory.ref[g];
  const float ref = is_known ? fmaxf(last_ref, w.unit_ref) : last_ref;
  for (int k = 0; k < kSlots; ++k) {
    const float exponent = w.atom_ref[k] - ref;
    const bool is_absent = !is_known || !(exponent >= kAbsentExponent);
    memory.weights[g * kTileTokens + lane + 32 * k] =
        is_absent ? 0.0f : w.weight[k] * PowerOfTwo(exponent);
  }
  __syncwarp();  // every lane has read the head's reference
  if (lane != 0) return;
  if (unit.tile >= 0 && read.result.tile_value_error != nullptr) {
    const int64_t place = int64_t{g} * read.args.tile_count + unit.tile;
    read.result.tile_value_error[place] = value_error;
    read.tile_ref[place] = w.unit_ref;
  }
  if (is_known) {
    AddToHead(memory, g, last_ref, ref, w, value_error, norms.decoded);
  } else {
    memory.unknown[g] = 1;
    memory.factor[g] = 1;
  }
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_WEIGHTS_CUH_
