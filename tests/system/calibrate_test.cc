// `certkv calibrate` as a user runs it, and that its figures are what a server then shows.
#include "clients/cli/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "clients/cli/trace.h"
#include "tests/system/cluster.h"
#include "tests/system/run_cli.h"

namespace certkv {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr char kTrace[] = "tests/data/smollm2-135m-4-layers.safetensors";

class CalibrateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory_ = absl::StrCat(::testing::TempDir(), "/calibrate-", getpid());
    std::filesystem::create_directory(directory_);
    auto cluster = Cluster::Start(ClusterShape::kAllInOne, "");
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    target_ = absl::StrCat("--target ", cluster_->options().kvstore_target, " ");
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }
  std::string Path(const char* name) const { return absl::StrCat(directory_, "/", name); }
  RunResult Calibrate(const std::string& arguments) {
    return RunCli(absl::StrCat("--json calibrate ", kTrace, " ", arguments));
  }

  std::string directory_;
  std::unique_ptr<Cluster> cluster_;
  std::string target_;
};

TEST_F(CalibrateTest, AServerCoversTheHeldOutReadsAsExpected) {
  const RunResult run =
      Calibrate(absl::StrCat("--formats K8V4,K6V4w1,K6V4w1c,K4V4 --spec ", Path("spec.json"),
                             " --policy ", Path("policy.json"), " --svg ", Path("c.svg")));
  ASSERT_EQ(run.exit_code, 0) << run.errors;
  const json expected = json::parse(run.output);
  ASSERT_EQ(expected["layers"].size(), 4u);
  EXPECT_EQ(expected["choosing_reads"], 4 * 32 * 9);
  EXPECT_EQ(expected["held_out_reads"], 4 * 32 * 9);
  std::ifstream svg(Path("c.svg"));
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(svg), {}), HasSubstr("</svg>"));

  const RunResult set = RunCli(absl::StrCat(target_, "policy set --file ", Path("policy.json")));
  ASSERT_EQ(set.exit_code, 0) << set.errors;
  const RunResult put =
      RunCli(absl::StrCat(target_, "--json put --trace ", kTrace, " --spec ", Path("spec.json")));
  ASSERT_EQ(put.exit_code, 0) << put.errors;
  EXPECT_NEAR(json::parse(put.output)["capacity"].get<double>(), expected["capacity"].get<double>(),
              1e-9);

  const auto trace = cli::Trace::Open(kTrace);
  ASSERT_TRUE(trace.ok()) << trace.status();
  std::map<int, int> covered;  // by layer
  for (int32_t query = 0; query < (*trace)->query_count(); ++query) {
    if (!cli::IsHeldOut(cli::QueryRole::kSplit, query)) continue;
    const RunResult attend =
        RunCli(absl::StrCat(target_, "--json attend --trace ", kTrace, " --spec ",
                            Path("spec.json"), " --position ", (*trace)->query_positions()[query]));
    ASSERT_EQ(attend.exit_code, 0) << attend.errors;
    const json read = json::parse(attend.output);
    for (const json& certificate : read["certificates"]) {
      covered[certificate["layer"]] += certificate["rung"] == "none" ? 1 : 0;
    }
  }
  bool some_were_repaired = false;
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_NEAR(covered[layer] / (32.0 * 9),
                expected["layers"][layer]["held_out_coverage"].get<double>(), 1e-9)
        << "layer " << layer;
    some_were_repaired |= covered[layer] < 32 * 9;
  }
  EXPECT_TRUE(some_were_repaired) << "the tolerances were tightened";

  // Weights cover more at the same bytes, so wherever K6V4 is enough it has them; they are in the
  // spec, and so in what the server did.
  EXPECT_GT(expected["candidates"][2]["held_out_coverage"].get<double>(),
            expected["candidates"][1]["held_out_coverage"].get<double>() + 0.03);
  std::ifstream spec_file(Path("spec.json"));
  const json spec = json::parse(spec_file);
  int weighted = 0;
  for (int layer = 0; layer < 4; ++layer) {
    const bool has_weights = expected["layers"][layer]["format"] == "K6V4w1c";
    weighted += has_weights ? 1 : 0;
    EXPECT_EQ(spec["layers"][layer]["witness_weights"].size(), has_weights ? 3 * 64 : 0);
  }
  EXPECT_GT(weighted, 0);
}

TEST_F(CalibrateTest, HeldOutTracesTellWhatToExpect) {
  const RunResult split = Calibrate("--formats K6V4");
  const RunResult other = Calibrate(absl::StrCat("--formats K6V4 --held-out ", kTrace));
  ASSERT_EQ(other.exit_code, 0) << other.errors;
  const json figures = json::parse(other.output);
  EXPECT_EQ(figures["choosing_reads"], 4 * 64 * 9) << "all of them";
  EXPECT_EQ(figures["held_out_reads"], 4 * 64 * 9);
  // The same queries on both sides here, so the same figures.
  for (const json& layer : figures["layers"]) {
    EXPECT_EQ(layer["choosing_coverage"], layer["held_out_coverage"]);
  }
  EXPECT_NE(json::parse(split.output)["held_out_coverage"], figures["held_out_coverage"]);
}

TEST_F(CalibrateTest, WrongInputIsNamed) {
  EXPECT_EQ(RunCli("calibrate").exit_code, 2);
  EXPECT_EQ(Calibrate("--coverage 0").exit_code, 2);
  EXPECT_THAT(Calibrate("--formats K8V4,K7V4").errors, HasSubstr("[FORMAT_UNKNOWN]"));
  EXPECT_THAT(Calibrate("--formats K8V4c").errors, HasSubstr("[FORMAT_UNKNOWN]"));
  EXPECT_THAT(RunCli("calibrate /nowhere").errors, HasSubstr("[FILE_NOT_FOUND]"));
  EXPECT_THAT(Calibrate("--formats K8V4 --spec /nowhere/spec.json").errors,
              HasSubstr("[FILE_NOT_WRITTEN]"));
  // A trace of another name is another model's.
  std::ifstream file(kTrace, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  const std::string name = "SmolLM2-135M-Instruct";
  bytes.replace(bytes.find(name), name.size(), "SmolLM2-135M-Adjusted");
  std::ofstream(Path("other.safetensors"), std::ios::binary) << bytes;
  EXPECT_THAT(Calibrate(absl::StrCat("--held-out ", Path("other.safetensors"))).errors,
              HasSubstr("[TRACE_INVALID] the traces are of SmolLM2-135M-Instruct"));
  // What is put has to be what was calibrated.
  std::ofstream(Path("spec.json")) << "{\"model\": 5";
  EXPECT_THAT(
      RunCli(absl::StrCat(target_, "put --trace ", kTrace, " --spec ", Path("spec.json"))).errors,
      HasSubstr("[CACHE_SPEC_INVALID]"));
  ASSERT_EQ(Calibrate(absl::StrCat("--formats K8V4 --spec ", Path("spec.json"))).exit_code, 0);
  EXPECT_THAT(RunCli(absl::StrCat(target_, "put --trace ", Path("other.safetensors"), " --spec ",
                                  Path("spec.json")))
                  .errors,
              HasSubstr("calibrate with traces of this model"));
}

}  // namespace
}  // namespace certkv
