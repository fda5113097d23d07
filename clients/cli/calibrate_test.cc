// What calibration makes of measured reads. That the figures are what a server then shows, is in
// tests/system/calibrate_test.cc.
#include "clients/cli/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "clients/cli/calibrate_report.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kTrace[] = "tests/data/smollm2-135m-4-layers.safetensors";

// Reads with those bounds whose values are within tolerance.
std::vector<MeasuredRead> Reads(const std::vector<float>& bounds) {
  std::vector<MeasuredRead> reads;
  for (const float bound : bounds) reads.push_back({bound, true});
  return reads;
}

TEST(CoverageTest, CountsReadsWithinEveryTolerance) {
  std::vector<MeasuredRead> reads = Reads({0.05f, 0.1f, 0.2f, 0.3f});
  EXPECT_EQ(Coverage(reads, 0.2f), 0.75);
  EXPECT_EQ(Coverage(reads, 0.0f), 0);
  EXPECT_EQ(Coverage({}, 1.0f), 0);
  reads[0].meets_others = false;
  EXPECT_EQ(Coverage(reads, 0.2f), 0.5);
}

TEST(TightestToleranceTest, IsTheFirstHundredthThatCoversEnough) {
  const auto reads = Reads({0.011f, 0.04f, 0.0999f, 0.5f});
  EXPECT_FLOAT_EQ(TightestTolerance(reads, 0.25, 0.2f), 0.02f);
  EXPECT_FLOAT_EQ(TightestTolerance(reads, 0.5, 0.2f), 0.04f);
  EXPECT_FLOAT_EQ(TightestTolerance(reads, 0.75, 0.2f), 0.1f);
  EXPECT_FLOAT_EQ(TightestTolerance(reads, 0.75, 0.0999f), 0.0999f) << "not above the largest";
  EXPECT_LT(TightestTolerance(reads, 0.76, 0.2f), 0);
}

TEST(SplitTest, RunsOfQueriesChooseByTurns) {
  for (int32_t query = 0; query < 4 * kSplitRun; ++query) {
    EXPECT_EQ(IsHeldOut(QueryRole::kSplit, query), query / kSplitRun % 2 == 1) << query;
    EXPECT_FALSE(IsHeldOut(QueryRole::kChoose, query));
    EXPECT_TRUE(IsHeldOut(QueryRole::kHeldOut, query));
  }
}

class ChooseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto trace = Trace::Open(kTrace);
    ASSERT_TRUE(trace.ok()) << trace.status();
    trace_ = *std::move(trace);
    // Of equal choosing and held-out reads in all four layers.
    Add("K8V8", {0.01f, 0.01f, 0.01f, 0.05f});
    Add("K6V4", {0.1f, 0.1f, 0.15f, 0.3f});
    Add("K8V4", {0.02f, 0.02f, 0.03f, 0.1f});
    terms_.coverage = 0.9;
  }
  void Add(const std::string& name, const std::vector<float>& bounds) {
    candidates_.push_back({name, *ParseFormat(name), {}});
    candidates_.back().layers.assign(4, {Reads(bounds), Reads(bounds)});
  }
  Calibration Run() { return Choose(*trace_, candidates_, terms_); }

  std::unique_ptr<Trace> trace_;
  std::vector<Candidate> candidates_;
  CalibrationTerms terms_;
};

TEST_F(ChooseTest, TakesTheSmallestFormatThatCoversEnoughAndItsTightestTolerance) {
  candidates_[1].layers[2].choosing = Reads({0.1f, 0.12f, 0.15f, 0.18f});
  const Calibration calibration = Run();
  EXPECT_EQ(calibration.layers[0].candidate, 2) << "K6V4 covers 75 %, K8V8 is larger";
  EXPECT_FLOAT_EQ(calibration.layers[0].tv_tolerance, 0.1f);
  EXPECT_EQ(calibration.layers[2].candidate, 1);
  EXPECT_FLOAT_EQ(calibration.layers[2].tv_tolerance, 0.18f);
  EXPECT_EQ(calibration.spec.layers[0].key_format, KeyFormat::kK8);
  EXPECT_EQ(calibration.spec.layers[2].key_format, KeyFormat::kK6);
  EXPECT_EQ(calibration.layers[2].choosing_coverage, 1);
  EXPECT_EQ(calibration.layers[2].held_out_coverage, 0.75) << "not what chose";
  EXPECT_NEAR(calibration.held_out_coverage, 15.0 / 16, 1e-12);
  EXPECT_EQ(calibration.held_out_reads, 16);
}

TEST_F(ChooseTest, HeldOutReadsHaveNoPartInTheChoice) {
  const Calibration before = Run();
  for (Candidate& candidate : candidates_) {
    for (LayerReads& layer : candidate.layers) layer.held_out = Reads({1, 1, 1, 1});
  }
  const Calibration after = Run();
  EXPECT_EQ(DigestCacheSpec(after.spec), DigestCacheSpec(before.spec));
  EXPECT_EQ(after.layers[0].tv_tolerance, before.layers[0].tv_tolerance);
  EXPECT_EQ(before.held_out_coverage, 1);
  EXPECT_EQ(after.held_out_coverage, 0);
}

