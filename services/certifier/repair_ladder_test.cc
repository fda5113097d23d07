#include "services/certifier/repair_ladder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ops/attend.h"

namespace certkv::certifier {
namespace {

constexpr uint8_t kOriginals = kSourceOriginalKeys | kSourceOriginalValues;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One head over tiles of one atom each, then an empty sink.
class Head {
 public:
  explicit Head(int32_t tile_count)
      : tile_count_(tile_count),
        lse_(tile_count + 1, std::log(1.0f / static_cast<float>(tile_count))),
        max_(tile_count + 1, std::log(1.0f / static_cast<float>(64 * tile_count))),
        width_(tile_count + 1, 0.001f),
        value_error_(tile_count, 0.0f),
        sources_(tile_count, 0) {
    lse_.back() = max_.back() = -kInfinity;
    width_.back() = 0;
    certificate_.value_radius = 1;
    workspace_.Reserve(tile_count, tile_count + 1);
  }

  void SetWidth(int32_t tile, float half_width) { width_[tile] = half_width; }
  void SetValueError(int32_t tile, float error) { value_error_[tile] = error; }

  Rung Climb(const Tolerances& tolerances, float worst_case_tv) {
    certificate_.worst_case_tv = worst_case_tv;
    certificate_.value_term = 0;
    for (const float error : value_error_) certificate_.value_term += error;
    certificate_.output_error_bound =
        certificate_.value_term + 2 * worst_case_tv * certificate_.value_radius;
    const LadderEvidence evidence = {.certificate = certificate_,
                                     .rounding_term = 0,
                                     .tiles = {0, tile_count_},
                                     .atoms_per_tile = 1,
                                     .atom_count = tile_count_ + 1,
                                     .lse_nat = lse_nat_,
                                     .block_lse = lse_.data(),
                                     .block_max_logit = max_.data(),
                                     .logit_half_width = width_.data(),
                                     .top_half_width = width_.data(),
                                     .tile_value_error = value_error_.data()};
    ladder_.Climb(evidence, tolerances, &workspace_, sources_.data());
    return ladder_.rung();
  }
  int64_t Count(uint8_t bits) const {
    return std::count_if(sources_.begin(), sources_.end(),
                         [bits](uint8_t source) { return (source & bits) == bits; });
  }
  const std::vector<uint8_t>& sources() const { return sources_; }
  float lse_nat_ = 0;

