// From the atoms of a read to the points of the relaxation. Internal to worst_case_tv.
//
// One pass over the atoms takes out the heaviest tokens and puts the rest into bins by the bits of
// the half-width, rounded up to float: 64 bins per octave in [2^-16, 256), one bin below, one for
// everything above or unknown. A bin keeps sum m and sum m c, nothing else, so the pass costs no
// exponentials.
//
// A bin with edges a < b stands for atoms of mass M and mean c, and every function f of c that the
// relaxation sums is convex, so its atoms together are at most as good for the adversary as
// M (b - mean) / (b - a) at a plus M (mean - a) / (b - a) at b. The one sum that must not grow,
// Z = sum m e^-c, takes the tangent at the middle of the bin instead.
//
// What this costs: inside S, under M (b - a)^2 / 8 of the curvature; in the bin where the threshold
// falls, up to M (b - a) / 4 of the slope. Refine() splits that bin by 64.
#ifndef CERTKV_KERNELS_BOUNDS_TV_POINTS_H_
#define CERTKV_KERNELS_BOUNDS_TV_POINTS_H_

#include <array>
#include <bit>
#include <cstdint>

#include "kernels/bounds/tv_relaxation.h"
#include "kernels/bounds/worst_case_tv.h"

namespace certkv::bounds_internal {

// The half-widths whose bins have two edges.
inline constexpr float kTvBinnedMin = 0x1p-16f;
inline constexpr auto kTvBinnedMax = static_cast<float>(kTvHalfWidthMax);
inline constexpr int32_t kTvBinShift = 23 - 6;  // float bits below a bin's number
inline constexpr uint32_t kTvBinsBefore = ((127u - 16) << 6) - 1;  // 127 - 16: exponent of 2^-16
inline constexpr uint32_t kTvBinBytes = 128;

// One token taken out of the bins.
struct TvToken {
  double mass = 0;               // on the scale of the bins
  uint32_t half_width_bits = 0;  // of its atom, as float; from kTvHalfWidthMax on it is unbounded
  int64_t atom = -1;
  uint32_t own_bits = 0;  // the token's own, at most its atom's

  double half_width() const { return std::bit_cast<float>(half_width_bits); }
  bool unbounded() const { return !(half_width() < kTvHalfWidthMax); }
  // While it is set apart.
  double own_half_width() const { return std::bit_cast<float>(own_bits); }
  bool own_unbounded() const { return !(own_half_width() < kTvHalfWidthMax); }
};

class TvAtomBins {
 public:
  // Atoms up to this count are kept one by one and sorted; above it they go into bins.
  static constexpr int32_t kExactAtomsMax = 128;

  TvAtomBins();

  // False when the input makes every distribution possible (see worst_case_tv.h).
  template <typename Mass, typename HalfWidth>
  bool Load(const TvAtoms<Mass, HalfWidth>& atoms);

  double total_mass() const { return total_mass_; }
  // The heaviest tokens by descending mass; at most kTvHeavyTokensMax.
  int32_t token_count() const { return token_count_; }
  const TvToken& token(int32_t index) const { return tokens_[index]; }
  double share(const TvToken& token) const { return token.mass / total_mass_; }

  // The points of everything but the `token_count` heaviest tokens.
  void BuildPoints(int32_t token_count, TvPoints* points) const;

  // Splits the bins in which the threshold of (share, multiplier) falls, when one costs more than
  // `cost_max`. Returns whether one was split.
  template <typename Mass, typename HalfWidth>
  bool Refine(const TvAtoms<Mass, HalfWidth>& atoms, double share, double multiplier,
              double cost_max);

 private:
  static constexpr int32_t kOctaveBins = 64;
  static constexpr int32_t kBinShift = kTvBinShift;
  static constexpr uint32_t kBinsBefore = kTvBinsBefore;
  static constexpr int32_t kBinCount = 24 * kOctaveBins + 2;  // + [0, 2^-16) and unbounded
  static constexpr int32_t kUnboundedBin = kBinCount - 1;
  static constexpr int32_t kLanes = 8;  // neighbouring atoms add to different sums: no waiting
  static constexpr int32_t kPartsMax = 64;
  static constexpr int32_t kRefinedMax = 10;  // bins split in one call of WorstCaseTv
  static constexpr int32_t kCellCountMax = kBinCount + kRefinedMax * kPartsMax;

  static constexpr int32_t kChunkAtoms = kTvChunkAtoms;

  // Mass and moment, sum m c, side by side: one addition for both.
  typedef double Moments __attribute__((vector_size(16)));
  struct alignas(64) Bin {
    std::array<Moments, kLanes> lane{};

    void Add(int64_t atom, double mass, double moment) {
      lane[static_cast<uint64_t>(atom) % kLanes] += Moments{mass, moment};
    }
    Moments Total() const {
      return ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
             ((lane[4] + lane[5]) + (lane[6] + lane[7]));
    }
  };
  static_assert(sizeof(Bin) == kTvBinBytes);
  // A filled bin, or one exact atom (low_bits == high_bits).
  struct Cell {
    uint32_t low_bits = 0;  // edges as float bits
    uint32_t high_bits = 0;
    double mass = 0;
    double moment = 0;
  };
  struct Edge {
    double half_width, grown, shrunk;  // c, e^c, e^-c
  };
  struct Grid;  // the edges of the bins, computed once

  static int32_t BinOf(uint32_t bits);
  static uint32_t BinLowBits(int32_t bin);
  Edge EdgeAt(uint32_t bits) const;
  double ShrunkAtMiddle(const Cell& cell, double middle) const;

  template <typename Mass, typename HalfWidth>
  bool Scan(const TvAtoms<Mass, HalfWidth>& atoms, double scale);
  template <typename Mass, typename HalfWidth>
  bool AddPlainChunk(const Mass* mass, const Mass* top, const HalfWidth* half_width, int64_t begin);
  void AddKnownChunk(const float* mass, const float* half_width, float min, float max);
  template <typename Moment>
  void AddMoments(const uint32_t* offsets, const Moment* moments);
  template <typename Mass, typename HalfWidth>
  bool ScanChunk(const Mass* mass, const Mass* top, const HalfWidth* half_width,
                 const HalfWidth* top_half_width, int64_t begin, int32_t count);
  void Deposit(int64_t atom, uint32_t bits, double mass);
  TvToken KeepToken(const TvToken& token);
  void CollectCells();
  double SumMass() const;
  int32_t CellAbove(double half_width) const;
  double SplitCost(const Cell& cell, double share) const;
  template <typename Mass, typename HalfWidth>
  void SplitCell(const TvAtoms<Mass, HalfWidth>& atoms, int32_t index);

  const Grid* grid_;
  std::array<Bin, kBinCount> bins_{};  // all 0 between calls
  uint32_t bits_min_ = 0;              // of the half-widths in the bins
  uint32_t bits_max_ = 0;
  bool exact_ = false;                     // atoms are cells, not bins
  std::array<Cell, kCellCountMax> cells_;  // by ascending half-width
  int32_t cell_count_ = 0;
  int32_t refined_count_ = 0;
  std::array<TvToken, kTvHeavyTokensMax> tokens_;
  int32_t token_count_ = 0;
  double token_mass_min_ = 0;  // what the next token must exceed
  double scale_ = 1;
  double total_mass_ = 0;
  double unbounded_mass_ = 0;  // outside the tokens
  double rounding_ = 0;
};

}  // namespace certkv::bounds_internal

#endif  // CERTKV_KERNELS_BOUNDS_TV_POINTS_H_
