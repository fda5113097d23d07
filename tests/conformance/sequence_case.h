// One sequence for a test: originals, sealed tiles, tail, queries, and the arguments of a read.
#ifndef CERTKV_TESTS_CONFORMANCE_SEQUENCE_CASE_H_
#define CERTKV_TESTS_CONFORMANCE_SEQUENCE_CASE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend.h"

namespace certkv::conformance {

// What the originals look like.
enum class Content : uint8_t {
  kNormal,     // channels of different centres and spreads
  kOutlier,    // a few channels 30 times as large
  kNeedle,     // one token in the middle that every query points at
  kZero,       // +0 and -0
  kConstant,   // each channel constant over the tokens
  kDenormal,   // subnormals of the dtype, large queries
  kHuge,       // the largest finite numbers of fp16, small queries
  kUnbounded,  // BF16 values of 1e37, which no value format can hold
};

struct SequenceShape {
  KeyFormat key_format = KeyFormat::kK8;
  ValueFormat value_format = ValueFormat::kV4;
  int32_t witness_bands = 0;
  bool is_weighted = false;  // the witness: random weights, with outliers extreme ones
  OriginalDtype dtype = OriginalDtype::kF16;
  int32_t head_dim = 64;
  int32_t value_dim = 64;
  int32_t group_size = 3;
  int32_t tile_count = 2;
  int32_t tail_count = 17;
  int64_t token_begin = 0;
  int64_t token_end = -1;  // -1: the whole sequence
  float logit_scale = 0;   // 0: 1 / sqrt(d)
  float soft_cap = 0;
  bool has_sink = false;
  bool has_sources = false;  // every head reads every tile from its own random source
  int32_t padding = 0;       // elements between rows of the tail, and before its first
  RopePairing pairing = RopePairing::kInterleaved;
  Content content = Content::kNormal;
};

struct AlignedFree {
  void operator()(uint8_t* bytes) const;
};
using AlignedBytes = std::unique_ptr<uint8_t[], AlignedFree>;
// Zeroed, 64-byte aligned.
AlignedBytes AllocateAligned(int64_t size_bytes);

// A valid spec of that shape, one layer.
CacheSpec SpecOfShape(const SequenceShape& shape);

// Not copyable: args() points into it.
class SequenceCase {
 public:
  // Random content; the tiles are sealed with `quantizer`, which must succeed.
  SequenceCase(const SequenceShape& shape, uint64_t seed, Backend quantizer);
  // The first `token_count` rows given, [token][d] and [token][d_v] with strides in elements; what
  // does not fill a tile is the tail. `shape.tile_count`, `tail_count` and `content` are ignored.
  // queries: [G][d].
  SequenceCase(const SequenceShape& shape, const CacheSpec& spec, const uint16_t* keys,
               int64_t key_stride, const uint16_t* values, int64_t value_stride,
               int64_t token_count, Backend quantizer);
  SequenceCase(const SequenceCase&) = delete;
  SequenceCase& operator=(const SequenceCase&) = delete;

  const CacheSpec& spec() const { return spec_; }
  const TileLayout& layout() const { return layout_; }
  // Arguments of the read; a test may change the copy.
  const AttendArgs& args() const { return args_; }
  int64_t token_count() const { return token_count_; }

  float OriginalKey(int64_t token, int i) const {
    return OriginalToFloat(spec_.original_dtype, keys_[token * spec_.head_dim + i]);
  }
  float OriginalValue(int64_t token, int i) const {
    return OriginalToFloat(spec_.original_dtype, values_[token * spec_.value_dim + i]);
  }
  uint8_t* scan(int tile) { return tiles_.get() + tile * layout_.tile_bytes(); }
  uint8_t* detail(int tile) { return scan(tile) + layout_.scan_bytes; }
  void SetQueries(std::vector<float> queries);
  void SetRange(int64_t token_begin, int64_t token_end);

 private:
  void SealTiles(int32_t tile_count, Backend quantizer);
  void BuildTail(int32_t tail_count, int32_t padding);

  CacheSpec spec_;
  TileLayout layout_;
  int64_t token_count_;
  std::vector<uint16_t> keys_;    // [token][d]
  std::vector<uint16_t> values_;  // [token][d_v]
  std::vector<float> queries_;
  std::vector<float> sinks_;
  std::vector<uint8_t> sources_;
  std::vector<uint16_t> tail_keys_;
  std::vector<uint16_t> tail_values_;
  AlignedBytes tiles_;
  std::vector<AttendTile> tile_views_;
  AttendArgs args_{};
};

// Memory for the results of one read.
class ReadResult {
 public:
  explicit ReadResult(const AttendArgs& args);
  ReadResult(const ReadResult&) = delete;
  ReadResult& operator=(const ReadResult&) = delete;

  // Attend of that backend, which must succeed.
  void Run(Backend backend, const AttendArgs& args);
  const AttendResult& view() const { return view_; }
  AttendResult* mutable_view() { return &view_; }
  int32_t atom_count() const { return atom_count_; }
  absl::Span<const float> block_lse(int g) const { return Row(view_.block_lse, g, atom_count_); }
  absl::Span<const float> block_max_logit(int g) const {
    return Row(view_.block_max_logit, g, atom_count_);
  }
  absl::Span<const float> half_width(int g) const {
    return Row(view_.logit_half_width, g, atom_count_);
  }
  absl::Span<const float> top_half_width(int g) const {
    return Row(view_.top_half_width, g, atom_count_);
  }
  absl::Span<const float> output(int g) const { return Row(view_.outputs, g, value_dim_); }
  absl::Span<const float> tile_value_error(int g) const {
    return Row(view_.tile_value_error, g, tile_count_);
  }

 private:
  static absl::Span<const float> Row(const float* rows, int64_t g, int64_t width) {
    return {rows + g * width, static_cast<size_t>(width)};
  }

  int32_t atom_count_;
  int32_t tile_count_;
  int32_t value_dim_;
  std::vector<float> memory_;
  AttendResult view_{};
};

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_SEQUENCE_CASE_H_
