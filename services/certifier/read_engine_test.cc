#include "services/certifier/read_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/core/status.h"
#include "services/certifier/read_fixture.h"

namespace certkv::certifier {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Tolerances kLoose = {.tv_tolerance = 0.2f, .value_tolerance = 0.5f};

TEST(ReadEngineTest, CertifiesEveryHeadOfAK8ReadAtFirstSight) {
  ReadFixture f(SmallSpec(2, 2, 3, 64), 400, TestLease(kLoose));
  for (int32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(f.Read(layer, 399).ok());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      EXPECT_EQ(certificate.outcome, Outcome::kCertified);
      EXPECT_EQ(certificate.rung, Rung::kNone);
      EXPECT_EQ(certificate.layer, layer);
      EXPECT_EQ(certificate.query_position, 399);
      EXPECT_EQ(certificate.repair_bytes, 0);
      EXPECT_GT(certificate.worst_case_tv, 0.0f);
      EXPECT_EQ(certificate.first_worst_case_tv, certificate.worst_case_tv);
    }
  }
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(f.checker.counters().attend_passes, 4);  // two layers, two KV heads
  EXPECT_EQ(f.checker.counters().originals_verified, 0);
}

TEST(ReadEngineTest, RepairsValuesWhenOnlyTheValueTermMisses) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 640,
                TestLease({.tv_tolerance = 1, .value_tolerance = 0.05f}));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kCertified);
    EXPECT_EQ(certificate.rung, Rung::kValues);
    // Some tiles, not all: 64 values of 64 channels in 2 bytes each.
    EXPECT_GT(certificate.repair_bytes, 0);
    EXPECT_LT(certificate.repair_bytes, 10 * 64 * 64 * 2);
    EXPECT_EQ(certificate.repair_bytes % (64 * 64 * 2), 0);
  }
}

TEST(ReadEngineTest, RepairsKeysWhenOnlyTheTotalVariationMisses) {
  ReadFixture f(SmallSpec(1, 1, 2, 64), 640,
                TestLease({.tv_tolerance = 0.02f, .value_tolerance = 1}));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kCertified);
    EXPECT_EQ(certificate.rung, Rung::kKeys);
    EXPECT_GT(certificate.first_worst_case_tv, 0.02f);
    EXPECT_LE(certificate.worst_case_tv, 0.02f);
    EXPECT_GT(certificate.repair_bytes, 0);
    EXPECT_LE(certificate.repair_bytes, 10 * 64 * 64 * 2);
  }
}

TEST(ReadEngineTest, ReadsALayerExactlyWhenNoBoundCouldMeetTheTolerance) {
  ReadFixture f(SmallSpec(1, 2, 2, 64), 300, TestLease({.tv_tolerance = 0, .value_tolerance = 0}));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kExact);
    EXPECT_EQ(certificate.rung, Rung::kLayer);
    EXPECT_EQ(certificate.repair_bytes, 4 * 64 * (64 + 64) * 2);
  }
}

TEST(ReadEngineTest, ReadsOneHeadExactlyWhenItsBudgetIsUsedUp) {
  PolicyLease lease = TestLease(kLoose, ReadMode::kObserve);
  ReadFixture f(SmallSpec(1, 1, 2, 64), 300, lease);
  ASSERT_TRUE(f.ReadLast().ok());
  // Enough for head 0, and for no other.
  const double first = f.checker.certificates()[0].worst_case_tv;
  lease = TestLease(kLoose);
  lease.risk_mode = RiskMode::kCumulative;
  lease.budget_slice = first * 1.0001;
  f.view = f.fake.OpenView(lease, &f.book);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_EQ(f.checker.certificates()[0].outcome, Outcome::kCertified);
  EXPECT_EQ(f.checker.certificates()[1].outcome, Outcome::kExact);
  EXPECT_EQ(f.checker.certificates()[1].rung, Rung::kHead);
  EXPECT_LE(f.view->Snapshot().budget->spent(), lease.budget_slice);
  EXPECT_GT(f.view->Snapshot().budget->spent(), 0);
}

