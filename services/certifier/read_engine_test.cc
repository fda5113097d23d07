#include "services/certifier/read_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/core/status.h"
#include "services/certifier/fake_cache.h"
#include "services/certifier/read_checker.h"

namespace certkv {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

constexpr uint64_t kSeed = 20260301;

// A fake cache with a checker and a view.
class Fixture {
 public:
  Fixture(const CacheSpec& spec, int64_t token_count, const PolicyLease& policy,
          float key_scale = 1.0f)
      : random(kSeed), fake(spec, 64), checker(&fake, KernelsOf(Backend::kCpu)), book(16) {
    fake.Put(RandomSequence(spec, token_count, key_scale, &random));
    view = fake.OpenView(policy, &book);
    queries = RandomQueries(spec, 1.0f, &random);
  }

  ReadRequest Request(int32_t layer, int64_t position) {
    ReadRequest request;
    request.layer = layer;
    request.query_position = position;
    request.queries = queries;
    return request;
  }
  absl::Status Read(int32_t layer, int64_t position) {
    return checker.Read(*view, Request(layer, position));
  }

  std::mt19937_64 random;
  FakeCache fake;
  ReadChecker checker;
  BudgetBook book;
  std::shared_ptr<View> view;
  std::vector<float> queries;
};

TEST(ReadEngineTest, CertifiesEveryHeadOfAK8Read) {
  Fixture f(SmallSpec(2, 2, 3, 64), 400,
            TestLease({.tv_tolerance = 0.2f, .value_tolerance = 0.2f}));
  for (int32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(f.Read(layer, 399).ok());
    EXPECT_THAT(f.checker.violations(), IsEmpty());
    for (const ReadCertificate& certificate : f.checker.certificates()) {
      EXPECT_EQ(certificate.outcome, Outcome::kCertified);
      EXPECT_EQ(certificate.rung, Rung::kNone);
      EXPECT_EQ(certificate.repair_bytes, 0);
      EXPECT_LT(certificate.worst_case_tv, 0.2f);
      EXPECT_GT(certificate.worst_case_tv, 0.0f);
      EXPECT_EQ(certificate.first_worst_case_tv, certificate.worst_case_tv);
    }
  }
}

}  // namespace
}  // namespace certkv
