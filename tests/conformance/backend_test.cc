// Choosing an instruction set. Each case runs in a process of its own, because CERTKV_CPU is read
// once.
#include "kernels/ops/backend.h"

#include <algorithm>
#include <cstdlib>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"

namespace certkv::conformance {
namespace {

class SelectedCpuIsaTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

// Ends the process with what was selected: the isa's number, 100 unknown, 101 unsupported.
[[noreturn]] void ExitWithSelection(const char* variable) {
  setenv("CERTKV_CPU", variable, 1);
  const absl::StatusOr<CpuIsa> isa = SelectedCpuIsa();
  if (isa.ok()) std::exit(static_cast<int>(*isa));
  std::fprintf(stderr, "%s", std::string(isa.status().message()).c_str());
  std::exit(ReasonOf(isa.status()) == "CPU_ISA_UNKNOWN" ? 100 : 101);
}

TEST_F(SelectedCpuIsaTest, IsTheBestOneByDefault) {
  EXPECT_EXIT(ExitWithSelection(""),
              testing::ExitedWithCode(static_cast<int>(SupportedCpuIsas().back())), "");
}

TEST_F(SelectedCpuIsaTest, FollowsTheEnvironment) {
  EXPECT_EXIT(ExitWithSelection("portable"),
              testing::ExitedWithCode(static_cast<int>(CpuIsa::kPortable)), "");
}

TEST_F(SelectedCpuIsaTest, RefusesAnUnknownName) {
  EXPECT_EXIT(ExitWithSelection("AVX2"), testing::ExitedWithCode(100),
              "CERTKV_CPU is \"AVX2\", must be portable, avx2 or avx512");
}

TEST_F(SelectedCpuIsaTest, RefusesWhatTheMachineLacks) {
  const std::vector<CpuIsa> supported = SupportedCpuIsas();
  for (const CpuIsa isa : {CpuIsa::kAvx2, CpuIsa::kAvx512Vnni}) {
    if (std::find(supported.begin(), supported.end(), isa) != supported.end()) continue;
    EXPECT_EXIT(ExitWithSelection(CpuIsaName(isa)), testing::ExitedWithCode(101),
                "isn't available on this machine");
    EXPECT_EQ(ReasonOf(ForceCpuIsa(isa)), "CPU_ISA_UNSUPPORTED");
    return;
  }
  GTEST_SKIP() << "needs a CPU that lacks an instruction set of CertKV";
}

TEST(ForceCpuIsaTest, DecidesFromThenOn) {
  for (const CpuIsa isa : SupportedCpuIsas()) {
    ASSERT_TRUE(ForceCpuIsa(isa).ok());
    EXPECT_EQ(SelectedCpuIsa().value(), isa);
  }
}

TEST(SupportedCpuIsasTest, AscendFromPortable) {
  const std::vector<CpuIsa> supported = SupportedCpuIsas();
  ASSERT_FALSE(supported.empty());
  EXPECT_EQ(supported.front(), CpuIsa::kPortable);
  EXPECT_TRUE(std::is_sorted(supported.begin(), supported.end()));
}

}  // namespace
}  // namespace certkv::conformance
