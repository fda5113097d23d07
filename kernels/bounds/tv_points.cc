#include "kernels/bounds/tv_points.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/bounds/rounding.h"
#include "kernels/bounds/tv_chunks.h"

namespace certkv::bounds_internal {
namespace {

// Insertion sort: std::sort on an array of 6 trips a false -Warray-bounds of GCC 12.
template <typename Key>
void SortTokens(std::array<TvToken, kTvHeavyTokensMax>* tokens, int32_t count, Key key) {
  for (int32_t k = 1; k < count; ++k) {
    const TvToken token = (*tokens)[k];
    int32_t place = k;
    for (; place > 0 && key(token) < key((*tokens)[place - 1]); --place) {
      (*tokens)[place] = (*tokens)[place - 1];
    }
    (*tokens)[place] = token;
  }
}

}  // namespace

struct TvAtomBins::Grid {
  std::array<Edge, kBinCount> edges;            // low edge of each bin
  std::array<double, kBinCount> shrunk_middle;  // e^-c at the middle of each bin

  Grid() {
    for (int32_t bin = 0; bin < kBinCount; ++bin) {
      const double c = std::bit_cast<float>(BinLowBits(bin));
      edges[bin] = {c, std::exp(c), std::exp(-c)};
    }
    for (int32_t bin = 0; bin + 1 < kBinCount; ++bin) {
      shrunk_middle[bin] = std::exp(-(edges[bin].half_width + edges[bin + 1].half_width) / 2);
    }
    shrunk_middle[kUnboundedBin] = 0;
  }
};

TvAtomBins::TvAtomBins() {
  static const Grid grid;
  grid_ = &grid;
}

inline int32_t TvAtomBins::BinOf(uint32_t bits) {
  const uint32_t bin = std::max(bits >> kBinShift, kBinsBefore) - kBinsBefore;
  return static_cast<int32_t>(std::min<uint32_t>(bin, kUnboundedBin));
}

inline uint32_t TvAtomBins::BinLowBits(int32_t bin) {
  if (bin == 0) return 0;
  return (kBinsBefore + static_cast<uint32_t>(bin)) << kBinShift;
}

inline TvAtomBins::Edge TvAtomBins::EdgeAt(uint32_t bits) const {
  const int32_t bin = BinOf(bits);
  if (BinLowBits(bin) == bits) return grid_->edges[bin];
  const double c = std::bit_cast<float>(bits);
  const double grown = std::exp(c);
  return {c, grown, 1 / grown};
}

inline double TvAtomBins::ShrunkAtMiddle(const Cell& cell, double middle) const {
  const int32_t bin = BinOf(cell.low_bits);
  if (BinLowBits(bin) == cell.low_bits && BinLowBits(bin + 1) == cell.high_bits) {
    return grid_->shrunk_middle[bin];
  }
  return std::exp(-middle);
}

// Puts `token` among the heaviest and returns the one that has to leave (mass 0: none).
TvToken TvAtomBins::KeepToken(const TvToken& token) {
  TvToken displaced;
  if (token_count_ == kTvHeavyTokensMax) {
    displaced = tokens_[kTvHeavyTokensMax - 1];
  } else {
    ++token_count_;
  }
  int32_t place = token_count_ - 1;
  while (place > 0 && tokens_[place - 1].mass < token.mass) {
    tokens_[place] = tokens_[place - 1];
    --place;
  }
  tokens_[place] = token;
  return displaced;
}

// One sum into its bin, outside the hot loop.
void TvAtomBins::Deposit(int64_t atom, uint32_t bits, double mass) {
  const int32_t bin = BinOf(bits);
  if (!exact_) {
    // An unbounded half-width may be infinite or NaN; nobody asks for the moment of its bin.
    bins_[bin].Add(atom, mass, bin == kUnboundedBin ? 0 : mass * std::bit_cast<float>(bits));
    bits_min_ = std::min(bits_min_, bits);
    bits_max_ = std::max(bits_max_, bits);
  } else if (bin == kUnboundedBin) {
    unbounded_mass_ += mass;
  } else {
    cells_[cell_count_++] = {bits, bits, mass, 0};
  }
}

// The hot loop: a full chunk of atoms of which none is a token to keep, out of range or invalid.
// False, with nothing added, when one is.
template <typename Mass, typename HalfWidth>
bool TvAtomBins::AddPlainChunk(const Mass* mass, const Mass* top, const HalfWidth* half_width,
                               int64_t begin) {
  PlainChunk chunk;
  PrepareChunk(mass + begin, top + begin, half_width + begin, static_cast<Mass>(token_mass_min_),
               &chunk);
  if (!chunk.plain) return false;
  bits_min_ = std::min(bits_min_, chunk.bits_min);
  bits_max_ = std::max(bits_max_, chunk.bits_max);
  AddMoments(chunk.offsets, chunk.moments);
  return true;
}

// Neighbouring atoms add to different lanes, so that they don't wait for each other.
template <typename Moment>
[[gnu::always_inline]] inline void TvAtomBins::AddMoments(const uint32_t* offsets,
                                                          const Moment* moments) {
  auto* const bytes = reinterpret_cast<unsigned char*>(bins_.data());
  for (int32_t j = 0; j < kChunkAtoms; j += kLanes) {
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      auto* const bin = reinterpret_cast<Bin*>(bytes + offsets[j + lane]);
      const Moment* const pair = moments + 2 * (j + lane);
      bin->lane[lane] += Moments{double{pair[0]}, double{pair[1]}};
    }
  }
}

