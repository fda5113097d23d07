// The planes of every format against tests/golden/tile_planes.json, which a program of its own made
// from docs/formats.md. A difference means that stored caches can no longer be read.
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/core/sha256.h"
#include "kernels/ops/quantize_tile.h"
#include "nlohmann/json.hpp"
#include "tests/conformance/path.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {
namespace {

constexpr char kGoldenFile[] = "tests/golden/tile_planes.json";

// originals() of tile_planes_make.py: numbers that the dtype holds exactly.
std::vector<uint16_t> GoldenRows(OriginalDtype dtype, int dim, int salt) {
  std::vector<uint16_t> rows;
  for (int t = 0; t < kTileTokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      const int n = t * 131 + i * 71 + t * i * 17 + salt;
      const float value = dtype == OriginalDtype::kF16 ? static_cast<float>(n % 2003 - 1001) / 256
                                                       : static_cast<float>(n % 255 - 127) / 16;
      rows.push_back(FloatToOriginal(dtype, value));
    }
  }
  return rows;
}

SequenceShape ShapeOf(const nlohmann::json& golden) {
  SequenceShape shape;
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK8D, KeyFormat::kK6, KeyFormat::kK4,
                                 KeyFormat::kFp8E4m3, KeyFormat::kF16, KeyFormat::kBf16}) {
    if (golden["key_format"] == KeyFormatName(format)) shape.key_format = format;
  }
  for (const ValueFormat format :
       {ValueFormat::kV4, ValueFormat::kV8, ValueFormat::kF16, ValueFormat::kBf16}) {
    if (golden["value_format"] == ValueFormatName(format)) shape.value_format = format;
  }
  shape.witness_bands = golden["witness_bands"];
  shape.dtype = golden["original_dtype"] == "F16" ? OriginalDtype::kF16 : OriginalDtype::kBf16;
  shape.head_dim = golden["head_dim"];
  shape.value_dim = golden["value_dim"];
  return shape;
}

std::string HexDigest(Sha256* hash) {
  const auto digest = hash->Finish();
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

void AddRange(const uint8_t* record, int64_t begin, int64_t end, Sha256* hash) {
  hash->AddBytes(absl::string_view(reinterpret_cast<const char*>(record) + begin,
                                   static_cast<size_t>(end - begin)));
}

class TileGoldenTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

TEST_P(TileGoldenTest, PlanesHaveTheirGoldenDigests) {
  std::ifstream file(kGoldenFile);
  const nlohmann::json all = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(all.is_array()) << kGoldenFile;
  ASSERT_FALSE(all.empty());
  for (const nlohmann::json& golden : all) {
    SCOPED_TRACE(golden.dump());
    const SequenceShape shape = ShapeOf(golden);
    const bool lacks = shape.key_format == KeyFormat::kK8D && GetParam().backend == Backend::kCuda;
    if (lacks) continue;
    const std::vector<uint16_t> keys = GoldenRows(shape.dtype, shape.head_dim, 5);
    const std::vector<uint16_t> values = GoldenRows(shape.dtype, shape.value_dim, 11);
    SequenceCase sequence(shape, SpecOfShape(shape), keys.data(), shape.head_dim, values.data(),
                          shape.value_dim, kTileTokens, GetParam().backend);
    const TileLayout& layout = sequence.layout();
    Sha256 scan;
    AddRange(sequence.scan(0), layout.scale_offset, layout.witness_offset, &scan);
    AddRange(sequence.scan(0), layout.coarse_offset, layout.scan_bytes, &scan);
    EXPECT_EQ(HexDigest(&scan), golden["scan_sha256"]);
    Sha256 detail;
    AddRange(sequence.detail(0), 0, layout.detail_bytes, &detail);
    EXPECT_EQ(HexDigest(&detail), golden["detail_sha256"]);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, TileGoldenTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
