// Tables, traces and the truth: the parts of the command line that need no server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>

#include "absl/strings/str_cat.h"
#include "clients/cli/table.h"
#include "clients/cli/trace.h"
#include "clients/cli/truth.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

using ::testing::HasSubstr;

constexpr char kTrace[] = "tests/data/smollm2-135m-4-layers.safetensors";

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table;
  table.AddColumn("name", Table::Align::kLeft);
  table.AddColumn("n");
  table.AddRow({"a", "1,000"});
  table.AddRow({"bar█", "2"});
  EXPECT_EQ(table.Render(),
            "name      n\n"
            "────  ─────\n"
            "a     1,000\n"
            "bar█      2\n");
}

TEST(TableTest, TitlesOfSeveralLinesStandOnTheRule) {
  Table table;
  table.AddColumn("a", Table::Align::kLeft);
  table.AddColumn("worst\nbound");
  table.AddRow({"x", "1"});
  EXPECT_EQ(table.Render(),
            "   worst\n"
            "a  bound\n"
            "─  ─────\n"
            "x      1\n");
}

TEST(FormatTest, NumbersReadLikeAPersonWroteThem) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(1743), "1,743");
  EXPECT_EQ(FormatCount(-1234567), "-1,234,567");
  EXPECT_EQ(FormatBytes(512), "512 B");
  EXPECT_EQ(FormatBytes(1536), "1.5 KiB");
  EXPECT_EQ(FormatBound(0), "0");
  EXPECT_EQ(FormatBound(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(FormatBound(std::nan("")), "nan");
  EXPECT_EQ(FormatNanoseconds(12345), "12.3 us");
  EXPECT_EQ(FormatPercent(0.997), "99.7 %");
  EXPECT_EQ(Bar(0, 8), "");
  EXPECT_EQ(Bar(1, 3), "███");
  EXPECT_EQ(Bar(1e-6, 3), "▏") << "something is never drawn as nothing";
}

TEST(TraceTest, TheRealTraceHasTheShapesOfItsMetadata) {
  const auto trace = Trace::Open(kTrace);
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ((*trace)->model(), "SmolLM2-135M-Instruct");
  EXPECT_EQ((*trace)->token_count(), 1743);
  EXPECT_EQ((*trace)->layer_numbers(), (std::vector<int32_t>{0, 9, 19, 29}));
  EXPECT_EQ((*trace)->query_count(), 64);
  EXPECT_EQ((*trace)->Layers().size(), 4u);
  EXPECT_EQ((*trace)->Queries(0, 0).size(), 9u * 64);
  const CacheSpec spec = (*trace)->MakeSpec({KeyFormat::kFp8E4m3, ValueFormat::kV8, 4});
  EXPECT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
  EXPECT_EQ(spec.logit_scale, 0.125f);
}

// The real trace with one piece of its header replaced by another of equal size.
std::string EditedTrace(const std::string& from, const std::string& to) {
  std::ifstream file(kTrace, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  const size_t place = bytes.find(from);
  EXPECT_NE(place, std::string::npos);
  EXPECT_EQ(from.size(), to.size());
  bytes.replace(place, from.size(), to);
  const std::string path = absl::StrCat(::testing::TempDir(), "/edited.safetensors");
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST(TraceTest, WhatDoesNotFitIsNamed) {
  const struct {
    const char *from, *to, *named;
  } cases[] = {
      {"\"certkv-trace-1\"", "\"certkv-trace-9\"", "certkv-trace-9"},
      {"\"head_dim\":\"64\"", "\"head_dim\":\"65\"", "head_dim is 65"},
      {"\"kv_heads\":\"3\"", "\"kv_heads\":\"4\"", "query heads"},
      {"\"rope\":\"interleaved\"", "\"rope\":\"interleavex\"", "interleavex"},
      {"\"layers\":\"0,9,19,29\"", "\"layers\":\"0,9,19,28\"", "layers.28.key"},
      {"\"logit_scale\":\"0.125\"", "\"logit_scale\":\"x.125\"", "logit_scale"},
      {"\"model_license\"", "\"model_licence\"", "model_license"},
  };
  for (const auto& edit : cases) {
    const auto trace = Trace::Open(EditedTrace(edit.from, edit.to));
    ASSERT_FALSE(trace.ok()) << edit.to;
    EXPECT_THAT(std::string(trace.status().message()), HasSubstr(edit.named));
    EXPECT_THAT(std::string(trace.status().message()), HasSubstr("edited.safetensors"));
  }
}

TEST(TraceTest, FormatsAreParsedByName) {
  for (const char* name : {"K8V4", "K8V8", "K6V4", "K4V4", "FP8_E4M3", "F16"}) {
    EXPECT_TRUE(ParseFormat(name).ok()) << name;
  }
  EXPECT_EQ(ParseFormat("K6V8w1")->witness_bands, 1);
  EXPECT_EQ(ParseFormat("K4V4w4")->witness_bands, 4);
  EXPECT_EQ(ParseFormat("FP8_E4M3")->witness_bands, 4);
  for (const char* name : {"k8v4", "K6V4w2", "K6V4w", "K8DV4w1", "FP8_E4M3w1", "F16w1"}) {
    EXPECT_EQ(ReasonOf(ParseFormat(name).status()), "FORMAT_UNKNOWN") << name;
  }
}

// Two tokens, one head, by hand: logits 1 and 0, so p = e/(1+e), 1/(1+e).
TEST(TruthTest, TwoTokensByHand) {
  CacheSpec spec;
  spec.model = "hand";
  spec.kv_head_count = 1;
  spec.group_size = 1;
  spec.head_dim = spec.value_dim = 64;
  spec.logit_scale = 0.5f;
  std::vector<uint16_t> keys(2 * 64);
  std::vector<uint16_t> values(2 * 64);
  keys[3] = FloatToF16(2.0f);         // token 0, channel 3
  values[64 + 5] = FloatToF16(4.0f);  // token 1, channel 5
  std::vector<float> query(64);
  query[3] = 1.0f;
  const HeadTruth truth =
      ComputeHeadTruth(spec, {keys.data(), values.data()}, 0, query.data(), 0, 2);
  const double e = std::exp(1.0);
  EXPECT_NEAR(truth.probabilities[0], e / (1 + e), 1e-15);
  EXPECT_NEAR(truth.output[5], 4 / (1 + e), 1e-15);
  EXPECT_EQ(truth.output[0], 0);

  // Served: token 0's key decoded as 0 gives the uniform distribution; from the original, the
  // truth.
  const std::vector<float> decoded(2 * 64, 0.0f);
  const auto served =
      ComputeServedSoftmax(spec, {keys.data(), values.data()}, 0, query.data(), decoded, {}, 2);
  EXPECT_NEAR(TotalVariation(truth.probabilities, served), e / (1 + e) - 0.5, 1e-15);
  const std::vector<uint8_t> original{1};
  const auto exact = ComputeServedSoftmax(spec, {keys.data(), values.data()}, 0, query.data(),
                                          decoded, original, 2);
  EXPECT_EQ(TotalVariation(truth.probabilities, exact), 0);
}

}  // namespace
}  // namespace certkv::cli