TEST(ReadEngineTest, HeadRulesHoldForTheirLayerAndHead) {
  PolicyLease lease = TestLease(kLoose, ReadMode::kObserve);
  ReadFixture f(SmallSpec(2, 1, 4, 64), 300, lease);
  ASSERT_TRUE(f.ReadLast().ok());
  const float seen = f.checker.certificates()[3].worst_case_tv;
  ASSERT_GT(seen, 0);
  lease = TestLease(kLoose);
  lease.head_rules = {{.layer = 0, .query_head = 1, .exact = true},
                      {.layer = 0, .query_head = 3, .tv_tolerance = seen / 2},
                      {.layer = 1, .exact = true}};
  f.view = f.fake.OpenView(lease, &f.book);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  const auto& heads = f.checker.certificates();
  EXPECT_EQ(heads[0].outcome, Outcome::kCertified);
  EXPECT_EQ(heads[0].rung, Rung::kNone);
  EXPECT_EQ(heads[1].outcome, Outcome::kExact);
  EXPECT_EQ(heads[1].rung, Rung::kHead);
  EXPECT_EQ(heads[1].first_worst_case_tv, heads[1].worst_case_tv) << "never tried quantized";
  EXPECT_GT(heads[3].rung, Rung::kNone) << "its tolerance is tighter";
  EXPECT_LE(heads[3].worst_case_tv, seen / 2);
  ASSERT_TRUE(f.Read(1, 299).ok());
  for (const ReadCertificate& head : f.checker.certificates()) {
    EXPECT_EQ(head.outcome, Outcome::kExact);
    EXPECT_EQ(head.rung, Rung::kLayer);
  }
}

TEST(ReadEngineTest, KeepsHeadsApartWhileSomeClimbSeveralTimes) {
  // Heads 1 and 3 of the group seem to miss their value tolerance twice.
  const ReadFixture* fixture = nullptr;
  int passes = 0;
  std::vector<int32_t> heads_read;
  ReadKernels kernels = KernelsOf(Backend::kCpu);
  kernels.attend = [&](const AttendArgs& args, const AttendResult& result, void* workspace) {
    const absl::Status status = Attend(Backend::kCpu, args, result, workspace);
    ++passes;
    for (int32_t g = 0; g < args.group_size; ++g) {
      const float* query = args.queries + g * 64;
      int32_t head = 0;
      while (!std::equal(query, query + 64, fixture->queries.data() + head * 64)) ++head;
      heads_read.push_back(head);
      if (head % 2 == 1 && passes <= 2) result.value_term[g] = 1000;
    }
    return status;
  };
  ReadFixture f(SmallSpec(1, 1, 4, 64), 640, TestLease(kLoose), 1.0f, kernels);
  fixture = &f;
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_THAT(heads_read, ElementsAre(0, 1, 2, 3, 1, 3, 1, 3));
  for (int32_t head = 0; head < 4; ++head) {
    EXPECT_EQ(f.checker.certificates()[head].query_head, head);
    EXPECT_EQ(f.checker.certificates()[head].rung, head % 2 == 0 ? Rung::kNone : Rung::kValues);
  }
}

