// Attend of the CPU backend: lays out the workspace, runs one instruction set's kernels over it and
// turns the sums into results. Everything that depends on the instruction set is behind
// AttendKernels.
#include "kernels/ops/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/bounds/dither.h"
#include "kernels/core/check.h"
#include "kernels/core/witness.h"
#include "kernels/cpu/attend_prepare.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/cpu.h"

namespace certkv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
static_assert(kDitherLatticeFloat == kDitherLattice);
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kLog2E = 0x1.71547652b82fep+0;

// w(code) at exponent 0, for every code.
struct WitnessTable {
  float width[256];
  WitnessTable() {
    for (int code = 0; code < 256; ++code) {
      width[code] = DecodeWitness(static_cast<uint8_t>(code), 0);
    }
  }
};

const float* SharedWitnessTable() {
  static const WitnessTable table;
  return table.width;
}

}  // namespace

AttendState* LayOut(const AttendArgs& args, int32_t atom_count, Arena* arena) {
  const int64_t heads = args.group_size;
  AttendState counted;
  auto* state = arena->Take<AttendState>(1);
  AttendState& s = state == nullptr ? counted : *state;
  s.queries = arena->Take<float>(heads * kRow);
  s.pair_queries = arena->Take<float>(heads * kRow);
  s.scores = arena->Take<float>(heads * kTileTokens);
  s.weights = arena->Take<int16_t>(heads * kTileTokens);
  s.weight_unit = arena->Take<float>(heads + kQuadHeads);
  s.terms = arena->Take<int32_t>(heads * kTermRow);
  s.term_unit = arena->Take<float>(heads + kQuadHeads);
  s.term_base = arena->Take<float>(heads + kQuadHeads);
  s.term_bias = arena->Take<int32_t>(heads + kQuadHeads);
  s.rotated = arena->Take<float>(heads * kRow);
  s.plain = arena->Take<float>(heads * kRow);
  s.tile_scale = arena->Take<float>(kRow);
  s.tile_middle = arena->Take<float>(kRow);
  s.witness = arena->Take<float>(kWitnessBandsMax * kTileTokens);
  s.atom_ref = arena->Take<float>(heads * atom_count);
  s.tile_ref = arena->Take<float>(heads * args.tile_count);
  return state;
}

namespace {

// Smallest float >= bound; +infinity for NaN.
float RoundUp(double bound) {
  if (!(bound <= std::numeric_limits<float>::max())) return kInfinity;
  const auto rounded = static_cast<float>(bound);
  return rounded >= bound ? rounded : std::nextafter(rounded, kInfinity);
}

// Scales the query and bounds its norms. The factor covers 256 roundings of sums and 4 of each
// square in double; 2^-140 covers queries whose scaled entries are subnormal.
void PrepareQuery(AttendState* s, int g) {
  const AttendArgs& args = *s->args;
  const TileLayout& layout = *args.layout;
  const float* query = args.queries + int64_t{g} * s->head_dim;
  float* scaled = s->queries + int64_t{g} * kRow;
  double norm_square = 0;
  double band_squares[kWitnessBandsMax] = {};
  for (int i = 0; i < s->head_dim; ++i) {
    scaled[i] = query[i] * args.logit_scale;
    norm_square += double{query[i]} * query[i];
    if (layout.witness_bands == 0) continue;
    const double weight = layout.has_witness_weights ? args.witness_weights[i] : 1.0f;
    const double entry = query[i] / weight;
    band_squares[WitnessBandOf(layout, i)] += entry * entry;
  }
  const auto bound = [&](double square) {
    return RoundUp(args.logit_scale * std::sqrt(square) * (1 + 0x1p-40) + 0x1p-140);
  };
  HeadStates& heads = s->heads;
  heads.query_norm[g] = bound(norm_square);
  for (int b = 0; b < layout.witness_bands; ++b) heads.band_norm[b][g] = bound(band_squares[b]);
  if (layout.key_format != KeyFormat::kFp8E4m3) return;
  // Words of a quad hold channels (0, 4), (2, 6) of its half of 8, and (1, 5), (3, 7).
  constexpr int kPairOrder[8] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int i = 0; i < s->head_dim; ++i) {
    s->pair_queries[int64_t{g} * kRow + i] = scaled[i / 8 * 8 + kPairOrder[i % 8]];
  }
}

void PrepareHead(AttendState* s, int g) {
  HeadStates& heads = s->heads;
  heads.ref[g] = kRefNone;
  PrepareQuery(s, g);
  const AttendArgs& args = *s->args;
  if (args.failure_probability != nullptr && args.failure_probability[g] > 0) {
    heads.dither_factor[g] =
        RoundUp(DitherFactor(args.token_end - args.token_begin, args.failure_probability[g]));
  }
  const float sink = s->args->sink_logits == nullptr ? -kInfinity : s->args->sink_logits[g];
  if (sink == -kInfinity) return;
  heads.ref[g] = std::ceil(static_cast<float>(sink * kLog2E));
  heads.mass[g] = std::exp2(sink * kLog2E - heads.ref[g]);
}

}  // namespace

