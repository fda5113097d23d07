// The simulation of the whole system: seeds one after the other, and built-in defects that it must
// find.
//
//   CERTKV_SIM_SEED=7      this seed instead of the first of a row
//   CERTKV_SIM_SECONDS=60  seeds one after the other for so long, instead of a fixed few
//
// A failing seed prints the command that replays it. `./dev sim --hours N` goes on and on.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/simulation/system_model.h"

namespace certkv {
namespace {

constexpr int32_t kStepsPerSeed = 3000;
constexpr int32_t kSeedsByDefault = 6;

TEST(SystemSimulationTest, NothingThatIsPromisedIsBroken) {
  const char* seed_text = std::getenv("CERTKV_SIM_SEED");
  const char* seconds_text = std::getenv("CERTKV_SIM_SECONDS");
  const auto first = static_cast<uint32_t>(seed_text == nullptr ? 1 : std::atol(seed_text));
  const std::chrono::duration<double> limit(seconds_text == nullptr ? 0 : std::atof(seconds_text));
  const uint32_t least = seed_text != nullptr ? 1 : kSeedsByDefault;
  const auto start = std::chrono::steady_clock::now();
  std::chrono::duration<double> passed{};
  SystemModel::Counts sum;
  int64_t steps = 0;
  for (uint32_t seed = first; seed < first + least || passed < limit; ++seed) {
    SystemModel model(seed, Canary::kNone);
    for (int32_t step = 0; step < kStepsPerSeed && model.violation().empty(); ++step) {
      model.Step();
      ++steps;
    }
    if (model.violation().empty()) model.End();
    ASSERT_EQ(model.violation(), "")
        << "replay: CERTKV_SIM_SEED=" << seed
        << " build/release/test_bin/system_simulation_test"
           " --gtest_filter=SystemSimulationTest.NothingThatIsPromisedIsBroken";
    const SystemModel::Counts counts = model.counts();
    sum.reads += counts.reads;
    sum.certified += counts.certified;
    sum.exact += counts.exact;
    sum.failed += counts.failed;
    sum.restarts += counts.restarts;
    sum.messages += counts.messages;
    sum.refusals += counts.refusals;
    sum.repairs += counts.repairs;
    sum.lost += counts.lost;
    sum.tenant_windows += counts.tenant_windows;
    passed = std::chrono::steady_clock::now() - start;
  }
  std::printf(
      "%ld steps, %.0f per second: %ld reads (%ld heads certified, %ld exact, %ld reads failed), "
      "%ld messages, %ld faults, %ld refusals for want of room, %ld repairs, %ld with lost "
      "originals, %ld tenants' windows used up\n",
      steps, static_cast<double>(steps) / passed.count(), sum.reads, sum.certified, sum.exact,
      sum.failed, sum.messages, sum.restarts, sum.refusals, sum.repairs, sum.lost,
      sum.tenant_windows);
  EXPECT_GT(sum.certified, steps / 100) << "not vacuous";
  EXPECT_GT(sum.exact, steps / 200);
  EXPECT_GT(sum.restarts, steps / 300);
  EXPECT_GT(sum.repairs, 0);
  EXPECT_GT(sum.lost, 0);
  EXPECT_GT(sum.tenant_windows, 0);
}

class CanaryTest : public testing::TestWithParam<Canary> {};

TEST_P(CanaryTest, DefectIsFoundWithinTheBoundedNumberOfSteps) {
  for (uint32_t seed = 1; seed <= kSeedsByDefault; ++seed) {
    SystemModel model(seed, GetParam());
    for (int32_t step = 0; step < kStepsPerSeed; ++step) {
      model.Step();
      if (model.violation().empty()) continue;
      std::printf("seed %u, step %d: %s\n", seed, step, model.violation().c_str());
      return;
    }
  }
  FAIL() << "the simulation does not see this defect";
}

std::string CanaryName(const testing::TestParamInfo<Canary>& info) {
  switch (info.param) {
    case Canary::kSkipsSpend:
      return "ClientSkipsSpend";
    case Canary::kIgnoresLeases:
      return "ClientIgnoresLeases";
    case Canary::kReturnsTooMuch:
      return "ClientReturnsTooMuch";
    case Canary::kStoreForgetsLease:
      return "StoreForgetsLease";
    case Canary::kUsesUncertified:
      return "ClientUsesUncertified";
    case Canary::kIgnoresDamage:
      return "ClientIgnoresDamage";
    case Canary::kGateForgetsTenant:
      return "GateForgetsTenant";
    default:
      return "None";
  }
}

INSTANTIATE_TEST_SUITE_P(All, CanaryTest,
                         testing::Values(Canary::kSkipsSpend, Canary::kIgnoresLeases,
                                         Canary::kReturnsTooMuch, Canary::kStoreForgetsLease,
                                         Canary::kUsesUncertified, Canary::kIgnoresDamage,
                                         Canary::kGateForgetsTenant),
                         CanaryName);

}  // namespace
}  // namespace certkv
