// What goes wrong around a read gives an error that says what, and no output.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "services/certifier/read_fixture.h"

namespace certkv::certifier {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

constexpr Tolerances kLoose = {.tv_tolerance = 0.2f, .value_tolerance = 0.5f};
// Forces every head to its originals.
constexpr Tolerances kZero = {.tv_tolerance = 0, .value_tolerance = 0};

TEST(ReadFaultTest, AGenerationMovedBeforeTheReadIsAnError) {
  ReadFixture f(SmallSpec(1, 2, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  f.fake.BumpDeviceGeneration(2);
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "BLOCK_REUSED");
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
}

TEST(ReadFaultTest, AGenerationMovedDuringTheReadIsAnError) {
  ReadFixture f(SmallSpec(1, 2, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  f.checker.after_attend = [&] {
    if (f.checker.counters().attend_passes == 1) f.fake.BumpDeviceGeneration(2);
  };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, AGenerationMovedDuringTheLastPassIsAnError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kZero));
  f.checker.after_attend = [&] {
    if (f.checker.counters().attend_passes == 2) f.fake.BumpDeviceGeneration(0);
  };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, ABlockSealedOnlyDuringTheReadIsAnError) {
  // Its bytes may have been read while they were written.
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  ASSERT_TRUE(f.ReadLast().ok());  // checksums are verified, and not asked again
  f.fake.BumpDeviceGeneration(2);
  f.checker.after_attend = [&] { f.fake.RestoreGenerations(2); };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, AnOriginalSealedOnlyDuringTheReadIsAnError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease({}, ReadMode::kExact));
  f.fake.BumpBackingGeneration(2);
  f.checker.after_attend = [&] { f.fake.RestoreGenerations(2); };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, AnOriginalReusedDuringItsReadIsAnError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kZero));
  f.checker.after_attend = [&] {
    if (f.checker.counters().attend_passes == 2) f.fake.BumpBackingGeneration(1);
  };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, AnOriginalReusedBeforeItsReadIsAnError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kZero));
  f.fake.BumpBackingGeneration(1);
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, AnOriginalReusedButNotReadIsNoError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  f.fake.BumpBackingGeneration(1);
  EXPECT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
}

TEST(ReadFaultTest, ATailGivenBackDuringTheReadIsAnError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  f.checker.after_attend = [&] { f.fake.BumpStagingGeneration(); };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
}

TEST(ReadFaultTest, AnotherBlocksTileIsAnError) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  const TileLayout layout = MakeTileLayout(f.fake.spec(), 0);
  std::memcpy(f.fake.scan(1, 0, 0, 0), f.fake.scan(2, 0, 0, 0), layout.scan_bytes);
  std::memcpy(f.fake.detail(1, 0, 0, 0), f.fake.detail(2, 0, 0, 0), layout.detail_bytes);
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "TILE_IDENTITY_MISMATCH");
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
}

TEST(ReadFaultTest, AFlippedBitInEveryPlaneIsAnError) {
  const TileLayout layout = MakeTileLayout(SmallSpec(1, 1, 2, 64), 0);
  for (int64_t byte = 0; byte < layout.tile_bytes(); byte += 97) {
    ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 2, TestLease(kLoose));
    uint8_t* place = byte < layout.scan_bytes
                         ? f.fake.scan(1, 0, 0, 0) + byte
                         : f.fake.detail(1, 0, 0, 0) + byte - layout.scan_bytes;
    *place ^= 0x10;
    const absl::Status status = f.ReadLast();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << byte << ": " << status;
  }
}

TEST(ReadFaultTest, ChecksumsAreVerifiedOncePerGeneration) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4, TestLease(kLoose));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_EQ(f.checker.counters().tiles_verified, 4);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_EQ(f.checker.counters().tiles_verified, 4);
}

TEST(ReadFaultTest, ACorruptedOriginalIsAnErrorWhenItIsNeeded) {
  for (const bool in_keys : {true, false}) {
    ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kZero));
    uint16_t* words = in_keys ? f.fake.original_keys(1, 0, 0) : f.fake.original_values(1, 0, 0);
    words[1000] ^= 1;
    const absl::Status status = f.ReadLast();
    EXPECT_EQ(ReasonOf(status), "ORIGINAL_CHECKSUM_MISMATCH");
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    f.view = f.fake.OpenView(TestLease(kLoose), &f.book);
    EXPECT_TRUE(f.ReadLast().ok());  // not needed
  }
}