void Prepare(const AttendArgs& args, const AttendResult& result, AttendState* s) {
  const TileLayout& layout = *args.layout;
  s->args = &args;
  s->result = &result;
  s->head_dim = layout.head_dim;
  s->value_dim = layout.value_dim;
  s->atoms_per_tile = layout.witness_bands == 0 ? 1 : kSubBlocksPerTile;
  s->atom_count = AttendAtomCount(args);
  s->first_tail_atom = args.tile_count * s->atoms_per_tile;
  s->tile_begin =
      static_cast<int32_t>(std::min<int64_t>(args.token_begin / kTileTokens, args.tile_count));
  s->tile_end = static_cast<int32_t>(
      std::min<int64_t>((args.token_end + kTileTokens - 1) / kTileTokens, args.tile_count));
  s->code_centre = 0;
  s->code_half_range = 0;
  if (layout.scale_bytes != 0) {
    const AffineDepth depth = AffineDepthOf(layout.key_format);
    s->code_centre = depth.centre;
    s->code_half_range = depth.half_range;
  }
  s->value_levels = layout.value_format == ValueFormat::kV4   ? 15.0f
                    : layout.value_format == ValueFormat::kV8 ? 255.0f
                                                              : 0.0f;
  s->key_lines = -1;
  s->value_lines = -1;
  s->value_radius = 0;
  s->witness_table = SharedWitnessTable();
  const int64_t heads = args.group_size;
  std::memset(s->rotated, 0, sizeof(float) * heads * kRow);
  std::memset(s->plain, 0, sizeof(float) * heads * kRow);
  s->heads = HeadStates{};
  for (int g = 0; g < args.group_size; ++g) PrepareHead(s, g);
}

namespace {

// Atoms and tiles outside the range are never touched: they have mass 0.
void ClearUntouched(AttendState* s) {
  const AttendArgs& args = *s->args;
  const AttendResult& result = *s->result;
  const bool whole = args.token_begin == 0 &&
                     args.token_end == int64_t{args.tile_count} * kTileTokens + args.tail_count;
  if (whole) return;
  const int64_t heads = args.group_size;
  const int64_t atoms = heads * s->atom_count;
  std::fill_n(result.block_lse, atoms, 0.0f);
  std::fill_n(result.block_max_logit, atoms, -kInfinity);
  std::fill_n(result.logit_half_width, atoms, 0.0f);
  if (result.top_half_width != nullptr) std::fill_n(result.top_half_width, atoms, 0.0f);
  std::fill_n(s->atom_ref, atoms, 0.0f);
  std::fill_n(result.tile_value_error, heads * args.tile_count, 0.0f);
  std::fill_n(s->tile_ref, heads * args.tile_count, 0.0f);
}

// The format's rotation, its own inverse: orthonormal Hadamard matrices on blocks of powers of two.
// Each of at most 8 stages rounds by u, the factor twice.
void RotateBack(float* values, int32_t dim) {
  for (int32_t begin = 0; begin < dim;) {
    int32_t n = 16;
    while (2 * n <= dim - begin) n *= 2;
    float* block = values + begin;
    for (int32_t h = 1; h < n; h *= 2) {
      for (int32_t i = 0; i < n; i += 2 * h) {
        for (int32_t j = i; j < i + h; ++j) {
          const float a = block[j];
          const float b = block[j + h];
          block[j] = a + b;
          block[j + h] = a - b;
        }
      }
    }
    const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
    for (int32_t i = 0; i < n; ++i) block[i] *= factor;
    begin += n;
  }
}

// Bound on ||o^ - sum p^ v^||, u = 2^-24, T = tiles. p^ is defined by the float weights, so their
// exponentials are exact here (docs: their error is in the half-widths).
//   Quantized: weights to 15 bits, each error meets |code - middle| <= levels / 2 in every channel.
//   Sums in float are at most reach = sum p^ (levels * scale + |zero|) in every channel, and see
//   1 (weight * scale) + 3 (conversion, unit, product) + T additions + 20 (zeros within a tile) + 1
//   (zero) + 14 (mass within a tile, quotient) + 10 (rotation) + 1 roundings: under (T + 56) u.
//   16-bit: 64 products and additions in a tile, T additions, 14, 2: under (T + 88) u of
//   sum p^ ||v||.
//   Not read: weights below 2^-60 of the largest; below 2^-1000 they are lost, 2^24 of them.
double RoundingTerm(const AttendState& s, int g) {
  const HeadStates& heads = s.heads;
  constexpr double u = 0x1p-24;
  const double root = std::sqrt(static_cast<double>(s.value_dim));
  const double tiles = s.tile_end - s.tile_begin + 1.0 + s.args->tail_count / 64;
  const double rotated = root * (heads.weight_error[g] * (0.5 * s.value_levels) +
                                 (tiles + 56) * u * heads.rotated_reach[g]);
  const double plain = (tiles + 88) * u * heads.plain_reach[g];
  const double absent = (heads.skipped[g] + heads.mass[g] * 0x1p-100) * s.value_radius;
  return (rotated + plain + absent) / heads.mass[g] * (1 + 0x1p-10);
}

}  // namespace

