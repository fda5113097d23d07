// Reads that skip: what they may leave out, what their record says, and what happens when they left
// out too much.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/ops/attend_progressive.h"
#include "services/certifier/read_fixture.h"

namespace certkv::certifier {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kTokens = 64 * 20 + 20;
// Queries so large that a few tokens outweigh the others.
constexpr float kPeaked = 4.0f;

PolicyLease SkippingLease(float skip_tolerance) {
  return TestLease({.tv_tolerance = 0.3f, .value_tolerance = 1, .skip_tolerance = skip_tolerance});
}

int64_t SkippedTokens(const ReadFixture& f) {
  int64_t skipped = 0;
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    skipped += certificate.skipped_tokens;
  }
  return skipped;
}

TEST(ReadSkipTest, LeavesOutWhatItsToleranceAllowsAndSaysSo) {
  ReadFixture f(SmallSpec(1, 2, 3, 64), kTokens, SkippingLease(0.1f), kPeaked);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  int64_t skipping = 0;
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kCertified);
    EXPECT_EQ(certificate.read_tokens + certificate.skipped_tokens, kTokens);
    EXPECT_LE(certificate.skipped_share, 0.1f * 1.001f);
    EXPECT_LE(certificate.skipped_share, certificate.worst_case_tv);
    skipping += certificate.skipped_tokens > 0;
  }
  EXPECT_GT(SkippedTokens(f), kTokens / 4);
  EXPECT_EQ(f.checker.counters().skipping_heads, skipping);
  EXPECT_EQ(f.checker.counters().skipped_tokens, SkippedTokens(f));
  EXPECT_EQ(f.checker.counters().read_tokens, 6 * kTokens - SkippedTokens(f));
}

TEST(ReadSkipTest, ReadsFewerBytesThanADenseRead) {
  ReadFixture dense(SmallSpec(1, 1, 1, 64), kTokens, SkippingLease(0), kPeaked);
  ReadFixture sparse(SmallSpec(1, 1, 1, 64), kTokens, SkippingLease(0.1f), kPeaked);
  ASSERT_TRUE(dense.ReadLast().ok());
  ASSERT_TRUE(sparse.ReadLast().ok());
  EXPECT_EQ(SkippedTokens(dense), 0);
  EXPECT_EQ(dense.checker.certificates()[0].skipped_share, 0);
  const TileLayout layout = MakeTileLayout(SmallSpec(1, 1, 1, 64), 0);
  EXPECT_EQ(dense.checker.certificates()[0].read_bytes,
            20 * layout.tile_bytes() + 20 * (64 + 64) * 2);
  EXPECT_LT(sparse.checker.certificates()[0].read_bytes,
            dense.checker.certificates()[0].read_bytes);
}

TEST(ReadSkipTest, ShortReadsAndFormatsWithoutScalesReadEverything) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 64 * 4, SkippingLease(0.1f), kPeaked);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_EQ(SkippedTokens(f), 0);
  EXPECT_EQ(f.checker.counters().unskippable_heads, 0);

  CacheSpec spec = SmallSpec(1, 1, 2, 64);
  spec.layers[0].key_format = KeyFormat::kFp8E4m3;
  spec.layers[0].witness_bands = 4;
  spec.layers[0].fp8_key_scale = 0.05f;
  ReadFixture fp8(spec, kTokens, SkippingLease(0.1f), kPeaked);
  ASSERT_TRUE(fp8.ReadLast().ok());
  EXPECT_THAT(fp8.checker.violations(), IsEmpty());
  EXPECT_EQ(SkippedTokens(fp8), 0);
  EXPECT_EQ(fp8.checker.counters().unskippable_heads, 2);
}

TEST(ReadSkipTest, AReadThatMissesSkipsLessThenReadsAllThenRepairs) {
  CacheSpec spec = SmallSpec(1, 1, 3, 64);
  spec.layers[0].key_format = KeyFormat::kK6;
  bool misses = false;
  bool repairs = false;
  bool skips = false;
  for (const float tolerance : {0.9f, 0.15f, 0.04f, 0.01f, 0.003f}) {
    SCOPED_TRACE(tolerance);
    ReadFixture f(
        spec, kTokens,
        TestLease({.tv_tolerance = tolerance, .value_tolerance = 1, .skip_tolerance = 0.5f}),
        kPeaked);
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      EXPECT_NE(certificate.outcome, Outcome::kObserved);
      EXPECT_GE(certificate.first_worst_case_tv, certificate.skipped_share);
      repairs = repairs || certificate.rung > Rung::kNone;
      skips = skips || certificate.skipped_tokens > 0;
      // Who was repaired reads everything.
      if (certificate.rung > Rung::kNone) {
        EXPECT_EQ(certificate.skipped_tokens, 0);
      }
    }
    misses = misses || f.checker.counters().skip_misses > 0;
  }
  EXPECT_TRUE(misses);
  EXPECT_TRUE(repairs);
  EXPECT_TRUE(skips);
}