TEST(ReadEngineTest, NeverOverspendsABudgetAcrossThreads) {
  PolicyLease lease = TestLease(kLoose);
  lease.risk_mode = RiskMode::kCumulative;
  lease.budget_slice = 1.5;
  ReadFixture f(SmallSpec(1, 1, 4, 64), 200, lease);
  CertifierCounters counters;
  const ReadEngine engine(KernelsOf(Backend::kCpu), &counters);
  std::atomic<int64_t> certified{0};
  absl::Mutex mutex;
  double served = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      ReadWorkspace workspace;
      std::vector<ReadCertificate> certificates(4);
      std::vector<float> outputs(4 * 64);
      for (int step = 0; step < 50; ++step) {
        const auto plan = PlanRead(*f.view, f.Request(0, 199), 0);
        ASSERT_TRUE(plan.ok());
        ASSERT_TRUE(
            engine.Read(*plan, &workspace, {absl::MakeSpan(certificates), absl::MakeSpan(outputs)})
                .ok());
        absl::MutexLock lock(&mutex);
        for (const ReadCertificate& certificate : certificates) {
          if (certificate.outcome != Outcome::kCertified) continue;
          served += certificate.worst_case_tv;
          ++certified;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(served, lease.budget_slice);
  EXPECT_GT(served, 0.8 * lease.budget_slice);
  EXPECT_EQ(counters.heads_by_outcome[static_cast<int>(Outcome::kExact)], 4 * 50 * 4 - certified);
}

TEST(ReadEngineTest, GivesTheBudgetOfAFailedReadBack) {
  PolicyLease lease = TestLease(kLoose);
  lease.risk_mode = RiskMode::kCumulative;
  lease.budget_slice = 10;
  ReadFixture f(SmallSpec(1, 2, 2, 64), 200, lease);
  f.checker.after_attend = [&] {
    if (f.checker.counters().attend_passes == 2) f.fake.BumpDeviceGeneration(0);
  };
  EXPECT_EQ(ReasonOf(f.ReadLast()), "BLOCK_REUSED");
  EXPECT_EQ(f.view->Snapshot().budget->spent(), 0);
}

TEST(ReadEngineTest, ExactModeReadsOriginalsOnly) {
  ReadFixture f(SmallSpec(1, 2, 2, 64), 300, TestLease(kLoose, ReadMode::kExact));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (size_t head = 0; head < 4; ++head) {
    const ReadCertificate& certificate = f.checker.certificates()[head];
    EXPECT_EQ(certificate.outcome, Outcome::kExact);
    EXPECT_EQ(certificate.rung, Rung::kLayer);
    EXPECT_EQ(certificate.value_term, 0);
    EXPECT_LT(certificate.worst_case_tv, 1e-2f);
    EXPECT_LT(f.checker.output_error()[head], 1e-4);
  }
}

TEST(ReadEngineTest, ObserveModeMeasuresAndRepairsNothing) {
  ReadFixture f(SmallSpec(1, 2, 2, 64), 300,
                TestLease({.tv_tolerance = 0.01f, .value_tolerance = 1}, ReadMode::kObserve));
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kObserved);
    EXPECT_EQ(certificate.rung, Rung::kNone);
    EXPECT_GT(certificate.worst_case_tv, 0.01f);
  }
  EXPECT_EQ(f.checker.counters().originals_verified, 0);
}

TEST(ReadEngineTest, ObserveModeSaysCertifiedWhereTheBoundsHold) {
  ReadFixture f(SmallSpec(1, 2, 2, 64), 300, TestLease(kLoose, ReadMode::kObserve));
  ASSERT_TRUE(f.ReadLast().ok());
  for (const ReadCertificate& certificate : f.checker.certificates()) {
    EXPECT_EQ(certificate.outcome, Outcome::kCertified);
  }
}

TEST(ReadEngineTest, MeasuringChargesNothingUnderAnyLease) {
  PolicyLease lease = TestLease(kLoose, ReadMode::kExact);
  lease.risk_mode = RiskMode::kCumulative;
  lease.budget_slice = 1;
  ReadFixture f(SmallSpec(1, 1, 2, 64), 300, lease);
  ReadRequest request = f.Request(0, 299);
  request.measure_only = true;
  ASSERT_TRUE(f.checker.Read(*f.view, request).ok());
  EXPECT_EQ(f.checker.certificates()[0].outcome, Outcome::kCertified);
  EXPECT_EQ(f.checker.counters().originals_verified, 0);
  EXPECT_EQ(f.view->Snapshot().budget->spent(), 0);
}

TEST(ReadEngineTest, MeetsAnOutputToleranceByRepair) {
  ReadFixture f(SmallSpec(1, 1, 3, 64), 640, TestLease({.tv_tolerance = 1, .value_tolerance = 10}));
  ASSERT_TRUE(f.ReadLast().ok());
  const float bound = f.checker.certificates()[0].output_error_bound;
  for (const float share : {0.9f, 0.5f, 0.2f, 0.05f}) {
    f.view = f.fake.OpenView(
        TestLease({.tv_tolerance = 1, .value_tolerance = 10, .output_tolerance = bound * share}),
        &f.book);
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      if (certificate.outcome == Outcome::kExact) continue;
      EXPECT_LE(certificate.output_error_bound, bound * share);
    }
    EXPECT_NE(f.checker.certificates()[0].rung, Rung::kNone) << share;
  }
}

TEST(ReadEngineTest, ATailWithoutBlocksIsExact) {
  for (const int64_t token_count : {1, 2, 63}) {
    ReadFixture f(SmallSpec(1, 2, 2, 64), token_count, TestLease(kLoose));
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    EXPECT_EQ(f.checker.certificates()[0].outcome, Outcome::kExact);
    EXPECT_EQ(f.checker.certificates()[0].rung, Rung::kNone);
  }
}

