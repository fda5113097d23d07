// The launches of kernels/cuda themselves, as a decode path makes them: several reads at once,
// split in several ways, under several schedules. Executed on CPU threads, where host memory is
// device memory.
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/finish.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/on_cpu/block_runner.h"
#include "kernels/cuda/seal.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

using ::testing::ElementsAreArray;

constexpr uint64_t kSeed = 37;

// One read of a launch, with everything that it points to.
class DeviceRead {
 public:
  DeviceRead(const SequenceShape& shape, uint64_t seed, int32_t block_target)
      : sequence_(shape, seed, Backend::kReference),
        result_(sequence_.args()),
        scratch_(cuda::ScratchBytes(sequence_.args(), block_target) / sizeof(float),
                 std::numeric_limits<float>::quiet_NaN()),
        read_(cuda::PlanRead(sequence_.args(), result_.view(), block_target, scratch_.data())) {}
  DeviceRead(const DeviceRead&) = delete;
  DeviceRead& operator=(const DeviceRead&) = delete;

  const cuda::AttendRead& read() const { return read_; }
  const ReadResult& result() const { return result_; }

 private:
  SequenceCase sequence_;
  ReadResult result_;
  std::vector<float> scratch_;
  cuda::AttendRead read_;
};

using DeviceReads = std::vector<std::unique_ptr<DeviceRead>>;

void Launch(const DeviceReads& all) {
  std::vector<cuda::AttendRead> reads;
  for (const auto& read : all) reads.push_back(read->read());
  const auto count = static_cast<int32_t>(reads.size());
  ASSERT_EQ(cuda::LaunchAttend(cuda::PlanLaunch(reads.data(), count), reads.data(), nullptr), 0);
}

// Sequences of one cache at different lengths: a tail alone, ranges, originals, many tiles.
std::vector<SequenceShape> ShapesOfABatch() {
  SequenceShape shape = ShapeOfFormat("K8V4w1");
  shape.group_size = 5;
  std::vector<SequenceShape> shapes(4, shape);
  shapes[0].tile_count = 0;
  shapes[1].tile_count = 4;
  shapes[1].token_begin = 90;
  shapes[2].tile_count = 3;
  shapes[2].has_sources = true;
  shapes[2].has_sink = true;
  shapes[3].tile_count = 11;
  shapes[3].tail_count = 130;
  return shapes;
}

void RunAlone(const AttendArgs& args, const ReadResult& result) {
  std::vector<float> scratch(cuda::ScratchBytes(args, 2) / sizeof(float));
  const cuda::AttendRead read = cuda::PlanRead(args, result.view(), 2, scratch.data());
  ASSERT_EQ(cuda::LaunchAttend(cuda::PlanLaunch(&read, 1), &read, nullptr), 0);
}

void ExpectSameBits(const ReadResult& seen, const ReadResult& expected, int group_size) {
  for (int g = 0; g < group_size; ++g) {
    EXPECT_THAT(seen.output(g), ElementsAreArray(expected.output(g)));
    EXPECT_THAT(seen.block_lse(g), ElementsAreArray(expected.block_lse(g)));
    EXPECT_THAT(seen.block_max_logit(g), ElementsAreArray(expected.block_max_logit(g)));
    EXPECT_THAT(seen.half_width(g), ElementsAreArray(expected.half_width(g)));
    EXPECT_THAT(seen.tile_value_error(g), ElementsAreArray(expected.tile_value_error(g)));
    EXPECT_EQ(seen.view().lse_nat[g], expected.view().lse_nat[g]);
    EXPECT_EQ(seen.view().value_term[g], expected.view().value_term[g]);
    EXPECT_EQ(seen.view().rounding_term[g], expected.view().rounding_term[g]);
  }
  EXPECT_EQ(seen.view().value_radius[0], expected.view().value_radius[0]);
}

DeviceReads MakeReads(const std::vector<SequenceShape>& shapes, int32_t block_target) {
  DeviceReads reads;
  for (size_t n = 0; n < shapes.size(); ++n) {
    reads.push_back(std::make_unique<DeviceRead>(shapes[n], kSeed + n, block_target));
  }
  return reads;
}

TEST(CudaLaunchTest, ReadsOfOneLaunchAreAsReadsAlone) {
  const std::vector<SequenceShape> shapes = ShapesOfABatch();
  const DeviceReads together = MakeReads(shapes, 3);
  const DeviceReads alone = MakeReads(shapes, 3);
  ASSERT_NO_FATAL_FAILURE(Launch(together));
  for (size_t n = 0; n < shapes.size(); ++n) {
    SCOPED_TRACE(n);
    const cuda::AttendRead read = alone[n]->read();
    ASSERT_EQ(cuda::LaunchAttend(cuda::PlanLaunch(&read, 1), &read, nullptr), 0);
    ExpectSameBits(together[n]->result(), alone[n]->result(), shapes[n].group_size);
  }
}

