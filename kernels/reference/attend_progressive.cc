// The definition of a progressive read: sub-blocks by descending bound of their mass, until what is
// left is within the tolerance. Everything is computed of every sub-block; nothing is saved.
#include "kernels/ops/attend_progressive.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/bounds/rounding.h"
#include "kernels/bounds/skipping.h"
#include "kernels/core/half.h"
#include "kernels/reference/attend_half_width.h"
#include "kernels/reference/attend_parts.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/sequence.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {
namespace {

// exp and sums of at most 2^24 terms, in double.
constexpr double kUpperInflation = 1 + 0x1p-28;

// A sub-block as one head sees it.
struct SubBlock {
  TokenRange tokens{};   // of the range
  double upper = 0;      // log of a bound on sum e^l, from the coarse keys
  double lse = 0;        // of the full keys
  double max = 0;        // largest logit
  float half_width = 0;  // of the full keys
  bool is_read = false;
};

double CoarseLogit(const AttendArgs& args, int g, int64_t token) {
  const TileLayout& layout = *args.layout;
  const AttendTile& tile = args.tiles[token / kTileTokens];
  const AffineDepth depth = AffineDepthOf(KeyFormat::kK4);
  const int row = static_cast<int>(token % kTileTokens);
  double dot = 0;
  for (int i = 0; i < layout.head_dim; ++i) {
    const double key =
        DecodeAffineKey(depth, ReadKeyCode(layout, tile.scan, tile.detail, row, i),
                        ReadKeyScale(layout, tile.scan, i), ReadKeyZero(layout, tile.scan, i));
    dot += args.queries[int64_t{g} * layout.head_dim + i] * key;
  }
  const double logit = args.logit_scale * dot;
  return args.soft_cap > 0 ? args.soft_cap * std::tanh(logit / args.soft_cap) : logit;
}

// log of a bound on sum e^l over the tokens.
double UpperLse(const AttendArgs& args, int g, const TokenRange& tokens) {
  const double width = CoarseHalfWidth(args, g, static_cast<int32_t>(tokens.begin / kTileTokens));
  LogSumExp upper;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) upper.Add(CoarseLogit(args, g, t) + width);
  return upper.Value() + std::log(kUpperInflation) + std::fabs(upper.Value()) * 0x1p-50;
}

std::vector<SubBlock> SubBlocksOf(const AttendArgs& args, int g, double lse) {
  std::vector<SubBlock> blocks(size_t{kSubBlocksPerTile} * args.tile_count);
  for (size_t n = 0; n < blocks.size(); ++n) {
    SubBlock& block = blocks[n];
    const auto begin = static_cast<int64_t>(n) * kSubBlockTokens;
    block.tokens = {std::max(begin, args.token_begin),
                    std::min(begin + kSubBlockTokens, args.token_end)};
    if (block.tokens.begin >= block.tokens.end) continue;
    block.upper = UpperLse(args, g, block.tokens);
    LogSumExp served;
    for (int64_t t = block.tokens.begin; t < block.tokens.end; ++t) {
      served.Add(ServedLogit(args, g, t));
    }
    block.lse = served.Value();
    block.max = served.max();
    block.half_width = HalfWidthOf(args, g, block.tokens, lse);
  }
  return blocks;
}

// Tokens of chunk n of the tail that the read covers.
TokenRange TailTokens(const AttendArgs& args, int32_t chunk) {
  const int64_t begin = (int64_t{args.tile_count} + chunk) * kTileTokens;
  const int64_t end = int64_t{args.tile_count} * kTileTokens + args.tail_count;
  return {std::max(begin, args.token_begin), std::min({begin + kTileTokens, end, args.token_end})};
}

class HeadReader {
 public:
  HeadReader(const ProgressiveArgs& args, const ProgressiveResult& result, int g)
      : args_(args.read), result_(result), g_(g), ratio_(SkipRatio(args.skip_tolerance[g])) {}

  void Read() {
    LogSumExp all;
    for (int64_t t = args_.token_begin; t < args_.token_end; ++t) {
      all.Add(ServedLogit(args_, g_, t));
    }
    all.Add(SinkLogit(args_, g_));
    blocks_ = SubBlocksOf(args_, g_, all.Value());
    atom_ = int64_t{g_} * ProgressiveAtomsMax(args_);
    const int32_t tail_atoms = ProgressiveSinkAtom(args_);
    for (int32_t n = 0; n < tail_atoms; ++n) WriteTailAtom(n, all.Value());
    WriteAtom(SinkLogit(args_, g_), SinkLogit(args_, g_), 0);
    if (SinkLogit(args_, g_) > -kInfinity) kept_.Add(SinkLogit(args_, g_));
    Choose();
    for (const SubBlock& block : blocks_) {
      if (block.is_read) WriteAtom(block.lse, block.max, block.half_width);
    }
    result_.atom_count[g_] = static_cast<int32_t>(atom_ - int64_t{g_} * ProgressiveAtomsMax(args_));
    WriteValues();
  }

