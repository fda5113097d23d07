// Reads of a certifier over a GPU's copy: certified like the host's, and whatever fails on the way,
// certified or exact from host memory, or an error; never part of an output.
#include "services/certifier/device_read.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "kernels/core/device_export.h"
#include "kernels/core/status.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "services/certifier/read_fixture.h"
#include "tests/device/device_fixture.h"

namespace certkv::certifier {
namespace {

using cuda_sharing::InjectFailures;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class DeviceReadTest : public testing::Test {
 protected:
  ~DeviceReadTest() override { InjectFailures(""); }
};

TEST_F(DeviceReadTest, AreCertifiedAndCoverTheTruth) {
  DeviceFixture f;
  for (int32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(f.Read(layer, kTokens - 1).ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(f.device_passes(), 4) << "two layers, two KV heads";
  EXPECT_THAT(f.fallbacks(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kCertified);
    EXPECT_GT(certificate.worst_case_tv, 0.0f);
  }
}

TEST_F(DeviceReadTest, CertificatesAreThoseOfTheHostToRounding) {
  DeviceFixture f;
  ASSERT_TRUE(f.ReadLast().ok());
  const std::vector<ReadCertificate> device = f.checker.certificates();
  const std::vector<float> outputs = f.checker.outputs();
  ReadChecker host(&f.fake, KernelsOf(Backend::kCpu));
  ASSERT_TRUE(host.Read(*f.view, f.Request(0, kTokens - 1)).ok());
  for (size_t i = 0; i < device.size(); ++i) {
    EXPECT_NEAR(device[i].worst_case_tv, host.certificates()[i].worst_case_tv,
                0.02 * host.certificates()[i].worst_case_tv);
    EXPECT_EQ(device[i].read_bytes, host.certificates()[i].read_bytes);
  }
  for (size_t i = 0; i < outputs.size(); ++i) EXPECT_NEAR(outputs[i], host.outputs()[i], 1e-4f);
}

// A copy that isn't read would not be seen to be wrong.
TEST_F(DeviceReadTest, ReadTheCopyAndNotTheHost) {
  DeviceFixture f;
  ASSERT_TRUE(f.ReadLast().ok());
  const std::vector<float> before = f.checker.outputs();
  // Compared already; a code that changes now is one that changed in the GPU's memory later.
  for (int32_t i = 0; i < 64; ++i) f.copied(f.fake.scan(1, 0, 0, 0))[512 + i] ^= 0x40;
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_NE(f.checker.outputs(), before);
}

TEST_F(DeviceReadTest, CopyThatDiffersIsReadOnTheHostUntilItIsCopiedAgain) {
  DeviceFixture f;
  f.copied(f.fake.detail(1, 0, 1, 0))[100] ^= 1;
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_THAT(f.fallbacks(), ElementsAre(Pair("DEVICE_COPY_DIFFERS", 1)));
  EXPECT_EQ(f.device_passes(), 1) << "the other KV head";
  f.copy->Upload({f.fake.blocks()[1].device.slot});
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_EQ(f.device_passes(), 3);
}

TEST_F(DeviceReadTest, EveryReadComparesWhereEveryReadVerifies) {
  ReadKernels kernels = OnDevice();
  kernels.verify_every_read = true;
  DeviceFixture f(TestLease(kLoose), kernels);
  ASSERT_TRUE(f.ReadLast().ok());
  f.copied(f.fake.scan(0, 0, 0, 0))[600] ^= 1;
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_THAT(f.fallbacks(), ElementsAre(Pair("DEVICE_COPY_DIFFERS", 1)));
}

TEST_F(DeviceReadTest, AfterAReuseOfASlotNothingIsReturned) {
  DeviceFixture f;
  f.checker.after_attend = [&f] { f.fake.BumpDeviceGeneration(1); };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
  EXPECT_GT(f.device_passes(), 0);
}

TEST_F(DeviceReadTest, WithdrawnCopyIsNotRead) {
  DeviceFixture f;
  ASSERT_TRUE(f.ReadLast().ok());
  InjectFailures("cudaMemcpyAsync=719");
  f.copy->Upload({f.fake.blocks()[0].device.slot});
  InjectFailures("");
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(f.device_passes(), 2);
  EXPECT_THAT(f.fallbacks(), ElementsAre(Pair("DEVICE_COPY_MISSING", 2)));
}

TEST_F(DeviceReadTest, EachFailureOfTheDeviceLeavesTheReadToTheHost) {
  for (const char* failure : {"cudaMemcpyAsync=719", "cudaStreamSynchronize=214",
                              "cudaStreamWaitEvent=46", "cudaStreamWaitEvent=400@2", "*=46"}) {
    SCOPED_TRACE(failure);
    DeviceFixture f;
    InjectFailures(failure);
    ASSERT_TRUE(f.ReadLast().ok());
    InjectFailures("");
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    EXPECT_EQ(f.device_passes(), 0);
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_EQ(f.device_passes(), 0) << "a device that failed is not asked again";
    EXPECT_EQ(f.fallbacks()["DEVICE_FAILED"], 1);
    EXPECT_EQ(f.fallbacks()["DEVICE_COPY_MISSING"], 3);
  }
}

TEST_F(DeviceReadTest, HalfAnOutputOfALaunchThatFailsIsOverwritten) {
  const std::pair<absl::Status, int64_t> failures[] = {
      {MakeError(absl::StatusCode::kInternal, "DEVICE_FAILED", "an ECC error; test"), 1},
      {MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_MEMORY_FULL", "test"), 4},
      {MakeError(absl::StatusCode::kUnimplemented, "DEVICE_LACKS_OPERATION", "test"), 4}};
  for (const auto& [failure, times] : failures) {
    SCOPED_TRACE(failure);
    ReadKernels kernels = OnDevice();
    kernels.attend_on_device = [failure = failure](const AttendArgs& args,
                                                   const AttendResult& result, void*) {
      for (int32_t i = 0; i < args.layout->value_dim; ++i) result.outputs[i] = 1e9f;
      result.lse_nat[0] = 0;
      result.value_term[0] = 0;
      result.logit_half_width[0] = 0;
      return failure;
    };
    DeviceFixture f(TestLease(kLoose), kernels);
    ASSERT_TRUE(f.ReadLast().ok());
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    EXPECT_EQ(f.device_passes(), 0);
    EXPECT_EQ(f.fallbacks()[ReasonOf(failure)], times) << "memory may be there next time";
  }
}

TEST_F(DeviceReadTest, FormatsThatTheKernelsLackAreReadOnTheHost) {
  CacheSpec spec = SmallSpec(2, 2, 2, 64);
  for (LayerSpec& layer : spec.layers) layer.key_format = KeyFormat::kK8D;
  DeviceFixture f(TestLease(kLoose), OnDevice(), spec);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_THAT(f.fallbacks(), ElementsAre(Pair("DEVICE_LACKS_OPERATION", 2)));
}

TEST_F(DeviceReadTest, CachesWithoutACopyAreReadOnTheHostAndNotCounted) {
  ReadFixture f(SmallSpec(2, 2, 3, 64), kTokens, TestLease(kLoose), 1.0f, OnDevice());
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(f.checker.counters().device_passes, 0);
  EXPECT_THAT(f.checker.counters().DeviceFallbacksByReason(), IsEmpty());
}

}  // namespace
}  // namespace certkv::certifier