// The same chunk where the caller of WorstCaseTv has looked at it; [min, max] are its half-widths.
void TvAtomBins::AddKnownChunk(const float* mass, const float* half_width, float min, float max) {
  KnownChunk chunk;
  PairKnown(mass, half_width, &chunk);
  bits_min_ = std::min(bits_min_, BitsOf(min));
  bits_max_ = std::max(bits_max_, BitsOf(max));
  AddMoments(chunk.offsets, chunk.moments);
}

// Any chunk.
template <typename Mass, typename HalfWidth>
bool TvAtomBins::ScanChunk(const Mass* mass, const Mass* top, const HalfWidth* half_width,
                           const HalfWidth* top_half_width, int64_t begin, int32_t count) {
  bool valid = true;
  for (int64_t i = begin; i < begin + count; ++i) {
    double rest = double{mass[i]} * scale_;
    const double token_mass = std::min(double{top[i]} * scale_, rest);
    const uint32_t bits = BitsOf(half_width[i]);
    valid &= rest >= 0 && token_mass >= 0 && !std::isnan(half_width[i]);
    if (token_mass > token_mass_min_) {
      // Comparisons are false for NaN.
      const bool has_own = top_half_width[i] >= 0 && top_half_width[i] <= half_width[i];
      const uint32_t own_bits = has_own ? BitsOf(top_half_width[i]) : bits;
      const TvToken displaced = KeepToken({token_mass, bits, i, own_bits});
      if (displaced.mass > 0) Deposit(displaced.atom, displaced.half_width_bits, displaced.mass);
      if (token_count_ == kTvHeavyTokensMax) token_mass_min_ = tokens_[token_count_ - 1].mass;
      rest -= token_mass;
    }
    Deposit(i, bits, rest);
  }
  return valid;
}