 private:
  void WriteAtom(double lse, double max, float half_width) {
    result_.block_lse[atom_] = static_cast<float>(lse);
    result_.block_max_logit[atom_] = static_cast<float>(max);
    result_.logit_half_width[atom_++] = half_width;
    served_.Add(lse);
  }

  void WriteTailAtom(int32_t chunk, double lse) {
    const TokenRange tokens = TailTokens(args_, chunk);
    LogSumExp atom;
    for (int64_t t = tokens.begin; t < tokens.end; ++t) atom.Add(ServedLogit(args_, g_, t));
    const float half_width = HalfWidthOf(args_, g_, tokens, lse);
    WriteAtom(atom.Value(), atom.max(), half_width);
    kept_.Add(atom.Value() - half_width);
  }

  // Marks what is read and writes the mask and the bound of the rest.
  void Choose() {
    std::vector<size_t> order(blocks_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [this](size_t a, size_t b) { return Upper(blocks_[a]) > Upper(blocks_[b]); });
    // Sums of the bounds from the smallest up: below[n] is that of order[n], order[n + 1], ...
    std::vector<LogSumExp> below(order.size() + 1);
    for (size_t n = order.size(); n-- > 0;) {
      below[n] = below[n + 1];
      below[n].Add(Upper(blocks_[order[n]]));
    }
    size_t n = 0;
    while (n < order.size() && !(below[n].Value() <= std::log(ratio_) + kept_.Value())) {
      SubBlock& block = blocks_[order[n++]];
      if (block.tokens.begin >= block.tokens.end) continue;
      block.is_read = true;
      kept_.Add(block.lse - block.half_width);
    }
    const double skipped = n < order.size() ? below[n].Value() : -kInfinity;
    const double inflated = skipped + std::log(kUpperInflation);
    const auto rounded = static_cast<float>(inflated);
    result_.skipped_lse_nat[g_] =
        rounded >= inflated ? rounded
                            : std::nextafter(rounded, std::numeric_limits<float>::infinity());
    for (size_t b = 0; b < blocks_.size(); ++b) {
      uint8_t* mask =
          result_.sub_blocks_read + int64_t{g_} * args_.tile_count + b / kSubBlocksPerTile;
      if (b % kSubBlocksPerTile == 0) *mask = 0;
      if (blocks_[b].is_read) *mask |= static_cast<uint8_t>(1u << (b % kSubBlocksPerTile));
    }
  }

  static double Upper(const SubBlock& block) {
    return block.tokens.begin < block.tokens.end ? block.upper : -kInfinity;
  }

  bool IsRead(int64_t token) const {
    return TileOf(args_, token) < 0 || blocks_[token / kSubBlockTokens].is_read;
  }

  void WriteValues() {
    const double lse = served_.Value();
    result_.lse_nat[g_] =
        lse > -kInfinity ? static_cast<float>(lse) : std::numeric_limits<float>::infinity();
    ValueSums sums;
    double value_term = 0;
    for (int64_t t = args_.token_begin; t < args_.token_end; ++t) {
      if (!IsRead(t)) continue;
      const double weight = std::exp(ServedLogit(args_, g_, t) - lse);
      AddValue(args_, g_, t, weight, &sums);
      // As in Attend: an infinite eta stays infinite.
      if (TileOf(args_, t) >= 0) {
        value_term += (weight + 0x1p-1000) * ValueErrorBound(args_, g_, t);
      }
    }
    result_.value_term[g_] = ToFloatRoundedUp(value_term * (1 + kSumInflation));
    float* output = result_.outputs == nullptr
                        ? nullptr
                        : result_.outputs + int64_t{g_} * args_.layout->value_dim;
    result_.rounding_term[g_] = ToFloatRoundedUp(WriteOutput(args_, &sums, output));
  }

  const AttendArgs& args_;
  const ProgressiveResult& result_;
  const int g_;
  const double ratio_;
  std::vector<SubBlock> blocks_;
  LogSumExp kept_;    // L, from the tail, the sink and what is read so far
  LogSumExp served_;  // of all atoms
  int64_t atom_ = 0;  // the next one to be written
};

}  // namespace

void AttendProgressive(const ProgressiveArgs& args, const ProgressiveResult& result) {
  for (int g = 0; g < args.read.group_size; ++g) HeadReader(args, result, g).Read();
  result.value_radius[0] = ValueRadius(args.read);
}

}  // namespace certkv::reference
