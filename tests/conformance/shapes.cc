#include "tests/conformance/shapes.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace certkv::conformance {
namespace {

struct FormatChoice {
  const char* name;
  KeyFormat key_format;
  ValueFormat value_format;
  int32_t witness_bands;
  bool is_weighted = false;
};

constexpr FormatChoice kFormats[] = {
    {"K8V4", KeyFormat::kK8, ValueFormat::kV4, 0},
    {"K8V8", KeyFormat::kK8, ValueFormat::kV8, 0},
    {"K8DV4", KeyFormat::kK8D, ValueFormat::kV4, 0},
    {"K8DV8", KeyFormat::kK8D, ValueFormat::kV8, 0},
    {"K8V4w1", KeyFormat::kK8, ValueFormat::kV4, 1},
    {"K8V8w4", KeyFormat::kK8, ValueFormat::kV8, 4},
    {"K6V4", KeyFormat::kK6, ValueFormat::kV4, 0},
    {"K6V4w1", KeyFormat::kK6, ValueFormat::kV4, 1},
    {"K6V8w4", KeyFormat::kK6, ValueFormat::kV8, 4},
    {"K4V4", KeyFormat::kK4, ValueFormat::kV4, 0},
    {"K4V8w1", KeyFormat::kK4, ValueFormat::kV8, 1},
    {"FP8V8w4", KeyFormat::kFp8E4m3, ValueFormat::kV8, 4},
    {"FP8V4w4", KeyFormat::kFp8E4m3, ValueFormat::kV4, 4},
    {"K6V4w1c", KeyFormat::kK6, ValueFormat::kV4, 1, true},
    {"K8V8w4c", KeyFormat::kK8, ValueFormat::kV8, 4, true},
    {"FP8V4w4c", KeyFormat::kFp8E4m3, ValueFormat::kV4, 4, true},
};

SequenceShape ShapeOf(const FormatChoice& format) {
  SequenceShape shape;
  shape.key_format = format.key_format;
  shape.value_format = format.value_format;
  shape.witness_bands = format.witness_bands;
  shape.is_weighted = format.is_weighted;
  return shape;
}

SequenceShape OriginalShape(OriginalDtype dtype) {
  SequenceShape shape;
  shape.dtype = dtype;
  const bool is_f16 = dtype == OriginalDtype::kF16;
  shape.key_format = is_f16 ? KeyFormat::kF16 : KeyFormat::kBf16;
  shape.value_format = is_f16 ? ValueFormat::kF16 : ValueFormat::kBf16;
  return shape;
}

}  // namespace

SequenceShape ShapeOfFormat(absl::string_view name) {
  const auto* const found = std::find_if(
      std::begin(kFormats), std::end(kFormats),
      [name](const FormatChoice& format) { return absl::string_view(format.name) == name; });
  CERTKV_CHECK(found != std::end(kFormats), "the suite has the format");
  return ShapeOf(*found);
}

std::vector<NamedShape> FormatShapes() {
  std::vector<NamedShape> shapes;
  for (const FormatChoice& format : kFormats) {
    SequenceShape shape = ShapeOf(format);
    shapes.push_back({absl::StrCat(format.name, "_of_F16"), shape});
    shape.dtype = OriginalDtype::kBf16;
    shapes.push_back({absl::StrCat(format.name, "_of_BF16"), shape});
  }
  shapes.push_back({"F16", OriginalShape(OriginalDtype::kF16)});
  shapes.push_back({"BF16", OriginalShape(OriginalDtype::kBf16)});
  return shapes;
}

std::vector<NamedShape> DimensionShapes() {
  constexpr int32_t kDims[] = {64, 80, 96, 128, 256};
  constexpr RopePairing kPairings[] = {RopePairing::kInterleaved, RopePairing::kHalfSplit,
                                       RopePairing::kNone};
  const FormatChoice choices[] = {kFormats[0], kFormats[6], kFormats[9]};
  std::vector<NamedShape> shapes;
  int index = 0;
  for (const int32_t head_dim : kDims) {
    for (const int32_t value_dim : kDims) {
      const FormatChoice& format = choices[index % 3];
      SequenceShape shape = ShapeOf(format);
      shape.head_dim = head_dim;
      shape.value_dim = value_dim;
      shape.pairing = kPairings[index / 3 % 3];
      shape.group_size = 2;
      shapes.push_back({absl::StrCat("d", head_dim, "_dv", value_dim, "_", format.name), shape});
      ++index;
    }
  }
  for (const int32_t dim : kDims) {
    SequenceShape shape = OriginalShape(OriginalDtype::kF16);
    shape.head_dim = dim;
    shape.value_dim = kDims[dim % 5];
    shapes.push_back({absl::StrCat("d", dim, "_F16"), shape});
  }
  return shapes;
}

std::vector<NamedShape> ContentShapes() {
  constexpr std::pair<const char*, Content> kContents[] = {
      {"normal", Content::kNormal},     {"outlier", Content::kOutlier},
      {"needle", Content::kNeedle},     {"zero", Content::kZero},
      {"constant", Content::kConstant}, {"denormal", Content::kDenormal},
      {"huge", Content::kHuge}};
  std::vector<NamedShape> shapes;
  for (const auto& [name, content] : kContents) {
    for (const int format : {0, 5, 9, 13}) {
      SequenceShape shape = ShapeOf(kFormats[format]);
      shape.content = content;
      shapes.push_back({absl::StrCat(name, "_", kFormats[format].name, "_of_F16"), shape});
      shape.dtype = OriginalDtype::kBf16;
      shapes.push_back({absl::StrCat(name, "_", kFormats[format].name, "_of_BF16"), shape});
    }
    SequenceShape shape = OriginalShape(OriginalDtype::kF16);
    shape.content = content;
    shapes.push_back({absl::StrCat(name, "_F16"), shape});
  }
  SequenceShape shape = ShapeOf(kFormats[0]);
  shape.content = Content::kUnbounded;
  shape.dtype = OriginalDtype::kBf16;
  shapes.push_back({"unbounded_values", shape});
  return shapes;
}