template <typename Mass, typename HalfWidth>
bool TvAtomBins::Scan(const TvAtoms<Mass, HalfWidth>& atoms, double scale) {
  const auto count = static_cast<int64_t>(atoms.mass.size());
  const Mass* const mass = atoms.mass.data();
  const HalfWidth* const half_width = atoms.half_width.data();
  const Mass* const top = atoms.top_token_mass.empty() ? mass : atoms.top_token_mass.data();
  const HalfWidth* const top_half_width =
      atoms.top_half_width.empty() ? half_width : atoms.top_half_width.data();
  exact_ = count <= kExactAtomsMax;
  cell_count_ = refined_count_ = token_count_ = 0;
  token_mass_min_ = unbounded_mass_ = 0;
  bits_min_ = std::numeric_limits<uint32_t>::max();
  bits_max_ = 0;
  scale_ = scale;
  bool valid = true;
  bool has_float_moments = false;
  int64_t begin = 0;
  for (; begin + kChunkAtoms <= count; begin += kChunkAtoms) {
    if constexpr (std::is_same_v<Mass, float>) {
      const int64_t chunk = begin / kChunkAtoms;
      if (!exact_ && scale == 1 && !atoms.chunk_half_width_max.empty() &&
          atoms.chunk_half_width_max[chunk] < kTvBinnedMax &&
          atoms.chunk_half_width_min[chunk] >= kTvBinnedMin) {
        AddKnownChunk(mass + begin, half_width + begin, atoms.chunk_half_width_min[chunk],
                      atoms.chunk_half_width_max[chunk]);
        has_float_moments = true;
        continue;
      }
    }
    if (exact_ || scale != 1 || !AddPlainChunk(mass, top, half_width, begin)) {
      valid &= ScanChunk(mass, top, half_width, top_half_width, begin, kChunkAtoms);
    }
  }
  valid &=
      ScanChunk(mass, top, half_width, top_half_width, begin, static_cast<int32_t>(count - begin));
  CollectCells();
  total_mass_ = SumMass();
  const double c_max = exact_ || cell_count_ == 0
                           ? 1
                           : double{std::bit_cast<float>(cells_[cell_count_ - 1].high_bits)};
  // n additions of masses, as many of points, exp and a few products; a bin's weights come from a
  // mean, where a relative error of the moment is c times as large.
  rounding_ = (static_cast<double>(count) + 64) * 0x1p-51 * (1 + c_max);
  // A float moment is off by 2^-24 of itself; what is below 2^-126 is off by 2^-150, and at most
  // 2^64 atoms of that are nothing beside a sum of at least 2^-32.
  if (has_float_moments) rounding_ += 0x1p-22 * (1 + c_max);
  return valid;
}

// Takes the sums out of the bins, in order, and leaves the bins 0. The first and the last cell end
// where half-widths do, so that equal ones make a cell without width.
void TvAtomBins::CollectCells() {
  if (exact_) {
    std::sort(cells_.begin(), cells_.begin() + cell_count_,
              [](const Cell& a, const Cell& b) { return a.low_bits < b.low_bits; });
    return;
  }
  const uint32_t bits_end = BinOf(bits_max_) == kUnboundedBin ? bits_max_ : bits_max_ + 1;
  const auto collect = [&](int32_t bin) {
    Bin& sums = bins_[bin];
    const Moments total = sums.Total();
    sums = Bin{};
    if (total[0] == 0) return;
    if (bin == kUnboundedBin) {
      unbounded_mass_ = total[0];
    } else {
      cells_[cell_count_++] = {std::max(BinLowBits(bin), bits_min_),
                               std::min(BinLowBits(bin + 1), bits_end), total[0], total[1]};
    }
  };
  if (bits_min_ > bits_max_) return;
  for (int32_t bin = BinOf(bits_min_); bin <= BinOf(bits_max_); ++bin) collect(bin);
}

double TvAtomBins::SumMass() const {
  double sum = unbounded_mass_;
  for (int32_t k = 0; k < cell_count_; ++k) sum += cells_[k].mass;
  for (int32_t k = 0; k < token_count_; ++k) sum += tokens_[k].mass;
  return sum;
}

template <typename Mass, typename HalfWidth>
bool TvAtomBins::Load(const TvAtoms<Mass, HalfWidth>& atoms) {
  const size_t count = atoms.mass.size();
  if (count == 0 || count != atoms.half_width.size() ||
      (!atoms.top_token_mass.empty() && count != atoms.top_token_mass.size()) ||
      (!atoms.top_half_width.empty() && count != atoms.top_half_width.size()) ||
      atoms.chunk_half_width_min.size() != atoms.chunk_half_width_max.size() ||
      (!atoms.chunk_half_width_max.empty() &&
       count / kTvChunkAtoms != atoms.chunk_half_width_max.size())) {
    return false;
  }
  if (!Scan(atoms, 1)) return false;
  // Away from underflow and overflow of mass times half-width, by a power of two, which is exact.
  if (total_mass_ > 0 && total_mass_ < 0x1p-500 && !Scan(atoms, 0x1p500)) return false;
  if (total_mass_ > 0x1p500 && !Scan(atoms, 0x1p-500)) return false;
  return total_mass_ > 0 && total_mass_ <= std::numeric_limits<double>::max();
}

