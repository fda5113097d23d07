// Dithered keys from seal to gate's account: under UNION reads carry a failure probability and gate
// charges it; in every other mode, and once the budget is used up, none of them may fail.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

constexpr int32_t kTokens = 300;

class DitherTest : public SystemTest {
 protected:
  static CacheSpec Spec() {
    CacheSpec spec = SmallSpec(KeyFormat::kK8D);
    for (LayerSpec& layer : spec.layers) layer.value_format = ValueFormat::kV8;
    return spec;
  }
  static std::string Config(const std::string& mode, double failure_probability) {
    return absl::StrCat("gate:\n  risk_mode: ", mode, "\n  cumulative_budget: 1000\n",
                        "  failure_probability: ", failure_probability, "\n");
  }
  void Open(const std::string& id) {
    worker_ = AttachWorker(Spec());
    sequence_ = Put(*worker_, data_);
    request_ = OpenRequest(id);
    auto attention = client::Attention::Open(*worker_, *sequence_, *request_);
    ASSERT_TRUE(attention.ok()) << attention.status();
    attention_ = *std::move(attention);
  }
  // One step of both layers, held against the truth.
  struct Step {
    int heads = 0;
    int certified = 0;
    int may_fail = 0;
    double failure_probability = 0;
    float largest_tv = 0;
  };
  Step Read(uint32_t seed) {
    Step step;
    for (const client::ReadResult& result : ReadAndCheck(*attention_, data_, kTokens, seed)) {
      for (const ReadCertificate& certificate : result.certificates) {
        // Exact: its slice was returned while it was read.
        EXPECT_NE(certificate.outcome, Outcome::kObserved);
        step.certified += certificate.outcome == Outcome::kCertified ? 1 : 0;
        ++step.heads;
        step.may_fail += certificate.failure_probability > 0 ? 1 : 0;
        step.failure_probability += certificate.failure_probability;
        step.largest_tv = std::max(step.largest_tv, certificate.worst_case_tv);
      }
    }
    return step;
  }

  const TestSequence data_{Spec(), kTokens, 7};
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<client::Attention> attention_;
};

TEST_P(DitherTest, GateChargesWhatReadsMayFailBy) {
  StartCluster(Config("union", 1e-3));
  Open("union");
  double charged = 0;
  for (uint32_t seed = 0; seed < 5; ++seed) {
    const Step step = Read(seed);
    EXPECT_EQ(step.may_fail, step.heads);
    charged += step.failure_probability;
  }
  const auto risk = request_->Close();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_NEAR(risk->budget, 1e-3, 0x1p-40);
  EXPECT_GE(risk->budget_committed, charged * (1 - 1e-9));
  // Accounts round up to 2^-40.
  EXPECT_LE(risk->budget_committed, charged + 5 * 12 * 0x1p-39);
}

TEST_P(DitherTest, NoReadMayFailInAnotherMode) {
  for (const char* mode : {"threshold", "cumulative", "anytime"}) {
    StartCluster(Config(mode, 1e-3));
    Open(mode);
    const Step step = Read(1);
    EXPECT_EQ(step.certified, 12);
    EXPECT_EQ(step.may_fail, 0) << mode;
    ASSERT_TRUE(request_->Close().ok());
    attention_.reset();
    request_.reset();
    sequence_.reset();
    worker_.reset();
  }
}

TEST_P(DitherTest, ABudgetThatIsUsedUpIsNotOverdrawn) {
  // 2^-40 of each head: about a thousand heads.
  constexpr double kBudget = 1e-9;
  StartCluster(Config("union", kBudget));
  Open("used-up");
  double charged = 0;
  int may_fail = 0;
  int steps_without = 0;  // in a row
  int certified_without = 0;
  for (uint32_t seed = 0; seed < 400 && steps_without < 5; ++seed) {
    const Step step = Read(seed % 10);
    charged += step.failure_probability;
    may_fail += step.may_fail;
    steps_without = step.may_fail == 0 ? steps_without + 1 : 0;
    if (step.may_fail == 0) certified_without += step.certified;
  }
  EXPECT_EQ(steps_without, 5) << "nothing is left after a while";
  EXPECT_GT(certified_without, 0) << "reads go on by the bound that holds for sure";
  EXPECT_GT(may_fail, 500);
  EXPECT_LE(charged, kBudget);
  const auto risk = request_->Close();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_LE(risk->budget_committed, kBudget);
}

TEST_P(DitherTest, BlocksComeBackFromDiskWithTheirDither) {
  if (GetParam() == ClusterShape::kThreeProcesses) GTEST_SKIP() << "needs the store's config";
  char directory[] = "/tmp/certkv-dither-XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  StartCluster(Config("union", 1e-3) + "kvstore:\n  spill_directory: " + directory + "\n");
  Open("before");
  const Step before = Read(3);
  ASSERT_TRUE(request_->Close().ok());
  attention_.reset();
  sequence_.reset();
  worker_.reset();
  ASSERT_TRUE(cluster_->Stop().ok());
  ASSERT_TRUE(cluster_->Restart(ClusterService::kStore).ok());
  Open("after");
  EXPECT_EQ(sequence_->shared_block_count(), 4) << "found on disk";
  const Step after = Read(3);
  EXPECT_EQ(after.may_fail, after.heads);
  EXPECT_EQ(after.largest_tv, before.largest_tv) << "the same bytes, the same bounds";
  EXPECT_GT(before.largest_tv, 0);
  ASSERT_TRUE(cluster_->Stop().ok());
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DitherTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