 private:
  int32_t tile_count_;
  std::vector<float> lse_, max_, width_, value_error_;
  std::vector<uint8_t> sources_;
  ReadCertificate certificate_;
  LadderWorkspace workspace_;
  HeadLadder ladder_;
};

TEST(RepairLadderTest, TakesTheFewestValuesThatMakeTheTermFit) {
  Head head(10);
  for (int32_t tile = 0; tile < 10; ++tile) head.SetValueError(tile, 0.01f);
  head.SetValueError(3, 0.3f);
  head.SetValueError(7, 0.2f);
  EXPECT_EQ(head.Climb({.tv_tolerance = 1, .value_tolerance = 0.09f}, 0.1f), Rung::kValues);
  EXPECT_EQ(head.sources()[3], kSourceOriginalValues);
  EXPECT_EQ(head.sources()[7], kSourceOriginalValues);
  EXPECT_EQ(head.Count(kSourceOriginalValues), 2);
  EXPECT_EQ(head.Count(kSourceOriginalKeys), 0);
}

TEST(RepairLadderTest, TakesTheKeysThatCarryTheWorstCase) {
  Head head(10);
  head.SetWidth(2, 3.0f);
  head.SetWidth(6, 4.0f);
  EXPECT_EQ(head.Climb({.tv_tolerance = 0.05f, .value_tolerance = 1}, 0.5f), Rung::kKeys);
  EXPECT_EQ(head.sources()[2], kSourceOriginalKeys);
  EXPECT_EQ(head.sources()[6], kSourceOriginalKeys);
  EXPECT_EQ(head.Count(kSourceOriginalKeys), 2);
}

TEST(RepairLadderTest, TakesBothInOnePassWhenBothMiss) {
  Head head(10);
  head.SetWidth(2, 3.0f);
  head.SetValueError(5, 1.0f);
  EXPECT_EQ(head.Climb({.tv_tolerance = 0.05f, .value_tolerance = 0.05f}, 0.5f), Rung::kKeys);
  EXPECT_EQ(head.sources()[2], kSourceOriginalKeys);
  EXPECT_EQ(head.sources()[5], kSourceOriginalValues);
}

TEST(RepairLadderTest, DoublesTheKeysWhenAPredictionFailed) {
  Head head(64);
  for (int32_t tile = 0; tile < 64; ++tile) head.SetWidth(tile, 0.2f);
  const Tolerances tolerances = {.tv_tolerance = 0.09f, .value_tolerance = 1};
  ASSERT_EQ(head.Climb(tolerances, 0.1f), Rung::kKeys);
  int64_t repaired = head.Count(kSourceOriginalKeys);
  // The kernel says again that it misses, as if the repair had done nothing.
  for (int32_t round = 1; round < kRepairRoundsMax; ++round) {
    ASSERT_EQ(head.Climb(tolerances, 0.1f), Rung::kKeys);
    EXPECT_GE(head.Count(kSourceOriginalKeys), std::min<int64_t>(64, 2 * repaired));
    repaired = head.Count(kSourceOriginalKeys);
    if (repaired == 64) break;
  }
  EXPECT_EQ(head.Climb(tolerances, 0.1f), Rung::kHead);
  EXPECT_EQ(head.Count(kOriginals), 64);
}

TEST(RepairLadderTest, EndsWhateverTheEvidenceSays) {
  const float bad_numbers[] = {0.0f, 1.0f, kInfinity, std::numeric_limits<float>::quiet_NaN()};
  for (const float width : bad_numbers) {
    for (const float error : bad_numbers) {
      for (const float tv : bad_numbers) {
        for (const float lse : {0.0f, kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
          for (const float output_tolerance : {0.0f, 0.1f}) {
            Head head(5);
            head.lse_nat_ = lse;
            head.SetWidth(1, width);
            head.SetValueError(2, error);
            const Tolerances tolerances = {0.01f, 0.01f, output_tolerance};
            int32_t climbs = 0;
            while (head.Count(kOriginals) < 5 && climbs < 20) {
              const int64_t before =
                  head.Count(kSourceOriginalKeys) + head.Count(kSourceOriginalValues);
              head.Climb(tolerances, tv);
              EXPECT_GT(head.Count(kSourceOriginalKeys) + head.Count(kSourceOriginalValues),
                        before);
              ++climbs;
            }
            EXPECT_LE(climbs, 2 * kRepairRoundsMax + 1);
          }
        }
      }
    }
  }
}

TEST(RepairLadderTest, GoesToTheHeadWhenNoCertificateIsSmallEnough) {
  Head head(5);
  EXPECT_EQ(head.Climb({.tv_tolerance = 1e-6f, .value_tolerance = 1}, 0.1f), Rung::kHead);
}

TEST(RepairLadderTest, SplitsAnOutputToleranceBetweenValuesAndKeys) {
  // The key term alone is above the tolerance: both have to come down.
  Head head(10);
  head.SetWidth(2, 2.0f);
  for (int32_t tile = 0; tile < 10; ++tile) head.SetValueError(tile, 0.02f);
  const Tolerances tolerances = {.tv_tolerance = 1, .value_tolerance = 1, .output_tolerance = 0.2f};
  EXPECT_EQ(head.Climb(tolerances, 0.3f), Rung::kKeys);
  EXPECT_EQ(head.sources()[2] & kSourceOriginalKeys, kSourceOriginalKeys);
  // The key term takes little: values alone.
  Head values(10);
  for (int32_t tile = 0; tile < 10; ++tile) values.SetValueError(tile, 0.04f);
  EXPECT_EQ(values.Climb(tolerances, 0.02f), Rung::kValues);
  EXPECT_EQ(values.Count(kSourceOriginalKeys), 0);
}

}  // namespace
}  // namespace certkv::certifier