void TvAtomBins::BuildPoints(int32_t token_count, TvPoints* points) const {
  const double inverse_total = 1 / total_mass_;
  // The tokens that stay in the relaxation, by ascending half-width.
  std::array<TvToken, kTvHeavyTokensMax> free;
  int32_t free_count = 0;
  double unbounded = unbounded_mass_;
  for (int32_t k = token_count; k < token_count_; ++k) {
    if (tokens_[k].unbounded()) {
      unbounded += tokens_[k].mass;
    } else {
      free[free_count++] = tokens_[k];
    }
  }
  SortTokens(&free, free_count, [](const TvToken& token) { return token.half_width_bits; });

  int32_t count = 0;
  uint32_t last_bits = 0;
  double extra_shrunk = 0;  // sum W / y of the points, minus a lower bound on it for the atoms
  const auto add = [&](uint32_t bits, double weight) {
    if (!(weight > 0)) return;
    if (count > 0 && last_bits == bits) {
      points->weight[count - 1] += weight;
      return;
    }
    const Edge edge = EdgeAt(bits);
    points->y[count] = edge.grown;
    points->inverse[count] = edge.shrunk;
    points->weight[count] = weight;
    last_bits = bits;
    ++count;
  };
  int32_t next_free = 0;
  const auto add_free_up_to = [&](uint32_t bits) {
    for (; next_free < free_count && free[next_free].half_width_bits <= bits; ++next_free) {
      const TvToken& token = free[next_free];
      add(token.half_width_bits, token.mass * inverse_total);
    }
  };
  for (int32_t k = 0; k < cell_count_; ++k) {
    const Cell& cell = cells_[k];
    const double mass = cell.mass * inverse_total;
    add_free_up_to(cell.low_bits);
    if (cell.low_bits == cell.high_bits) {
      add(cell.low_bits, mass);
      continue;
    }
    const Edge low = EdgeAt(cell.low_bits);
    const Edge high = EdgeAt(cell.high_bits);
    const double moment = cell.moment * inverse_total;
    const double width = high.half_width - low.half_width;
    const double at_high = std::clamp((moment - low.half_width * mass) / width, 0.0, mass);
    const double at_low = mass - at_high;
    add(cell.low_bits, at_low);
    add_free_up_to(cell.high_bits);
    add(cell.high_bits, at_high);
    const double middle = (low.half_width + high.half_width) / 2;
    const double tangent = ShrunkAtMiddle(cell, middle) * (mass * (1 + middle) - moment);
    extra_shrunk += std::max(0.0, at_low * low.shrunk + at_high * high.shrunk - tangent);
  }
  add_free_up_to(std::numeric_limits<uint32_t>::max());
  points->count = count;
  points->unbounded_mass = unbounded * inverse_total;
  points->rounding = rounding_;
  points->Sum();
  points->shrunk_total = std::max(0.0, points->shrunk_from[0] - extra_shrunk);
}

// What the adversary gains in `cell` from the spread to its edges, at most, when the threshold lies
// in it: with the multiplier at the mean, the mean itself is worth 0 (and by Jensen the atoms are
// worth no less), while the edges are worth this. The multiplier found for the spread problem would
// not do: it lies on an edge and hides the gain.
double TvAtomBins::SplitCost(const Cell& cell, double share) const {
  if (cell.high_bits - cell.low_bits < 2 || cell.low_bits == 0) return 0;
  const Edge low = EdgeAt(cell.low_bits);
  const Edge high = EdgeAt(cell.high_bits);
  const double mean = std::clamp(cell.moment / cell.mass, low.half_width, high.half_width);
  const double high_part = (mean - low.half_width) / (high.half_width - low.half_width);
  const auto height = [&](double grown, double shrunk) {
    return (1 - share) * grown + share * shrunk;
  };
  const double at_mean = height(std::exp(mean), std::exp(-mean));
  const auto worth = [&](const Edge& edge) {
    return std::max(0.0, height(edge.grown, edge.shrunk) / at_mean - 1);
  };
  const double spread = (1 - high_part) * worth(low) + high_part * worth(high);
  return spread * cell.mass / total_mass_;
}