TEST(ReadEngineTest, ReadsTailsOfEveryLength) {
  for (int64_t tail = 0; tail < 64; ++tail) {
    ReadFixture f(SmallSpec(1, 1, 2, 64), 128 + tail, TestLease({.tv_tolerance = 0.05f}));
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty()) << tail;
  }
}

TEST(ReadEngineTest, ReadsEveryPositionOfASequence) {
  ReadFixture f(SmallSpec(1, 1, 1, 64), 64 * 2 + 9, TestLease({.tv_tolerance = 0.05f}));
  for (int64_t position = 0; position < 64 * 2 + 9; ++position) {
    ASSERT_TRUE(f.Read(0, position).ok()) << position;
  }
  EXPECT_THAT(f.checker.violations(), IsEmpty());
}

TEST(ReadEngineTest, ReadsOnlyTheSlidingWindow) {
  CacheSpec spec = SmallSpec(1, 1, 2, 64);
  for (const int32_t window : {1, 2, 63, 64, 65, 100, 500}) {
    spec.layers[0].sliding_window = window;
    ReadFixture f(spec, 64 * 4 + 30, TestLease({.tv_tolerance = 0.05f}));
    for (const int64_t position : {0, 63, 64, 200, 255, 256, 285}) {
      ASSERT_TRUE(f.Read(0, position).ok()) << window << " " << position;
    }
    EXPECT_THAT(f.checker.violations(), IsEmpty()) << window;
  }
}

TEST(ReadEngineTest, IgnoresABlockOutsideTheWindow) {
  CacheSpec spec = SmallSpec(1, 1, 1, 64);
  spec.layers[0].sliding_window = 64;
  ReadFixture f(spec, 64 * 4, TestLease(kLoose));
  f.fake.BumpDeviceGeneration(0);
  EXPECT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
}

TEST(ReadEngineTest, ReadsEveryGroupSize) {
  for (int32_t group = 1; group <= 16; ++group) {
    ReadFixture f(SmallSpec(1, 2, group, 64), 200, TestLease({.tv_tolerance = 0.03f}));
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty()) << group;
  }
}