TEST(CudaLaunchTest, NoScheduleChangesABit) {
  const std::vector<SequenceShape> shapes = ShapesOfABatch();
  const DeviceReads expected = MakeReads(shapes, 3);
  ASSERT_NO_FATAL_FAILURE(Launch(expected));
  for (const uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    cuda_on_cpu::SetScheduleSeed(seed);
    const DeviceReads seen = MakeReads(shapes, 3);
    ASSERT_NO_FATAL_FAILURE(Launch(seen));
    for (size_t n = 0; n < shapes.size(); ++n) {
      ExpectSameBits(seen[n]->result(), expected[n]->result(), shapes[n].group_size);
    }
  }
  cuda_on_cpu::SetScheduleSeed(0);
}

TEST(CudaLaunchTest, SplitsChangeSumsByTheirRoundingOnly) {
  const std::vector<SequenceShape> shapes = ShapesOfABatch();
  const DeviceReads whole = MakeReads(shapes, 1);
  ASSERT_NO_FATAL_FAILURE(Launch(whole));
  for (const int32_t block_target : {2, 5, 1000}) {
    SCOPED_TRACE(block_target);
    const DeviceReads split = MakeReads(shapes, block_target);
    ASSERT_NO_FATAL_FAILURE(Launch(split));
    for (size_t n = 0; n < shapes.size(); ++n) {
      const ReadResult& seen = split[n]->result();
      const ReadResult& expected = whole[n]->result();
      for (int g = 0; g < shapes[n].group_size; ++g) {
        // An atom lies in one split and has a reference of its own.
        EXPECT_THAT(seen.block_lse(g), ElementsAreArray(expected.block_lse(g)));
        EXPECT_THAT(seen.half_width(g), ElementsAreArray(expected.half_width(g)));
        double square = 0;
        for (int i = 0; i < shapes[n].value_dim; ++i) {
          const double difference = double{seen.output(g)[i]} - expected.output(g)[i];
          square += difference * difference;
        }
        EXPECT_LE(std::sqrt(square),
                  double{seen.view().rounding_term[g]} + expected.view().rounding_term[g]);
      }
    }
  }
}

void ExpectSameCertificates(const std::vector<Certificate>& seen,
                            const std::vector<Certificate>& expected) {
  ASSERT_EQ(seen.size(), expected.size());
  for (size_t n = 0; n < seen.size(); ++n) {
    EXPECT_EQ(seen[n].worst_case_tv, expected[n].worst_case_tv);
    EXPECT_EQ(seen[n].output_error_bound, expected[n].output_error_bound);
    EXPECT_EQ(seen[n].value_term, expected[n].value_term);
    EXPECT_EQ(seen[n].value_radius, expected[n].value_radius);
  }
}

// All heads of four reads in one launch, each read with heads of different tolerances.
TEST(CudaLaunchTest, HeadsOfOneLaunchAreFinishedAsReadsAlone) {
  const std::vector<SequenceShape> shapes = ShapesOfABatch();
  const DeviceReads reads = MakeReads(shapes, 3);
  ASSERT_NO_FATAL_FAILURE(Launch(reads));
  const std::vector<float> tolerances = {0.0f, 0.01f, 0.1f, 0.5f, 1.0f};
  const auto group_size = static_cast<size_t>(shapes[0].group_size);
  std::vector<std::vector<Certificate>> together(shapes.size());
  std::vector<cuda::FinishRead> finishes;
  for (size_t n = 0; n < shapes.size(); ++n) {
    together[n].resize(group_size);
    finishes.push_back(cuda::PlanFinish(reads[n]->read(), tolerances.data(), together[n].data()));
  }
  const auto count = static_cast<int32_t>(finishes.size());
  ASSERT_EQ(
      cuda::LaunchFinish(cuda::PlanFinishLaunch(finishes.data(), count), finishes.data(), nullptr),
      0);
  for (const uint64_t seed : {0, 1, 2}) {
    cuda_on_cpu::SetScheduleSeed(seed);
    for (size_t n = 0; n < shapes.size(); ++n) {
      SCOPED_TRACE(n);
      std::vector<Certificate> alone(group_size);
      const cuda::FinishRead finish =
          cuda::PlanFinish(reads[n]->read(), tolerances.data(), alone.data());
      ASSERT_EQ(cuda::LaunchFinish(cuda::PlanFinishLaunch(&finish, 1), &finish, nullptr), 0);
      ExpectSameCertificates(together[n], alone);
      EXPECT_GT(alone[0].worst_case_tv, 0.0f);
      EXPECT_LT(alone[0].worst_case_tv, 0.5f);
    }
  }
  cuda_on_cpu::SetScheduleSeed(0);
}