TEST(ReadSkipTest, ObserveSkipsToo) {
  PolicyLease lease = SkippingLease(0.1f);
  lease.read_mode = ReadMode::kObserve;
  lease.tolerances.tv_tolerance = 0.25f;
  ReadFixture f(SmallSpec(1, 1, 3, 64), kTokens, lease, kPeaked);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_GT(SkippedTokens(f), 0);
  EXPECT_EQ(f.checker.counters().attend_passes, 1);
}

TEST(ReadSkipTest, ExactNeverSkips) {
  PolicyLease lease = SkippingLease(0.1f);
  lease.read_mode = ReadMode::kExact;
  ReadFixture f(SmallSpec(1, 1, 3, 64), kTokens, lease, kPeaked);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(SkippedTokens(f), 0);
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kExact);
  }
}

TEST(ReadSkipTest, RulesOfLayersAndHeadsSayWhoSkips) {
  PolicyLease lease = SkippingLease(0.1f);
  lease.head_rules = {{.layer = 0, .query_head = 1, .skip_tolerance = 0},
                      {.layer = 0, .query_head = 2, .exact = true},
                      {.layer = 1, .skip_tolerance = 0}};
  ReadFixture f(SmallSpec(2, 1, 3, 64), kTokens, lease, kPeaked);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_GT(f.checker.certificates()[0].skipped_tokens, 0);
  EXPECT_EQ(f.checker.certificates()[1].skipped_tokens, 0);
  EXPECT_EQ(f.checker.certificates()[2].outcome, Outcome::kExact);
  ASSERT_TRUE(f.Read(1, kTokens - 1).ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(SkippedTokens(f), 0);
}

TEST(ReadSkipTest, SkippingSpendsTheBudget) {
  PolicyLease lease = SkippingLease(0.1f);
  lease.risk_mode = RiskMode::kCumulative;
  lease.budget_slice = 0.25;
  ReadFixture f(SmallSpec(1, 1, 3, 64), kTokens, lease, kPeaked);
  double spent = 0;
  bool exact = false;
  for (int read = 0; read < 5; ++read) {
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      if (certificate.outcome == Outcome::kCertified) spent += certificate.worst_case_tv;
      exact = exact || certificate.outcome == Outcome::kExact;
    }
  }
  EXPECT_LE(spent, 0.25);
  EXPECT_TRUE(exact);
}

// The record of an audit says which sub-blocks were skipped; the read's own record agrees.
TEST(ReadSkipTest, AuditNamesTheSkippedSubBlocks) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), kTokens, SkippingLease(0.1f), kPeaked);
  const ReadRequest request = f.Request(0, kTokens - 1);
  const auto plan = PlanRead(*f.view, request, 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  CertifierCounters counters;
  const ReadEngine engine(KernelsOf(Backend::kCpu), &counters);
  ReadWorkspace workspace;
  std::vector<ReadCertificate> certificates(2);
  std::vector<float> outputs(2 * 64);
  std::vector<uint8_t> sources(2 * plan->tile_count);
  ASSERT_TRUE(
      engine
          .Read(*plan, &workspace,
                {absl::MakeSpan(certificates), absl::MakeSpan(outputs), absl::MakeSpan(sources)})
          .ok());
  for (int g = 0; g < 2; ++g) {
    int64_t skipped = 0;
    for (int32_t tile = 0; tile < plan->tile_count; ++tile) {
      const int bits = sources[g * plan->tile_count + tile] >> kSkippedShift;
      for (int b = 0; b < kSubBlocksPerTile; ++b) skipped += kSubBlockTokens * (bits >> b & 1);
    }
    EXPECT_EQ(skipped, certificates[g].skipped_tokens);
    EXPECT_GT(skipped, 0);
  }
}

}  // namespace
}  // namespace certkv::certifier
