// A progressive read of the CPU backend: scan, choose, read what was chosen, and choose again where
// the lower mass came out smaller than the scan suggested. Everything that depends on the
// instruction set is behind AttendKernels.
#include "kernels/ops/attend_progressive.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/bounds/skipping.h"
#include "kernels/cpu/attend_prepare.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/cpu.h"

namespace certkv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
// Sub-blocks are chosen by their bound, in buckets of an eighth of an octave: the upper bits of the
// float. 32 octaves below the largest everything is one bucket.
constexpr int kBuckets = 256;
constexpr int kBucketShift = 20;
// Paid for the float sums of 16 bounds (16 u), for Exp2 there and for the sums in double here.
constexpr double kUpperInflation = 1 + 0x1p-12;
// The first choice takes the coarse logits as they are, without their half-width, for the mass of
// what is read. This is what the half-widths of a full read may take from it; when they take more,
// more is read.
constexpr double kFirstChoiceMargin = 0.85;
// A bound that would leave the floats when scaled: upper bounds may only grow.
constexpr float kUpperLeast = 0x1p-126f;

// The whole scratch of a read beyond that of AttendState.
struct Scratch {
  ScanState scan;
  int32_t* sub_blocks;  // [4 T] to be read next
};

Scratch LayOutScratch(const AttendArgs& args, Arena* arena) {
  const int64_t tiles = int64_t{args.group_size} * args.tile_count;
  Scratch scratch{};
  scratch.scan.upper = arena->Take<float>(tiles * kSubBlocksPerTile);
  scratch.scan.shrink = arena->Take<float>(tiles);
  scratch.scan.tile_ref = arena->Take<float>(tiles);
  scratch.sub_blocks = arena->Take<int32_t>(int64_t{args.tile_count} * kSubBlocksPerTile);
  return scratch;
}

// One head's choice. Masses are relative to 2^ref.
class HeadChoice {
 public:
  HeadChoice(const AttendState& s, const ScanState& scan, int g)
      : s_(s),
        g_(g),
        upper_(scan.upper + int64_t{g} * s.args->tile_count * kSubBlocksPerTile),
        shrink_(scan.shrink + int64_t{g} * s.args->tile_count),
        tile_ref_(scan.tile_ref + int64_t{g} * s.args->tile_count) {
    CommonReference();
    FillBuckets();
  }

  // Skips the buckets below the cut, as many as their bounds are within ratio * (lower mass of what
  // is read): `kept`, in units of 2^kept_ref, and, where `guess` says so, the coarse masses of the
  // other buckets. Never skips a bucket that was read.
  void Cut(double kept, float kept_ref, double ratio, bool guess) {
    const double shift = std::clamp(double{kept_ref} - ref_, -1000.0, 1000.0);
    const double base = kept * std::exp2(shift);
    const int end = cut_;
    cut_ = 0;
    skipped_ = 0;
    double read = mass_;
    while (cut_ < end) {
      const double upper = skipped_ + bucket_upper_[cut_];
      read -= bucket_mass_[cut_];
      const double lower = guess ? kFirstChoiceMargin * std::max(read, 0.0) + base : base;
      if (!(upper * kUpperInflation <= ratio * lower)) return;
      skipped_ = upper;
      ++cut_;
    }
  }

  // Sub-blocks of buckets [cut, end), and those without a bound when end is kBuckets. Sets their
  // bits of the mask.
  int32_t List(int end, uint8_t* sub_blocks_read, int32_t* sub_blocks) const {
    int32_t count = 0;
    for (int32_t n = kSubBlocksPerTile * s_.tile_begin; n < kSubBlocksPerTile * s_.tile_end; ++n) {
      const float upper = upper_[n];
      if (upper == 0) continue;  // outside the range
      const int bucket = BucketOf(upper);
      if (bucket < cut_ || bucket >= end) continue;
      sub_blocks[count++] = n;
      sub_blocks_read[n / kSubBlocksPerTile] |= static_cast<uint8_t>(1u << n % kSubBlocksPerTile);
    }
    return count;
  }

  int cut() const { return cut_; }
  static constexpr int kAll = kBuckets + 1;  // past the bucket of what has no bound