// The first cell whose high edge is not below `half_width`.
int32_t TvAtomBins::CellAbove(double half_width) const {
  const auto* end = cells_.data() + cell_count_;
  return static_cast<int32_t>(
      std::lower_bound(cells_.data(), end, half_width,
                       [](const Cell& cell, double c) {
                         return double{std::bit_cast<float>(cell.high_bits)} < c;
                       }) -
      cells_.data());
}

template <typename Mass, typename HalfWidth>
bool TvAtomBins::Refine(const TvAtoms<Mass, HalfWidth>& atoms, double share, double multiplier,
                        double cost_max) {
  if (exact_ || !(multiplier > 0)) return false;
  // The thresholds: multiplier * h_r(y) = 1. Just below each, so that a threshold on an edge finds
  // the cells on both sides.
  const double level = 1 / multiplier;
  const double root = std::sqrt(std::max(0.0, level * level - 4 * share * (1 - share)));
  const double upper = std::log((level + root) / (2 * (1 - share)));
  const double lower = std::log(2 * share / (level + root));
  bool split = false;
  for (const double threshold : {upper, lower}) {
    if (!(threshold > 0 && threshold < kTvHalfWidthMax)) continue;
    // Splitting keeps earlier cells in place, so go from the upper cell down.
    const int32_t first = CellAbove(threshold * (1 - 1e-6));
    for (int32_t k = std::min(first + 1, cell_count_ - 1); k >= first; --k) {
      if (refined_count_ == kRefinedMax) return split;
      if (!(SplitCost(cells_[k], share) > cost_max)) continue;
      SplitCell(atoms, k);
      split = true;
    }
  }
  return split;
}

template <typename Mass, typename HalfWidth>
void TvAtomBins::SplitCell(const TvAtoms<Mass, HalfWidth>& atoms, int32_t index) {
  const Cell cell = cells_[index];
  const uint32_t width = cell.high_bits - cell.low_bits;
  const int shift = std::max(
      0, static_cast<int>(std::bit_width(width - 1)) - std::countr_zero(uint32_t{kPartsMax}));
  const auto part_count = static_cast<int32_t>((width - 1) >> shift) + 1;
  std::array<Bin, kPartsMax> parts{};
  // The tokens' atoms in order, so that each is met once on the way.
  std::array<TvToken, kTvHeavyTokensMax> tokens = tokens_;
  SortTokens(&tokens, token_count_, [](const TvToken& token) { return token.atom; });
  int32_t next_token = 0;
  const auto count = static_cast<int64_t>(atoms.mass.size());
  for (int64_t i = 0; i < count; ++i) {
    double mass = double{atoms.mass[i]} * scale_;
    if (next_token < token_count_ && tokens[next_token].atom == i) {
      mass -= tokens[next_token++].mass;
    }
    const uint32_t bits = BitsOf(atoms.half_width[i]);
    if (bits - cell.low_bits >= width) continue;
    Bin& part = parts[(bits - cell.low_bits) >> shift];
    part.Add(i, mass, mass * std::bit_cast<float>(bits));
  }
  std::array<Cell, kPartsMax> filled;
  int32_t filled_count = 0;
  for (int32_t k = 0; k < part_count; ++k) {
    const Moments total = parts[k].Total();
    if (!(total[0] > 0)) continue;
    const uint32_t low = cell.low_bits + (static_cast<uint32_t>(k) << shift);
    filled[filled_count++] = {low, std::min(low + (1u << shift), cell.high_bits), total[0],
                              total[1]};
  }
  std::copy_backward(cells_.begin() + index + 1, cells_.begin() + cell_count_,
                     cells_.begin() + cell_count_ + filled_count - 1);
  std::copy(filled.begin(), filled.begin() + filled_count, cells_.begin() + index);
  cell_count_ += filled_count - 1;
  ++refined_count_;
}

template bool TvAtomBins::Load(const TvAtoms<double, double>&);
template bool TvAtomBins::Load(const TvAtoms<double, float>&);
template bool TvAtomBins::Load(const TvAtoms<float, float>&);
template bool TvAtomBins::Refine(const TvAtoms<double, double>&, double, double, double);
template bool TvAtomBins::Refine(const TvAtoms<double, float>&, double, double, double);
template bool TvAtomBins::Refine(const TvAtoms<float, float>&, double, double, double);

}  // namespace certkv::bounds_internal