TEST(ReadEngineTest, ReadsBlocksOfSeveralTiles) {
  CacheSpec spec = SmallSpec(1, 2, 2, 128);
  spec.block_tokens = 192;
  ReadFixture f(spec, 192 * 3 + 100, TestLease({.tv_tolerance = 0.03f}));
  for (const int64_t position : {100, 191, 192, 500, 675}) ASSERT_TRUE(f.Read(0, position).ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
}

TEST(ReadEngineTest, CountsSinksAndSoftCap) {
  CacheSpec spec = SmallSpec(1, 1, 3, 64);
  spec.soft_cap = 20;
  ReadFixture f(spec, 200, TestLease({.tv_tolerance = 0.03f}));
  const std::vector<float> sinks = {3.0f, -std::numeric_limits<float>::infinity(), 0.0f};
  ReadRequest request = f.Request(0, 199);
  request.sink_logits = sinks;
  ASSERT_TRUE(f.checker.Read(*f.view, request).ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
}

struct FormatCase {
  KeyFormat key;
  ValueFormat value;
  int32_t witness_bands;
  OriginalDtype dtype;
};

class ReadFormatTest : public ::testing::TestWithParam<FormatCase> {};

TEST_P(ReadFormatTest, IsCertifiedOrExactAtEveryTolerance) {
  CacheSpec spec = SmallSpec(1, 1, 3, 64);
  spec.original_dtype = GetParam().dtype;
  spec.layers[0].key_format = GetParam().key;
  spec.layers[0].value_format = GetParam().value;
  spec.layers[0].witness_bands = GetParam().witness_bands;
  if (GetParam().key == KeyFormat::kFp8E4m3) spec.layers[0].fp8_key_scale = 0.05f;
  ASSERT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
  for (const float tv_tolerance : {0.2f, 0.02f, 0.002f}) {
    ReadFixture f(spec, 64 * 6 + 17, TestLease({.tv_tolerance = tv_tolerance}));
    ASSERT_TRUE(f.ReadLast().ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      EXPECT_TRUE(certificate.outcome == Outcome::kExact ||
                  certificate.worst_case_tv <= tv_tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ReadFormatTest,
    ::testing::Values(FormatCase{KeyFormat::kK8, ValueFormat::kV4, 0, OriginalDtype::kF16},
                      FormatCase{KeyFormat::kK8, ValueFormat::kV8, 1, OriginalDtype::kBf16},
                      FormatCase{KeyFormat::kK6, ValueFormat::kV4, 1, OriginalDtype::kF16},
                      FormatCase{KeyFormat::kK4, ValueFormat::kV4, 0, OriginalDtype::kF16},
                      FormatCase{KeyFormat::kFp8E4m3, ValueFormat::kV8, 4, OriginalDtype::kF16},
                      FormatCase{KeyFormat::kF16, ValueFormat::kF16, 0, OriginalDtype::kF16},
                      FormatCase{KeyFormat::kBf16, ValueFormat::kBf16, 0, OriginalDtype::kBf16}),
    [](const auto& info) {
      std::string name = FormatPairName(info.param.key, info.param.value);
      std::replace(name.begin(), name.end(), '+', '_');
      return name;
    });

TEST(ReadEngineTest, RecertifiedNumbersMatchTheReference) {
  CacheSpec spec = SmallSpec(1, 1, 2, 64);
  spec.layers[0].key_format = KeyFormat::kK6;
  int64_t compared = 0;
  int64_t repaired = 0;
  ReadKernels kernels = KernelsOf(Backend::kCpu);
  kernels.attend = [&](const AttendArgs& args, const AttendResult& result, void* workspace) {
    CERTKV_RETURN_IF_ERROR(Attend(Backend::kCpu, args, result, workspace));
    const auto atoms = static_cast<size_t>(args.group_size) * AttendAtomCount(args);
    std::vector<float> block_lse(atoms), block_max(atoms), width(atoms);
    std::vector<float> errors(static_cast<size_t>(args.group_size) * args.tile_count);
    std::vector<float> lse(args.group_size), value_term(args.group_size), rounding(args.group_size);
    float radius = 0;
    const AttendResult expected = {nullptr,           lse.data(),      block_lse.data(),
                                   block_max.data(),  width.data(),    errors.data(),
                                   value_term.data(), rounding.data(), &radius};
    CERTKV_RETURN_IF_ERROR(Attend(Backend::kReference, args, expected, workspace));
    for (int32_t g = 0; g < args.group_size; ++g) {
      EXPECT_NEAR(result.lse_nat[g], lse[g], 2e-3);
      EXPECT_NEAR(result.value_term[g], value_term[g], 0.02 * value_term[g] + 1e-6);
    }
    for (size_t a = 0; a < atoms; ++a) {
      // The CPU's box holds the reference's, but for its own double arithmetic, and is not wide.
      EXPECT_GE(result.logit_half_width[a], width[a] * 0.999f);
      EXPECT_LE(result.logit_half_width[a], width[a] * 1.2f + 0.02f);
      ++compared;
    }
    for (int32_t i = 0; i < args.group_size * args.tile_count; ++i) {
      repaired += args.tile_sources[i] != kSourceQuantized;
    }
    return absl::OkStatus();
  };
  ReadFixture f(spec, 64 * 10 + 20, TestLease({.tv_tolerance = 0.1f}), 1.0f, kernels);
  ASSERT_TRUE(f.ReadLast().ok());
  EXPECT_THAT(f.checker.violations(), IsEmpty());
  EXPECT_GT(compared, 20);
  EXPECT_GT(repaired, 0);
}

// Which the fast finishing step leaves to the slow one is said by its metric alone.
TEST(ReadEngineTest, CountsCertificatesThatAreLeftToTheReference) {
  const CacheSpec spec = SmallSpec(1, 2, 2, 64);
  ReadFixture fast(spec, 64 * 4 + 20, TestLease(kLoose));
  ASSERT_TRUE(fast.ReadLast().ok());
  EXPECT_EQ(fast.checker.counters().slow_finishes, 0);

  ReadKernels kernels = KernelsOf(Backend::kCpu);
  kernels.finish = [](const FinishArgs& args, FinishWorkspace* workspace,
                      Certificate* certificate) {
    const absl::Status status = FinishCertificate(Backend::kCpu, args, workspace, certificate);
    certificate->left_to_reference = true;
    return status;
  };
  ReadFixture slow(spec, 64 * 4 + 20, TestLease(kLoose), 1.0f, std::move(kernels));
  ASSERT_TRUE(slow.ReadLast().ok());
  EXPECT_EQ(slow.checker.counters().slow_finishes, 4);  // two KV heads of two query heads
}

}  // namespace
}  // namespace certkv::certifier