void FinishHead(const AttendState& s, const AttendKernels& kernels, int32_t sink_atom, int g) {
  const AttendArgs& args = *s.args;
  const AttendResult& result = *s.result;
  const HeadStates& heads = s.heads;
  const int64_t sink = int64_t{g} * s.atom_count + sink_atom;
  const float sink_logit = args.sink_logits == nullptr ? -kInfinity : args.sink_logits[g];
  result.block_lse[sink] = sink_logit;
  result.block_max_logit[sink] = sink_logit;
  result.logit_half_width[sink] = 0;
  if (result.top_half_width != nullptr) result.top_half_width[sink] = 0;

  const bool known = !heads.poisoned[g] && heads.mass[g] > 0;
  result.lse_nat[g] =
      known ? static_cast<float>(std::log(heads.mass[g]) + double{heads.ref[g]} * kLn2) : kInfinity;
  // 2^-10 covers the roundings of the sums of eta (12u) many times over, 2^-126 what vanished.
  result.value_term[g] = known ? RoundUp(heads.eta[g] / heads.mass[g] * (1 + 0x1p-18) +
                                         (heads.eta[g] > 0 ? 0x1p-126 : 0.0))
                               : kInfinity;
  result.rounding_term[g] = known ? RoundUp(RoundingTerm(s, g)) : kInfinity;
  if (result.outputs == nullptr) return;

  float* output = result.outputs + int64_t{g} * s.value_dim;
  const float inverse = known ? static_cast<float>(1.0 / heads.mass[g]) : 0.0f;
  const float* plain = s.plain + int64_t{g} * kRow;
  if (s.value_levels > 0) {
    const float* rotated = s.rotated + int64_t{g} * kRow;
    const auto zero = static_cast<float>(heads.zero[g]);
    for (int i = 0; i < s.value_dim; ++i) {
      output[i] = (rotated[kernels.rotated_index(&s, i)] + zero) * inverse;
    }
    RotateBack(output, s.value_dim);
    for (int i = 0; i < s.value_dim; ++i) output[i] += plain[i] * inverse;
  } else {
    for (int i = 0; i < s.value_dim; ++i) output[i] = plain[i] * inverse;
  }
}

const AttendKernels& AttendKernelsOf(CpuIsa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case CpuIsa::kAvx2:
      return kAttendAvx2;
    case CpuIsa::kAvx512Vnni:
      return kAttendAvx512;
#else
    case CpuIsa::kAvx2:
    case CpuIsa::kAvx512Vnni:
      break;
#endif
    case CpuIsa::kPortable:
      return kAttendPortable;
  }
  CERTKV_CHECK(false, "isa is one of SupportedIsas()");
  return kAttendPortable;
}

int64_t AttendWorkspaceBytes(const AttendArgs& args) {
  Arena arena(nullptr);
  LayOut(args, AttendAtomCount(args), &arena);
  return arena.used();
}

void AttendWith(const AttendKernels& kernels, const AttendArgs& args, const AttendResult& result,
                void* workspace, const PrefetchSchedule* schedule) {
  Arena arena(workspace);
  AttendState* state = LayOut(args, AttendAtomCount(args), &arena);
  Prepare(args, result, state);
  ClearUntouched(state);
  if (schedule != nullptr) {
    state->key_lines = schedule->key_lines;
    state->value_lines = schedule->value_lines;
  }
  kernels.run(state);
  for (int g = 0; g < args.group_size; ++g) {
    // The sink's atom takes part in FinishAtoms' sweep and is then written over.
    state->atom_ref[int64_t{g + 1} * state->atom_count - 1] = 0;
    result.block_lse[int64_t{g + 1} * state->atom_count - 1] = 0;
  }
  kernels.finish_atoms(state);
  for (int g = 0; g < args.group_size; ++g) FinishHead(*state, kernels, state->atom_count - 1, g);
  result.value_radius[0] = state->value_radius;
}

void Attend(CpuIsa isa, const AttendArgs& args, const AttendResult& result, void* workspace) {
  AttendWith(AttendKernelsOf(isa), args, result, workspace, nullptr);
}

}  // namespace certkv::cpu