  // log of the bound on what is skipped, rounded up.
  float SkippedLseNat() const {
    if (skipped_ == 0) return -kInfinity;
    const double lse = std::log(skipped_ * kUpperInflation) + double{ref_} * kLn2;
    const double above = lse + std::fabs(lse) * 0x1p-40;
    const auto rounded = static_cast<float>(above);
    return rounded >= above ? rounded : std::nextafter(rounded, kInfinity);
  }

 private:
  // Brings all bounds to the largest reference. Hardly ever has anything to do after the first
  // tiles, because references have headroom.
  void CommonReference() {
    for (int t = s_.tile_begin; t < s_.tile_end; ++t) ref_ = std::max(ref_, tile_ref_[t]);
    for (int t = s_.tile_begin; t < s_.tile_end; ++t) {
      if (tile_ref_[t] == ref_ || tile_ref_[t] == kRefNone) continue;
      const float factor = std::exp2(std::max(tile_ref_[t] - ref_, -126.0f));  // exact
      for (int b = 0; b < kSubBlocksPerTile; ++b) {
        float& upper = upper_[kSubBlocksPerTile * t + b];
        if (upper > 0) upper = std::max(upper * factor, kUpperLeast);
      }
    }
  }

  void FillBuckets() {
    float top = 0;
    for (int32_t n = kSubBlocksPerTile * s_.tile_begin; n < kSubBlocksPerTile * s_.tile_end; ++n) {
      if (upper_[n] < kInfinity) top = std::max(top, upper_[n]);
    }
    first_bits_ = static_cast<int32_t>(std::bit_cast<uint32_t>(top) >> kBucketShift) - kBuckets + 1;
    for (int t = s_.tile_begin; t < s_.tile_end; ++t) {
      const double shrink = shrink_[t];
      for (int b = 0; b < kSubBlocksPerTile; ++b) {
        const float upper = upper_[kSubBlocksPerTile * t + b];
        if (!(upper < kInfinity)) continue;
        const int bucket = BucketOf(upper);
        bucket_upper_[bucket] += upper;
        bucket_mass_[bucket] += upper * shrink;
      }
    }
    for (const double mass : bucket_mass_) mass_ += mass;
  }

  int BucketOf(float upper) const {
    if (!(upper < kInfinity)) return kBuckets;  // always read
    const auto bits = static_cast<int32_t>(std::bit_cast<uint32_t>(upper) >> kBucketShift);
    return std::max(bits - first_bits_, 0);
  }

  const AttendState& s_;
  const int g_;
  float* const upper_;
  const float* const shrink_;
  const float* const tile_ref_;
  float ref_ = kRefNone;
  int32_t first_bits_ = 0;
  double bucket_upper_[kBuckets] = {};
  double bucket_mass_[kBuckets] = {};  // without the half-widths
  double mass_ = 0;
  int cut_ = kBuckets;
  double skipped_ = 0;  // sum of the bounds below the cut
};

// sum of mass * e^-c of head g's first `count` atoms, in units of 2^ref; a little less, so that the
// finishing step, which allows for the rounding of the reported masses, finds no less.
double LowerMass(const AttendState& s, int g, int32_t count) {
  const int64_t row = int64_t{g} * s.atom_count;
  double lower = 0;
  for (int32_t a = 0; a < count; ++a) {
    const float mass = s.result->block_lse[row + a];
    if (!(mass > 0)) continue;
    const double exponent = s.atom_ref[row + a] - s.heads.ref[g];
    lower += mass * std::exp(exponent * kLn2 - s.result->logit_half_width[row + a]);
  }
  return lower * (1 - 0x1p-10);
}