// The originals of a repaired read lie elsewhere, in no order; gathered, they are read as ever.
TEST(CudaLaunchTest, GatheredOriginalsAreReadAsWhereTheyLay) {
  SequenceShape shape = ShapeOfFormat("K8V4");
  shape.tile_count = 3;
  const SequenceCase sequence(shape, kSeed, Backend::kReference);
  const int64_t key_bytes = int64_t{2} * kTileTokens * shape.head_dim;
  const int64_t value_bytes = int64_t{2} * kTileTokens * shape.value_dim;
  const AlignedBytes elsewhere = AllocateAligned(3 * (key_bytes + value_bytes));
  const AlignedBytes staging = AllocateAligned(3 * (key_bytes + value_bytes));
  std::vector<cuda::OriginalCopy> copies;
  std::vector<AttendTile> tiles(sequence.args().tiles, sequence.args().tiles + 3);
  uint8_t* to = staging.get();
  for (int t = 0; t < 3; ++t) {
    uint8_t* const from = elsewhere.get() + (2 - t) * (key_bytes + value_bytes);
    std::memcpy(from, tiles[t].original_keys, key_bytes);
    std::memcpy(from + key_bytes, tiles[t].original_values, value_bytes);
    copies.push_back({from, to, key_bytes});
    copies.push_back({from + key_bytes, to + key_bytes, value_bytes});
    tiles[t].original_keys = reinterpret_cast<const uint16_t*>(to);
    tiles[t].original_values = reinterpret_cast<const uint16_t*>(to + key_bytes);
    to += key_bytes + value_bytes;
  }
  ASSERT_TRUE(cuda::CheckOriginalCopies(copies).ok());
  ASSERT_EQ(cuda::LaunchGather(copies.data(), static_cast<int32_t>(copies.size()), nullptr), 0);
  const std::vector<uint8_t> sources(shape.group_size * 3,
                                     kSourceOriginalKeys | kSourceOriginalValues);
  AttendArgs args = sequence.args();
  args.tile_sources = sources.data();
  ReadResult expected(args);
  ASSERT_NO_FATAL_FAILURE(RunAlone(args, expected));
  args.tiles = tiles.data();
  ReadResult seen(args);
  ASSERT_NO_FATAL_FAILURE(RunAlone(args, seen));
  ExpectSameBits(seen, expected, shape.group_size);
  EXPECT_EQ(seen.view().value_term[0], 0.0f);
}

TEST(CudaLaunchTest, CopiesThatTheKernelCannotDoAreRefused) {
  const AlignedBytes bytes = AllocateAligned(256);
  uint8_t* const base = bytes.get();
  const cuda::OriginalCopy good{base, base + 128, 64};
  for (const cuda::OriginalCopy& bad :
       {cuda::OriginalCopy{nullptr, base + 128, 64}, cuda::OriginalCopy{base, nullptr, 64},
        cuda::OriginalCopy{base + 2, base + 128, 64}, cuda::OriginalCopy{base, base + 136, 64},
        cuda::OriginalCopy{base, base + 128, 0}, cuda::OriginalCopy{base, base + 128, 24}}) {
    const std::vector<cuda::OriginalCopy> copies = {good, bad};
    const absl::Status status = cuda::CheckOriginalCopies(copies);
    EXPECT_EQ(ReasonOf(status), "ATTEND_ARGS_INVALID");
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("copy 1"));
  }
}

// Four tiles in one launch; records that touch each other, so that what is written beside one shows
// in another.
TEST(CudaLaunchTest, TilesOfOneLaunchAreSealedAsTilesAlone) {
  for (const char* format : {"K8V4", "K6V8w4", "FP8V4w4", "K6V4w1c"}) {
    SCOPED_TRACE(format);
    SequenceShape shape = ShapeOfFormat(format);
    shape.tile_count = 4;
    shape.head_dim = 80;
    shape.value_dim = 96;
    SequenceCase expected(shape, kSeed, Backend::kReference);
    const TileLayout& layout = expected.layout();
    const AlignedBytes records = AllocateAligned(4 * layout.tile_bytes());
    std::memset(records.get(), 0xff, 4 * layout.tile_bytes());
    std::vector<cuda::SealTile> tiles;
    for (int t = 0; t < 4; ++t) {
      const AttendTile& originals = expected.args().tiles[t];
      uint8_t* const scan = records.get() + (3 - t) * layout.tile_bytes();
      tiles.push_back({originals.original_keys, originals.original_values,
                       WitnessWeightsOf(expected.spec(), 0, 0), layout.head_dim, layout.value_dim,
                       7, scan, scan + layout.scan_bytes});
    }
    const cuda::SealFormat seal{layout, expected.spec().original_dtype,
                                expected.spec().layers[0].fp8_key_scale};
    ASSERT_EQ(cuda::LaunchSeal(seal, tiles.data(), 4, nullptr), 0);
    for (int t = 0; t < 4; ++t) {
      const uint8_t* const scan = tiles[t].scan;
      EXPECT_EQ(std::memcmp(scan + layout.scale_offset, expected.scan(t) + layout.scale_offset,
                            layout.witness_offset - layout.scale_offset),
                0);
      EXPECT_EQ(std::memcmp(scan + layout.coarse_offset, expected.scan(t) + layout.coarse_offset,
                            layout.scan_bytes - layout.coarse_offset),
                0);
      EXPECT_EQ(std::memcmp(tiles[t].detail, expected.detail(t), layout.detail_bytes), 0);
    }
  }
}

}  // namespace
}  // namespace certkv::conformance