TEST_F(ChooseTest, WhereNothingCoversEnoughTheClosestIsTakenAndSaid) {
  for (Candidate& candidate : candidates_) candidate.layers[1].choosing.push_back({0.9f, true});
  terms_.coverage = 1;
  const Calibration calibration = Run();
  EXPECT_FALSE(calibration.layers[1].reaches_coverage);
  EXPECT_EQ(calibration.layers[1].candidate, 0) << "4 of 5, as K8V4, and first";
  EXPECT_EQ(calibration.layers[1].tv_tolerance, terms_.tolerances.tv_tolerance);
  EXPECT_THAT(RenderCalibration(calibration), HasSubstr("the closest of all"));
  EXPECT_TRUE(calibration.layers[0].reaches_coverage);
}

// Covered at .2 of 4 reads: K6V4 3 or what the test says, the larger ones 4.
TEST_F(ChooseTest, CoverageOfTheModelSpendsBytesWhereTheyCoverMost) {
  candidates_[1].layers[1].choosing = Reads({0.1f, 0.1f, 0.3f, 0.3f});
  candidates_[1].layers[3].choosing = Reads({0.1f, 0.3f, 0.3f, 0.3f});
  terms_.of_model = true;
  terms_.coverage = 13.0 / 16;  // K6V4 everywhere covers 9: layer 3 with 3 more, layer 1 with 2
  Calibration calibration = Run();
  const auto names = [&] {
    std::vector<std::string> chosen;
    for (const LayerChoice& layer : calibration.layers) {
      chosen.push_back(calibration.candidates[layer.candidate].name);
    }
    return chosen;
  };
  EXPECT_THAT(names(), ElementsAre("K6V4", "K8V4", "K6V4", "K8V4"));
  terms_.coverage = 12.0 / 16;
  calibration = Run();
  EXPECT_THAT(names(), ElementsAre("K6V4", "K6V4", "K6V4", "K8V4"));
  for (const LayerChoice& layer : calibration.layers) {
    EXPECT_TRUE(layer.reaches_coverage);
    EXPECT_EQ(layer.tv_tolerance, terms_.tolerances.tv_tolerance) << "no layer is held to less";
  }
  EXPECT_EQ(calibration.layers[1].choosing_coverage, 0.5);
  EXPECT_THAT(RenderCalibration(calibration), HasSubstr("wanted of all layers together 75"));
  // By itself layer 1 would need the larger one too.
  terms_.of_model = false;
  calibration = Run();
  EXPECT_THAT(names(), ElementsAre("K6V4", "K8V4", "K6V4", "K8V4"));
}

TEST_F(ChooseTest, WhereTheModelCantBeCoveredEnoughMostOfItIs) {
  for (Candidate& candidate : candidates_) candidate.layers[1].choosing.push_back({0.9f, true});
  terms_.of_model = true;
  terms_.coverage = 1;
  const Calibration calibration = Run();
  for (const LayerChoice& layer : calibration.layers) {
    EXPECT_FALSE(layer.reaches_coverage);
    EXPECT_EQ(layer.candidate, 2) << "K8V8 covers no more and takes more";
  }
}

TEST_F(ChooseTest, PolicyHasTheLayersTolerancesForThisModel) {
  gate::v1::Policy base;
  base.set_canary_share(0.5);
  base.add_overrides()->set_tenant("gone");
  Calibration calibration = Run();
  const gate::v1::Policy policy = CalibratedPolicy(calibration, base);
  EXPECT_EQ(policy.canary_share(), 0.5) << "kept";
  EXPECT_FLOAT_EQ(policy.tolerances().tv_tolerance(), 0.2f);
  ASSERT_EQ(policy.overrides_size(), 4);
  EXPECT_EQ(policy.overrides(3).layer(), 3);
  EXPECT_EQ(policy.overrides(3).model(), "SmolLM2-135M-Instruct");
  EXPECT_FLOAT_EQ(policy.overrides(3).tv_tolerance(), 0.1f);
  // More layers than a policy takes: the tightest.
  calibration.layers.assign(40, calibration.layers[0]);
  calibration.layers[39].tv_tolerance = 0.01f;
  const gate::v1::Policy large = CalibratedPolicy(calibration, base);
  EXPECT_EQ(large.overrides_size(), 32);
  EXPECT_EQ(large.overrides(0).layer(), 39);
}

TEST_F(ChooseTest, PictureShowsEveryCandidateAndLayer) {
  const std::string svg = DrawCalibration(Run());
  const auto count = [&svg](const char* part) {
    int found = 0;
    for (size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("<circle"), 3 + 4);
  EXPECT_EQ(count("fill-opacity"), 4) << "bars";
  EXPECT_EQ(count("K8V4, tv 0.10"), 4);
  EXPECT_THAT(svg, HasSubstr("each its own"));
}

TEST(ModelLabelTest, IsEmptyWhereGateWouldRefuseIt) {
  EXPECT_EQ(ModelLabel("meta/Llama-3.1_8B"), "meta/Llama-3.1_8B");
  EXPECT_EQ(ModelLabel("my-model@1"), "");
  EXPECT_EQ(ModelLabel(std::string(129, 'm')), "");
}

}  // namespace
}  // namespace certkv::cli