TEST(ReadFaultTest, AMissingOriginalIsAnErrorWhenItIsNeeded) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kZero));
  f.fake.mutable_block(3)->backing = SlotRef();
  f.view = f.fake.OpenView(TestLease(kZero), &f.book);
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "ORIGINAL_MISSING");
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  f.view = f.fake.OpenView(TestLease(kLoose), &f.book);
  EXPECT_TRUE(f.ReadLast().ok());
  f.view = f.fake.OpenView(TestLease(kLoose, ReadMode::kExact), &f.book);
  EXPECT_EQ(ReasonOf(f.ReadLast()), "ORIGINAL_MISSING");
}

TEST(ReadFaultTest, ADeadStoreIsAnErrorBeforeAndDuringTheRead) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4 + 20, TestLease(kLoose));
  f.checker.after_attend = [&] { f.fake.cache()->MarkDead(); };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "STORE_UNREACHABLE");
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "STORE_UNREACHABLE");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST(ReadFaultTest, AnExpiredLeaseIsAnError) {
  PolicyLease lease = TestLease(kLoose);
  lease.expire_time_ms = 1000;
  ReadFixture f(SmallSpec(1, 1, 2, 64), 200, lease);
  EXPECT_TRUE(f.checker.Read(*f.view, f.Request(0, 199), 999).ok());
  const absl::Status status = f.checker.Read(*f.view, f.Request(0, 199), 1000);
  EXPECT_EQ(ReasonOf(status), "POLICY_LEASE_EXPIRED");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ReadFaultTest, BadArgumentsAreRefusedAtTheDoor) {
  ReadFixture f(SmallSpec(2, 1, 2, 64), 200, TestLease(kLoose));
  const auto reason = [&](const std::function<void(ReadRequest*)>& change) {
    ReadRequest request = f.Request(0, 199);
    change(&request);
    const absl::Status status = f.checker.Read(*f.view, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return ReasonOf(status);
  };
  EXPECT_EQ(reason([](ReadRequest* r) { r->layer = -1; }), "LAYER_UNKNOWN");
  EXPECT_EQ(reason([](ReadRequest* r) { r->layer = 2; }), "LAYER_UNKNOWN");
  EXPECT_EQ(reason([](ReadRequest* r) { r->query_position = -1; }), "POSITION_OUTSIDE");
  EXPECT_EQ(reason([](ReadRequest* r) { r->query_position = 200; }), "POSITION_OUTSIDE");
  EXPECT_EQ(reason([](ReadRequest* r) { r->queries = r->queries.subspan(1); }), "QUERY_SIZE");
  EXPECT_EQ(reason([](ReadRequest* r) { r->queries = {}; }), "QUERY_SIZE");
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    std::vector<float> queries = f.queries;
    queries[64 + 5] = bad;
    EXPECT_EQ(reason([&](ReadRequest* r) { r->queries = queries; }), "QUERY_NOT_FINITE");
  }
  const std::vector<float> one_sink = {0.0f};
  const std::vector<float> nan_sink = {0.0f, std::numeric_limits<float>::quiet_NaN()};
  const std::vector<float> inf_sink = {std::numeric_limits<float>::infinity(), 0.0f};
  for (const auto* sinks : {&one_sink, &nan_sink, &inf_sink}) {
    EXPECT_EQ(reason([&](ReadRequest* r) { r->sink_logits = *sinks; }), "SINK_LOGITS_INVALID");
  }
}

TEST(ReadFaultTest, ATailWithoutFiniteNumbersIsAnError) {
  for (const uint16_t bad : {0x7c00, 0xfc00, 0x7e01}) {
    ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 2 + 20, TestLease(kLoose));
    f.fake.tail_keys(0, 0)[19 * 64 + 63] = bad;
    const absl::Status status = f.ReadLast();
    EXPECT_EQ(ReasonOf(status), "TAIL_NOT_FINITE");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(f.Read(0, 64 * 2 + 18).ok());  // does not read that token
  }
}

TEST(ReadFaultTest, AnOutputThatIsNotFiniteIsAnError) {
  for (const ReadMode mode : {ReadMode::kEnforce, ReadMode::kObserve, ReadMode::kExact}) {
    ReadKernels kernels = KernelsOf(Backend::kCpu);
    kernels.attend = [](const AttendArgs& args, const AttendResult& result, void* workspace) {
      const absl::Status status = Attend(Backend::kCpu, args, result, workspace);
      result.outputs[args.layout->value_dim + 3] = std::numeric_limits<float>::infinity();
      return status;
    };
    ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 2, TestLease(kLoose, mode), 1.0f, kernels);
    EXPECT_EQ(ReasonOf(f.ReadLast()), "ARITHMETIC_LIMIT") << ReadModeName(mode);
  }
}

