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
constexpr int32_t kInfinityBits = std::bit_cast<int32_t>(kInfinity);
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
// Sub-blocks are chosen by their bound, in buckets of an eighth of an octave: the upper bits of the
// float. The scan's `top` says where the largest may lie, up to 5 octaves too high; 32 octaves
// below that everything is one bucket.
constexpr int kBucketsPerOctave = 8;
constexpr int kBuckets = 37 * kBucketsPerOctave;
constexpr int kBucketShift = 20;
constexpr int16_t kOutside = -1;  // instead of a bucket: no token in the range
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
  int32_t* sub_blocks;    // [4 T] to be read next
  int16_t* buckets;       // [4 T] of one head's sub-blocks
  int16_t* tile_buckets;  // [T] the highest of each tile
};

Scratch LayOutScratch(const AttendArgs& args, Arena* arena) {
  const int64_t tiles = int64_t{args.group_size} * args.tile_count;
  Scratch scratch{};
  scratch.scan.upper = arena->Take<float>(tiles * kSubBlocksPerTile);
  scratch.scan.shrink = arena->Take<float>(tiles);
  scratch.scan.tile_ref = arena->Take<float>(tiles);
  scratch.scan.ref = arena->Take<float>(args.group_size);
  scratch.scan.top = arena->Take<float>(args.group_size);
  scratch.sub_blocks = arena->Take<int32_t>(int64_t{args.tile_count} * kSubBlocksPerTile);
  scratch.buckets = arena->Take<int16_t>(int64_t{args.tile_count} * kSubBlocksPerTile);
  scratch.tile_buckets = arena->Take<int16_t>(args.tile_count);
  return scratch;
}

// One head's choice. Masses are relative to 2^ref.
class HeadChoice {
 public:
  // Uses the scratch's buckets.
  HeadChoice(const AttendState& s, const Scratch& scratch, int g)
      : s_(s),
        buckets_(scratch.buckets),
        tile_buckets_(scratch.tile_buckets),
        ref_(scratch.scan.ref[g]) {
    FillBuckets(scratch.scan, g);
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
      const double upper = skipped_ + sums_[cut_][kUpper];
      read -= sums_[cut_][kMass];
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
    for (int32_t t = s_.tile_begin; t < s_.tile_end; ++t) {
      if (tile_buckets_[t] < cut_) continue;
      for (int32_t b = 0; b < kSubBlocksPerTile; ++b) {
        const int bucket = buckets_[kSubBlocksPerTile * t + b];
        if (bucket < cut_ || bucket >= end) continue;
        sub_blocks[count++] = kSubBlocksPerTile * t + b;
        sub_blocks_read[t] |= static_cast<uint8_t>(1u << b);
      }
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
  // Sums over a bucket: of the bounds, and of the same without half-widths.
  typedef double Sums __attribute__((vector_size(16)));
  static constexpr int kUpper = 0;
  static constexpr int kMass = 1;

  // Brings the head's bounds to its largest reference and puts them into buckets.
  void FillBuckets(const ScanState& scan, int g) {
    const int64_t row = int64_t{g} * s_.args->tile_count;
    // Bits of a power of two that no bound reaches: 2^top < 2^ceil(top), 16 of them and rounding.
    const float headroom = std::clamp(std::ceil(scan.top[g]) - ref_ + 5, -126.0f, 127.0f);
    first_bits_ = (std::bit_cast<int32_t>(std::exp2(headroom)) >> kBucketShift) - kBuckets;
    for (int t = s_.tile_begin; t < s_.tile_end; ++t) {
      const float* upper = scan.upper + kSubBlocksPerTile * (row + t);
      const float tile_ref = scan.tile_ref[row + t];
      const double shrink = scan.shrink[row + t];
      float scaled[kSubBlocksPerTile];
      if (tile_ref != ref_) [[unlikely]] {  // hardly ever: references have headroom
        ScaleBounds(upper, std::exp2(std::max(tile_ref - ref_, -126.0f)), scaled);
        upper = scaled;
      }
      int16_t highest = kOutside;
      for (int b = 0; b < kSubBlocksPerTile; ++b) {
        const int16_t bucket = Put(upper[b], shrink);
        buckets_[kSubBlocksPerTile * t + b] = bucket;
        highest = std::max(highest, bucket);
      }
      tile_buckets_[t] = highest;
    }
    for (const Sums& sums : sums_) mass_ += sums[kMass];
  }

  // A tile's bounds times a power of two, but none of a token becomes 0.
  static void ScaleBounds(const float* upper, float factor, float* scaled) {
    for (int b = 0; b < kSubBlocksPerTile; ++b) {
      scaled[b] = upper[b] > 0 ? std::max(upper[b] * factor, kUpperLeast) : 0.0f;
    }
  }

  // Adds a bound to its bucket, which it returns.
  int16_t Put(float upper, double shrink) {
    const auto bits = std::bit_cast<int32_t>(upper);  // never negative
    if (bits == 0) return kOutside;
    if (bits >= kInfinityBits) return kBuckets;  // always read
    const int32_t bucket = std::clamp((bits >> kBucketShift) - first_bits_, 0, kBuckets - 1);
    const double bound = upper;
    sums_[bucket] += Sums{bound, bound * shrink};
    return static_cast<int16_t>(bucket);
  }

  const AttendState& s_;
  int16_t* const buckets_;
  int16_t* const tile_buckets_;
  const float ref_;
  int32_t first_bits_ = 0;
  Sums sums_[kBuckets] = {};
  double mass_ = 0;  // over all buckets
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
  HeadChoice choice(*s, scratch, g);
  // Nothing was read but the tail and the sink: their half-widths are arithmetic.
  choice.Cut(heads.mass[g], heads.ref[g], ratio, true);
  int32_t next_atom = ProgressiveSinkAtom(args.read) + 1;
  const auto read_below = [&](int end) {
    const int32_t count = choice.List(end, sub_blocks_read, scratch.sub_blocks);
    kernels.read_sub_blocks(s, g, scratch.sub_blocks, count, next_atom);
    next_atom += (count + kSubBlocksPerTile - 1) / kSubBlocksPerTile * kSubBlocksPerTile;
  };
  read_below(HeadChoice::kAll);
  const int first_cut = choice.cut();
  if (first_cut > 0) {
    const double sink = args.read.sink_logits == nullptr ? -kInfinity : args.read.sink_logits[g];
    const double lower = LowerMass(*s, g, next_atom) +
                         (sink > -kInfinity ? std::exp(sink - double{heads.ref[g]} * kLn2) : 0.0);
    choice.Cut(lower, heads.ref[g], ratio, false);
    // Reading more can only raise the lower mass: there is no third time.
    if (choice.cut() < first_cut) read_below(first_cut);
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