// Reads head g; returns how many atoms it has.
int32_t ReadHead(const AttendKernels& kernels, const ProgressiveArgs& args,
                 const ProgressiveResult& result, const Scratch& scratch, AttendState* s, int g) {
  const double ratio = SkipRatio(args.skip_tolerance[g]);
  uint8_t* sub_blocks_read = result.sub_blocks_read + int64_t{g} * args.read.tile_count;
  std::fill_n(sub_blocks_read, args.read.tile_count, uint8_t{0});
  const HeadStates& heads = s->heads;
  const int32_t first_atom = ProgressiveSinkAtom(args.read) + 1;
  HeadChoice choice(*s, scratch.scan, g);
  // Nothing was read but the tail and the sink: their half-widths are arithmetic.
  choice.Cut(heads.mass[g], heads.ref[g], ratio, true);
  int32_t next_atom = first_atom;
  int end = HeadChoice::kAll;
  while (true) {
    const int32_t count = choice.List(end, sub_blocks_read, scratch.sub_blocks);
    kernels.read_sub_blocks(s, g, scratch.sub_blocks, count, next_atom);
    next_atom += (count + kSubBlocksPerTile - 1) / kSubBlocksPerTile * kSubBlocksPerTile;
    end = choice.cut();
    if (end == 0) break;  // everything was read
    const double sink = args.read.sink_logits == nullptr ? -kInfinity : args.read.sink_logits[g];
    const double lower = LowerMass(*s, g, next_atom) +
                         (sink > -kInfinity ? std::exp(sink - double{heads.ref[g]} * kLn2) : 0.0);
    choice.Cut(lower, heads.ref[g], ratio, false);
    if (choice.cut() == end) break;  // what is skipped is within the tolerance of what was read
  }
  result.skipped_lse_nat[g] = choice.SkippedLseNat();
  return next_atom;
}

}  // namespace

int64_t ProgressiveWorkspaceBytes(const AttendArgs& args) {
  Arena arena(nullptr);
  LayOut(args, ProgressiveAtomsMax(args), &arena);
  LayOutScratch(args, &arena);
  return arena.used();
}

void AttendProgressive(CpuIsa isa, const ProgressiveArgs& args, const ProgressiveResult& result,
                       void* workspace) {
  const AttendKernels& kernels = AttendKernelsOf(isa);
  const AttendArgs& read = args.read;
  Arena arena(workspace);
  AttendState* state = LayOut(read, ProgressiveAtomsMax(read), &arena);
  const Scratch scratch = LayOutScratch(read, &arena);
  Prepare(read, AttendedPart(result), state);
  state->atom_count = ProgressiveAtomsMax(read);
  state->first_tail_atom = 0;
  const int32_t sink_atom = ProgressiveSinkAtom(read);
  for (int g = 0; g < read.group_size; ++g) {
    // Chunks of the tail outside the range, and the sink until it is written.
    const int64_t row = int64_t{g} * state->atom_count;
    std::fill_n(result.block_lse + row, sink_atom + 1, 0.0f);
    std::fill_n(result.block_max_logit + row, sink_atom + 1, -kInfinity);
    std::fill_n(result.logit_half_width + row, sink_atom + 1, 0.0f);
    std::fill_n(state->atom_ref + row, sink_atom + 1, 0.0f);
    float* upper = scratch.scan.upper + int64_t{g} * read.tile_count * kSubBlocksPerTile;
    std::fill_n(upper, int64_t{read.tile_count} * kSubBlocksPerTile, 0.0f);
  }
  kernels.run_tail(state);
  kernels.scan(state, &scratch.scan);
  for (int g = 0; g < read.group_size; ++g) {
    float* upper = scratch.scan.upper + int64_t{g} * read.tile_count * kSubBlocksPerTile;
    // Sub-blocks of the first and the last tile that lie outside the range.
    const int64_t stored = int64_t{read.tile_count} * kSubBlocksPerTile;
    const int64_t begin = read.token_begin / kSubBlockTokens;
    const int64_t end = (read.token_end + kSubBlockTokens - 1) / kSubBlockTokens;
    std::fill(upper, upper + std::min(begin, stored), 0.0f);
    std::fill(upper + std::min(end, stored), upper + stored, 0.0f);
    const int32_t atoms = ReadHead(kernels, args, result, scratch, state, g);
    result.atom_count[g] = atoms;
    kernels.finish_head_atoms(state, g, atoms);
    FinishHead(*state, kernels, sink_atom, g);
  }
  result.value_radius[0] = state->value_radius;
}

}  // namespace certkv::cpu