TEST(ReadFaultTest, LogitsBeyondFloatAreAnErrorNotAnExactOutput) {
  // s ||q|| ||k|| of about 10^7 nats: a float sum may be off by many nats.
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 2, TestLease(kZero), 1e6f);
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "ARITHMETIC_LIMIT") << status;
}

// Originals and a query that reach the corner of the box: channel 0 alone is asked, and 62 tokens
// lie at one midpoint between two codes, half of them just below it and half just above. Their
// exact logits are equal, their served ones two half-widths apart, so the true total variation is
// nearly TV*, and half of it is no bound.
class WorstCase {
 public:
  explicit WorstCase(ReadKernels kernels)
      : spec_(Spec()), fake_(spec_, 4), checker_(&fake_, std::move(kernels)), book_(4) {
    SequenceData data;
    data.token_count = 64;
    data.keys.emplace_back(64 * 64, uint16_t{0});
    data.values.emplace_back(64 * 64, FloatToF16(1.0f));
    constexpr float kMin = -15.75f;
    constexpr float kMax = 0.15f;
    const float scale = F16ToFloat(FloatToF16RoundedUp((kMax - kMin) / 255));
    const float midpoint = kMin + 254.5f * scale;
    for (int t = 0; t < 64; ++t) {
      uint16_t key = FloatToF16(t == 0 ? kMin : kMax);
      if (t >= 2 && t % 2 == 0) key = FloatToF16RoundedDown(midpoint - 0.001f * scale);
      if (t >= 2 && t % 2 == 1) key = FloatToF16RoundedUp(midpoint + 0.001f * scale);
      data.keys[0][t * 64] = key;
    }
    fake_.Put(data);
    view_ = fake_.OpenView(TestLease({.tv_tolerance = 1, .value_tolerance = 10}), &book_);
    queries_.assign(64, 0.0f);
    queries_[0] = 0.4f / (scale / 2);  // c is 0.4 nats
  }

  ReadChecker& Read() {
    ReadRequest request;
    request.query_position = 63;
    request.queries = queries_;
    const absl::Status status = checker_.Read(*view_, request);
    EXPECT_TRUE(status.ok()) << status;
    return checker_;
  }

 private:
  static CacheSpec Spec() {
    CacheSpec spec = SmallSpec(1, 1, 1, 64);
    spec.logit_scale = 1;
    return spec;
  }
  const CacheSpec spec_;
  FakeCache fake_;
  ReadChecker checker_;
  BudgetBook book_;
  std::shared_ptr<View> view_;
  std::vector<float> queries_;
};

TEST(CanaryTest, TheWorstCaseIsNearlyReachedAndStillBounded) {
  WorstCase worst(KernelsOf(Backend::kCpu));
  const ReadChecker& checker = worst.Read();
  EXPECT_THAT(checker.violations(), IsEmpty());
  EXPECT_GT(checker.true_tv()[0], 0.75 * checker.certificates()[0].worst_case_tv);
}

TEST(CanaryTest, ACertificateOfHalfTheBoundIsCaught) {
  ReadKernels kernels = KernelsOf(Backend::kCpu);
  kernels.finish = [](const FinishArgs& args, FinishWorkspace* workspace,
                      Certificate* certificate) {
    const absl::Status status = FinishCertificate(Backend::kCpu, args, workspace, certificate);
    certificate->worst_case_tv /= 2;
    return status;
  };
  WorstCase worst(std::move(kernels));
  EXPECT_THAT(worst.Read().violations(), Not(IsEmpty()));
}

TEST(CanaryTest, HalfWidthsOfHalfTheErrorAreCaught) {
  ReadKernels kernels = KernelsOf(Backend::kCpu);
  kernels.attend = [](const AttendArgs& args, const AttendResult& result, void* workspace) {
    const absl::Status status = Attend(Backend::kCpu, args, result, workspace);
    for (int32_t i = 0; i < args.group_size * AttendAtomCount(args); ++i) {
      result.logit_half_width[i] /= 2;
    }
    return status;
  };
  WorstCase worst(std::move(kernels));
  EXPECT_THAT(worst.Read().violations(), Not(IsEmpty()));
}

}  // namespace
}  // namespace certkv::certifier
