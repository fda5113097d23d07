// A hundred thousand flipped bits: a read gives the output of before the flip, bit by bit, or an
// error. With verify_every_read, since the reads before have seen the blocks whole.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/core/status.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/read_fixture.h"

namespace certkv::certifier {
namespace {

constexpr int kFlips = 50'000;  // of each test

class ReadFlipTest : public testing::Test {
 protected:
  ReadFlipTest() {
    kernels_.verify_every_read = true;
    engine_ = std::make_unique<ReadEngine>(kernels_, &counters_);
  }

  // The outputs of one read, or its error.
  absl::StatusOr<std::vector<float>> Read(const View& view) {
    const ReadRequest request = f_.Request(0, f_.fake.data().token_count - 1);
    CERTKV_ASSIGN_OR_RETURN(const ReadPlan plan, PlanRead(view, request, 0));
    const CacheSpec& spec = f_.fake.spec();
    std::vector<ReadCertificate> certificates(spec.query_head_count());
    std::vector<float> outputs(int64_t{spec.query_head_count()} * spec.value_dim);
    CERTKV_RETURN_IF_ERROR(
        engine_->Read(plan, &workspace_, {absl::MakeSpan(certificates), absl::MakeSpan(outputs)}));
    return outputs;
  }
  static bool IsSame(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  ReadFixture f_{SmallSpec(1, 1, 2, 64), 64 * 2,
                 TestLease({.tv_tolerance = 0.2f, .value_tolerance = 0.5f})};
  ReadKernels kernels_ = KernelsOf(Backend::kCpu);
  CertifierCounters counters_;
  std::unique_ptr<ReadEngine> engine_;
  ReadWorkspace workspace_;
  std::mt19937 random_{20260301};
};

TEST_F(ReadFlipTest, NoFlipOfAQuantizedBitChangesAnOutput) {
  const TileLayout layout = MakeTileLayout(f_.fake.spec(), 0);
  const auto clean = Read(*f_.view);
  ASSERT_TRUE(clean.ok()) << clean.status();
  int errors = 0;
  for (int i = 0; i < kFlips; ++i) {
    const auto block = static_cast<int32_t>(random_() % 2);
    // Half of the flips hit the header and the small planes before the keys.
    const int64_t range = i % 2 == 0 ? layout.coarse_offset : layout.tile_bytes();
    const int64_t at = static_cast<int64_t>(random_() % range);
    uint8_t* byte = at < layout.scan_bytes
                        ? f_.fake.scan(block, 0, 0, 0) + at
                        : f_.fake.detail(block, 0, 0, 0) + at - layout.scan_bytes;
    const auto bit = static_cast<uint8_t>(1 << random_() % 8);
    *byte ^= bit;
    const auto read = Read(*f_.view);
    *byte ^= bit;
    if (read.ok()) {
      ASSERT_TRUE(IsSame(*read, *clean)) << "flip " << i << " at byte " << at;
    } else {
      ++errors;
      ASSERT_TRUE(absl::IsDataLoss(read.status())) << read.status();
    }
  }
  EXPECT_EQ(errors, kFlips) << "every byte of a tile is covered by a checksum";
}

TEST_F(ReadFlipTest, NoFlipOfAnOriginalBitChangesAnExactOutput) {
  const auto exact = f_.fake.OpenView(TestLease({}, ReadMode::kExact), &f_.book);
  const auto clean = Read(*exact);
  ASSERT_TRUE(clean.ok()) << clean.status();
  const int64_t words = int64_t{f_.fake.spec().block_tokens} * 64;
  for (int i = 0; i < kFlips; ++i) {
    const auto block = static_cast<int32_t>(random_() % 2);
    uint16_t* word =
        (i % 2 == 0 ? f_.fake.original_keys(block, 0, 0) : f_.fake.original_values(block, 0, 0)) +
        random_() % words;
    const auto bit = static_cast<uint16_t>(1 << random_() % 16);
    *word ^= bit;
    const auto read = Read(*exact);
    const auto certified = i % 100 == 0 ? Read(*f_.view) : absl::StatusOr<std::vector<float>>();
    *word ^= bit;
    ASSERT_EQ(ReasonOf(read.status()), "ORIGINAL_CHECKSUM_MISMATCH") << read.status();
    if (i % 100 == 0) {
      ASSERT_TRUE(certified.ok()) << "it needs no original";
    }
  }
}

TEST_F(ReadFlipTest, WithoutTheOptionALaterFlipWaitsForTheStoresScrub) {
  ReadKernels once = KernelsOf(Backend::kCpu);
  engine_ = std::make_unique<ReadEngine>(once, &counters_);
  ASSERT_TRUE(Read(*f_.view).ok());
  f_.fake.detail(0, 0, 0, 0)[5] ^= 1;
  EXPECT_TRUE(Read(*f_.view).ok()) << "verified once per generation: docs/architecture.md says so";
  engine_ = std::make_unique<ReadEngine>(kernels_, &counters_);
  EXPECT_EQ(ReasonOf(Read(*f_.view).status()), "DETAIL_CHECKSUM");
}

}  // namespace
}  // namespace certkv::certifier