std::vector<NamedShape> RangeShapes() {
  struct Range {
    const char* name;
    int32_t tile_count;
    int32_t tail_count;
    int64_t token_begin;
    int64_t token_end;
  };
  constexpr Range kRanges[] = {
      {"one_token_of_a_tail", 0, 1, 0, 1},
      {"one_token_of_a_tile", 1, 0, 0, 1},
      {"last_token_of_a_tile", 1, 0, 63, 64},
      {"tail_of_63", 0, 63, 0, 63},
      {"tail_of_64", 0, 64, 0, 64},
      {"tail_of_65", 0, 65, 0, 65},
      {"tail_of_1024", 0, 1024, 0, 1024},
      {"one_tile", 1, 0, 0, 64},
      {"three_tiles", 3, 0, 0, 192},
      {"tile_and_one", 1, 1, 0, 65},
      {"first_63_of_a_tile", 1, 0, 0, 63},
      {"odd", 5, 37, 0, 357},
      {"begins_inside_a_tile", 4, 20, 37, 276},
      {"begins_at_a_sub_block", 4, 20, 80, 276},
      {"ends_inside_a_tile", 4, 20, 0, 171},
      {"window_inside_one_sub_block", 2, 5, 66, 73},
      {"window_across_tiles", 4, 20, 50, 131},
      {"window_in_the_tail", 4, 50, 260, 290},
      {"window_from_tile_to_tail", 4, 100, 250, 330},
  };
  std::vector<NamedShape> shapes;
  for (const Range& range : kRanges) {
    for (const int format : {0, 6}) {
      SequenceShape shape = ShapeOf(kFormats[format]);
      shape.tile_count = range.tile_count;
      shape.tail_count = range.tail_count;
      shape.token_begin = range.token_begin;
      shape.token_end = range.token_end;
      shapes.push_back({absl::StrCat(range.name, "_", kFormats[format].name), shape});
    }
  }
  for (int group_size = 1; group_size <= kGroupSizeMax; ++group_size) {
    SequenceShape shape = ShapeOf(kFormats[group_size % std::size(kFormats)]);
    shape.group_size = group_size;
    shapes.push_back({absl::StrCat("group_of_", group_size), shape});
  }
  return shapes;
}

std::vector<NamedShape> OptionShapes() {
  std::vector<NamedShape> shapes;
  for (const int format : {0, 5, 9, -1}) {
    const SequenceShape plain =
        format < 0 ? OriginalShape(OriginalDtype::kF16) : ShapeOf(kFormats[format]);
    const std::string suffix = format < 0 ? "_F16" : absl::StrCat("_", kFormats[format].name);
    SequenceShape shape = plain;
    shape.soft_cap = 5.0f;
    shapes.push_back({absl::StrCat("soft_cap", suffix), shape});
    shape = plain;
    shape.has_sink = true;
    shape.group_size = 5;
    shapes.push_back({absl::StrCat("sink", suffix), shape});
    shape = plain;
    shape.logit_scale = 0.0371f;
    shapes.push_back({absl::StrCat("logit_scale", suffix), shape});
    shape = plain;
    shape.has_sources = true;
    shape.tile_count = 6;
    shapes.push_back({absl::StrCat("sources", suffix), shape});
    shape = plain;
    shape.padding = 13;
    shapes.push_back({absl::StrCat("misaligned_tail", suffix), shape});
    shape.soft_cap = 20.0f;
    shape.has_sink = true;
    shape.has_sources = true;
    shape.logit_scale = 0.2f;
    shape.group_size = 4;
    shape.tile_count = 7;
    shape.tail_count = 75;
    shape.token_begin = 70;
    shape.token_end = 510;
    shapes.push_back({absl::StrCat("everything", suffix), shape});
    shape.dtype = OriginalDtype::kBf16;
    if (format < 0) {
      shape.key_format = KeyFormat::kBf16;
      shape.value_format = ValueFormat::kBf16;
    }
    shapes.push_back({absl::StrCat("everything", suffix, "_of_BF16"), shape});
  }
  return shapes;
}

std::vector<NamedShape> AllShapes() {
  std::vector<NamedShape> all;
  for (const auto& shapes :
       {FormatShapes(), DimensionShapes(), ContentShapes(), RangeShapes(), OptionShapes()}) {
    all.insert(all.end(), shapes.begin(), shapes.end());
  }
  return all;
}

std::vector<NamedShape> ShapesOf(Backend backend, std::vector<NamedShape> shapes) {
  if (backend != Backend::kCuda) return shapes;
  shapes.erase(std::remove_if(shapes.begin(), shapes.end(),
                              [](const NamedShape& named) {
                                return named.shape.key_format == KeyFormat::kK8D;
                              }),
               shapes.end());
  return shapes;
}

}  // namespace certkv::conformance
