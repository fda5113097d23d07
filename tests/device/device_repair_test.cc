// Repairs by a GPU: originals are brought to it, gathered where they are pinned, and whatever fails
// on the way, a read is certified or exact from host memory, or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels/core/status.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/resident.h"
#include "services/certifier/device_read.h"
#include "tests/device/device_fixture.h"

namespace certkv::certifier {
namespace {

using cuda_on_cpu::RuntimeCall;
using cuda_sharing::InjectFailures;
using ::testing::IsEmpty;

constexpr Tolerances kRepairsValues = {.tv_tolerance = 1, .value_tolerance = 0.05f};
constexpr Tolerances kRepairsKeys = {.tv_tolerance = 0.004f, .value_tolerance = 1};
constexpr Tolerances kRepairsBoth = {.tv_tolerance = 0.004f, .value_tolerance = 0.05f};

struct RepairFixture : DeviceFixture {
  RepairFixture(const Tolerances& tolerances, bool is_pinned,
                const CacheSpec& spec = SmallSpec(2, 2, 3, 64))
      : DeviceFixture(TestLease(tolerances), OnDevice(), spec) {
    if (!is_pinned) return;
    const absl::Status pinned = Pin();
    EXPECT_TRUE(pinned.ok()) << pinned;
  }
  absl::Status Pin() { return fake.cache()->PinOriginals(RegisteredDeviceRuntime()); }
  bool IsPinned() {
    const MappedSlab& slab = fake.cache()->backing();
    return PinnedAddress(slab.base(), slab.layout().slab_bytes()) != nullptr;
  }
  int64_t attend_passes() { return checker.counters().attend_passes; }
};

class DeviceRepairTest : public testing::Test {
 protected:
  ~DeviceRepairTest() override { InjectFailures(""); }
};

TEST_F(DeviceRepairTest, RunOnTheDeviceAndCoverTheTruth) {
  for (const Tolerances& tolerances : {kRepairsValues, kRepairsKeys, kRepairsBoth}) {
    for (const bool is_pinned : {false, true}) {
      SCOPED_TRACE(testing::Message() << tolerances.tv_tolerance << " " << is_pinned);
      RepairFixture f(tolerances, is_pinned);
      for (int32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(f.Read(layer, kTokens - 1).ok());
      EXPECT_THAT(f.checker.violations(), IsEmpty());
      EXPECT_GT(f.attend_passes(), 4) << "two layers, two KV heads, and repairs";
      EXPECT_EQ(f.device_passes(), f.attend_passes());
      EXPECT_THAT(f.fallbacks(), IsEmpty());
      for (const ReadCertificate& certificate : f.checker.certificates()) {
        EXPECT_EQ(certificate.outcome, Outcome::kCertified);
      }
    }
  }
}

TEST_F(DeviceRepairTest, ReadWhatTheHostReads) {
  RepairFixture f(kRepairsBoth, true);
  ASSERT_TRUE(f.ReadLast().ok());
  ReadChecker host(&f.fake, KernelsOf(Backend::kCpu));
  ASSERT_TRUE(host.Read(*f.view, f.Request(0, kTokens - 1)).ok());
  for (size_t i = 0; i < host.certificates().size(); ++i) {
    EXPECT_EQ(f.checker.certificates()[i].rung, host.certificates()[i].rung);
    EXPECT_EQ(f.checker.certificates()[i].repair_bytes, host.certificates()[i].repair_bytes);
  }
  for (size_t i = 0; i < host.outputs().size(); ++i) {
    EXPECT_NEAR(f.checker.outputs()[i], host.outputs()[i], 1e-4f);
  }
}

TEST_F(DeviceRepairTest, GatheredOriginalsGiveTheBitsOfCopies) {
  RepairFixture copied(kRepairsBoth, false);
  RepairFixture gathered(kRepairsBoth, true);
  ASSERT_FALSE(copied.IsPinned());
  ASSERT_TRUE(gathered.IsPinned());
  ASSERT_TRUE(copied.ReadLast().ok());
  ASSERT_TRUE(gathered.ReadLast().ok());
  EXPECT_EQ(copied.checker.outputs(), gathered.checker.outputs());
  for (size_t i = 0; i < copied.checker.certificates().size(); ++i) {
    EXPECT_EQ(copied.checker.certificates()[i].output_error_bound,
              gathered.checker.certificates()[i].output_error_bound);
  }
}

// The host has read every byte for its checksum.
TEST_F(DeviceRepairTest, PassesOfOriginalsAloneStayOnTheHost) {
  DeviceFixture exact(TestLease(kLoose, ReadMode::kExact));
  ASSERT_TRUE(exact.ReadLast().ok());
  EXPECT_THAT(exact.checker.violations(), IsEmpty());
  EXPECT_EQ(exact.device_passes(), 0);
  RepairFixture f({.tv_tolerance = 0, .value_tolerance = 0}, true);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kExact);
  }
  EXPECT_GT(f.device_passes(), 0);
  EXPECT_EQ(f.device_passes(), f.attend_passes() - 2) << "the last of each KV head";
  EXPECT_THAT(f.fallbacks(), IsEmpty());
}

TEST_F(DeviceRepairTest, MemoryThatIsNotPinnedIsCopied) {
  const std::pair<const char*, const char*> failures[] = {
      {"cudaHostRegister=2", "DEVICE_MEMORY_FULL"},
      {"cudaHostRegister=1", "DEVICE_FAILED"},
      {"cudaHostGetDevicePointer=1", "DEVICE_FAILED"},
      {"cudaSetDevice=101", "DEVICE_FAILED"},
      {"cudaGetDevice=46", "DEVICE_FAILED"},
      {"cudaDeviceGetAttribute=1", "DEVICE_FAILED"},
      {"cudaDeviceGetAttribute=1@2 cudaDevAttrHostRegisterReadOnlySupported=1", "DEVICE_FAILED"},
      {"cudaDevAttrHostRegisterReadOnlySupported=1", "DEVICE_PIN_REFUSED"},
      {"*=46", "DEVICE_FAILED"}};
  for (const auto& [failure, reason] : failures) {
    SCOPED_TRACE(failure);
    RepairFixture f(kRepairsBoth, false);
    InjectFailures(failure);
    const absl::Status pinned = f.Pin();
    InjectFailures("");
    EXPECT_EQ(ReasonOf(pinned), reason) << pinned;
    EXPECT_FALSE(f.IsPinned());
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    EXPECT_EQ(f.device_passes(), f.attend_passes());
    EXPECT_TRUE(f.Pin().ok()) << "nothing is left of what failed";
  }
}

TEST_F(DeviceRepairTest, DeviceThatGoesByTheHostsPageTablesNeedsNoReadOnlyPinning) {
  RepairFixture f(kRepairsBoth, false);
  InjectFailures(
      "cudaDevAttrHostRegisterReadOnlySupported=1 "
      "cudaDevAttrPageableMemoryAccessUsesHostPageTables=1");
  EXPECT_TRUE(f.Pin().ok());
  EXPECT_TRUE(f.IsPinned());
}

TEST_F(DeviceRepairTest, OriginalsArePinnedAsLongAsTheyAreMapped) {
  const uint8_t* originals = nullptr;
  const uint8_t* on_device = nullptr;
  {
    RepairFixture f(kRepairsBoth, true);
    originals = f.fake.cache()->backing().base();
    on_device = PinnedAddress(originals, 64);
    ASSERT_NE(on_device, nullptr);
    EXPECT_NE(on_device, originals);
    const int64_t size_bytes = f.fake.cache()->backing().layout().slab_bytes();
    EXPECT_EQ(PinnedAddress(originals + size_bytes - 64, 64), on_device + size_bytes - 64);
    EXPECT_EQ(PinnedAddress(originals + size_bytes - 64, 65), nullptr);
    EXPECT_EQ(ResidentAddress(originals, 64), nullptr) << "the device has no copy of them";
  }
  EXPECT_EQ(PinnedAddress(originals, 64), nullptr);
  EXPECT_DEATH(EXPECT_EQ(*const_cast<const volatile uint8_t*>(on_device), 0), "");
}

// Runs reads of one KV head with the n-th call of a kind failing, for every n, until none does.
// Says how many failed.
int FailEveryCall(RuntimeCall call, cudaError_t error, const char* reason, bool is_pinned) {
  for (int failed = 0;; ++failed) {
    RepairFixture f(kRepairsBoth, is_pinned, SmallSpec(1, 1, 1, 64));
    cuda_on_cpu::InjectFailure(call, failed, error);
    const absl::Status status = f.ReadLast();
    cuda_on_cpu::InjectFailure(call, -1, cudaSuccess);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    if (f.fallbacks().empty()) {
      EXPECT_EQ(f.device_passes(), f.attend_passes());
      return failed;
    }
    EXPECT_EQ(f.fallbacks()[reason], 1) << failed;
    EXPECT_LT(f.device_passes(), f.attend_passes());
    if (testing::Test::HasFailure() || failed > 500) return -1;
  }
}

TEST_F(DeviceRepairTest, EachFailureOfTheDeviceLeavesThePassToTheHost) {
  int launches[2] = {};
  for (const bool is_pinned : {false, true}) {
    SCOPED_TRACE(is_pinned);
    launches[is_pinned] =
        FailEveryCall(RuntimeCall::kLaunch, cudaErrorLaunchFailure, "DEVICE_FAILED", is_pinned);
    EXPECT_GT(FailEveryCall(RuntimeCall::kAllocate, cudaErrorMemoryAllocation, "DEVICE_MEMORY_FULL",
                            is_pinned),
              0);
    EXPECT_GT(
        FailEveryCall(RuntimeCall::kCopy, cudaErrorMisalignedAddress, "DEVICE_FAILED", is_pinned),
        0);
    EXPECT_GT(FailEveryCall(RuntimeCall::kSynchronize, cudaErrorLaunchFailure, "DEVICE_FAILED",
                            is_pinned),
              0);
  }
  EXPECT_GT(launches[0], 0);
  EXPECT_EQ(launches[1], launches[0] + 1) << "the repair's originals, gathered";
}

TEST_F(DeviceRepairTest, OriginalsOfAnotherGenerationReturnNothing) {
  for (const bool is_pinned : {false, true}) {
    SCOPED_TRACE(is_pinned);
    RepairFixture before(kRepairsBoth, is_pinned);
    for (int32_t i = 0; i < 6; ++i) before.fake.BumpBackingGeneration(i);
    EXPECT_EQ(ReasonOf(before.ReadLast()), "BLOCK_REUSED");

    // One KV head and one repair, so that nothing looks at a generation before the end.
    RepairFixture during(kRepairsBoth, is_pinned, SmallSpec(1, 1, 1, 64));
    int64_t passes_before = 0;
    during.checker.after_attend = [&] {
      if (during.attend_passes() != 2) return;
      passes_before = during.device_passes();
      for (int32_t i = 0; i < 6; ++i) during.fake.BumpBackingGeneration(i);
    };
    EXPECT_EQ(ReasonOf(during.ReadLast()), "BLOCK_REUSED");
    EXPECT_EQ(passes_before, 1) << "of the pass before; this one is counted when it has ended";
    EXPECT_EQ(during.device_passes(), 2) << "the repair had run on the device";
  }
}

TEST_F(DeviceRepairTest, OriginalsThatWereNotSealedAreNotRead) {
  RepairFixture f(kRepairsBoth, true);
  for (int32_t i = 0; i < 6; ++i) f.fake.original_keys(i, 0, 0)[17] ^= 1;
  EXPECT_EQ(ReasonOf(f.ReadLast()), "ORIGINAL_CHECKSUM_MISMATCH");
}

}  // namespace
}  // namespace certkv::certifier
