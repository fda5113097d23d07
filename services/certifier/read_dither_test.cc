// Reads of dithered keys: who may use the bound that can fail, what it costs, and what happens when
// nobody may.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "kernels/core/status.h"
#include "services/certifier/read_fixture.h"

namespace certkv::certifier {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kTokens = 64 * 8 + 20;
constexpr double kSlice = 1e-3;
constexpr int kHeads = 6;

CacheSpec DitheredSpec() {
  CacheSpec spec = SmallSpec(1, 2, 3, 64);
  spec.layers[0].key_format = KeyFormat::kK8D;
  spec.layers[0].value_format = ValueFormat::kV8;
  return spec;
}

PolicyLease LeaseOf(RiskMode mode, double slice,
                    const Tolerances& tolerances = {.tv_tolerance = 0.2f, .value_tolerance = 1}) {
  PolicyLease lease = TestLease(tolerances);
  lease.risk_mode = mode;
  lease.budget_slice = slice;
  return lease;
}

float LargestTv(const ReadFixture& f) {
  float largest = 0;
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    largest = std::max(largest, certificate.worst_case_tv);
  }
  return largest;
}

TEST(ReadDitherTest, UnderUnionEveryHeadTakesItsShareAndItsBoundIsNarrower) {
  ReadFixture f(DitheredSpec(), kTokens, LeaseOf(RiskMode::kUnion, kSlice));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kCertified);
    EXPECT_EQ(certificate.failure_probability, FailureShare(kSlice));
    EXPECT_EQ(certificate.key_format, static_cast<uint8_t>(KeyFormat::kK8D));
  }
  EXPECT_GE(f.view->Snapshot().budget->spent(), kHeads * double{FailureShare(kSlice)});
  EXPECT_EQ(f.checker.counters().dithered_heads, kHeads);

  ReadFixture sure(DitheredSpec(), kTokens, LeaseOf(RiskMode::kThreshold, 0));
  ASSERT_TRUE(sure.ReadLast().ok());
  EXPECT_LT(LargestTv(f), 0.75f * LargestTv(sure));
}

TEST(ReadDitherTest, OtherModesReadByTheBoundThatHoldsForSure) {
  for (const RiskMode mode : {RiskMode::kThreshold, RiskMode::kCumulative, RiskMode::kAnytime}) {
    ReadFixture f(DitheredSpec(), kTokens, LeaseOf(mode, 100));
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      EXPECT_EQ(certificate.failure_probability, 0) << RiskModeName(mode);
      EXPECT_EQ(certificate.outcome, Outcome::kCertified);
    }
    EXPECT_EQ(f.checker.counters().dithered_heads, 0);
    EXPECT_EQ(f.checker.counters().shareless_heads, kHeads);
  }
}

TEST(ReadDitherTest, OnceTheSliceIsUsedUpReadsAreSureOrExact) {
  // Two reads of six heads, and one head of a third.
  const double slice = (2 * kHeads + 1) * 0x1p-40;
  ReadFixture f(DitheredSpec(), kTokens, LeaseOf(RiskMode::kUnion, slice));
  int64_t shares = 0;
  for (int read = 0; read < 4; ++read) {
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      if (certificate.failure_probability > 0) ++shares;
    }
  }
  EXPECT_EQ(shares, 2 * kHeads + 1);
  EXPECT_LE(f.view->Snapshot().budget->spent(), slice);
  // Where the sure bound does not meet the tolerance, the ladder ends at originals.
  ReadFixture tight(DitheredSpec(), kTokens,
                    LeaseOf(RiskMode::kUnion, 0, {.tv_tolerance = 0.0005f, .value_tolerance = 1}));
  ASSERT_TRUE(tight.ReadLast().ok());
  EXPECT_THAT(tight.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : tight.checker.certificates()) {
    EXPECT_EQ(certificate.failure_probability, 0);
    EXPECT_GE(certificate.rung, Rung::kKeys);
  }
}

TEST(ReadDitherTest, AReadThatEndsExactHasSpentItsShareAllTheSame) {
  ReadFixture f(DitheredSpec(), kTokens,
                LeaseOf(RiskMode::kUnion, kSlice, {.tv_tolerance = 0, .value_tolerance = 1}));
  ASSERT_TRUE(f.ReadLast().ok());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kExact);
    EXPECT_EQ(certificate.failure_probability, FailureShare(kSlice));
  }
  EXPECT_GE(f.view->Snapshot().budget->spent(), kHeads * double{FailureShare(kSlice)});
}

TEST(ReadDitherTest, AReadThatFailsGivesNoShareBack) {
  ReadFixture f(DitheredSpec(), kTokens,
                LeaseOf(RiskMode::kUnion, kSlice, {.tv_tolerance = 0.0005f, .value_tolerance = 1}));
  for (int32_t block = 0; block < 8; ++block) f.fake.original_keys(block, 0, 0)[5] ^= 1;
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "ORIGINAL_CHECKSUM_MISMATCH") << status;
  EXPECT_GE(f.view->Snapshot().budget->spent(), 3 * double{FailureShare(kSlice)});
}

TEST(ReadDitherTest, ReadsWithoutDitherTakeNoShare) {
  const auto spent = [](const CacheSpec& spec, PolicyLease lease) {
    ReadFixture f(spec, kTokens, lease);
    EXPECT_TRUE(f.ReadLast().ok());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      EXPECT_EQ(certificate.failure_probability, 0);
    }
    return f.view->Snapshot().budget->spent();
  };
  PolicyLease lease = LeaseOf(RiskMode::kUnion, kSlice);
  EXPECT_EQ(spent(SmallSpec(1, 2, 3, 64), lease), 0) << "K8";
  lease.read_mode = ReadMode::kExact;
  EXPECT_EQ(spent(DitheredSpec(), lease), 0);
  lease.read_mode = ReadMode::kObserve;
  EXPECT_EQ(spent(DitheredSpec(), lease), 0) << "what is observed is promised to nobody";
  lease.read_mode = ReadMode::kEnforce;
  lease.head_rules = {{.layer = 0, .exact = true}};
  EXPECT_EQ(spent(DitheredSpec(), lease), 0);
}

TEST(ReadDitherTest, DitheredKeysAreNeverSkipped) {
  ReadFixture f(DitheredSpec(), 64 * 20,
                LeaseOf(RiskMode::kUnion, kSlice,
                        {.tv_tolerance = 0.3f, .value_tolerance = 1, .skip_tolerance = 0.1f}),
                4.0f);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.skipped_tokens, 0);
  }
  EXPECT_EQ(f.checker.counters().unskippable_heads, kHeads);
}

TEST(ReadDitherTest, ATileOfAnotherSecretIsDataLoss) {
  ReadFixture f(DitheredSpec(), kTokens, LeaseOf(RiskMode::kUnion, kSlice));
  f.fake.scan(3, 0, 1, 0)[offsetof(TileHeader, key_check)] ^= 1;
  const absl::Status status = f.ReadLast();
  EXPECT_EQ(ReasonOf(status), "TILE_FORMAT_MISMATCH") << status;
}

}  // namespace
}  // namespace certkv::certifier
