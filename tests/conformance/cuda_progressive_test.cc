// Launches of progressive reads as a decode path makes them: several reads and their certificates
// at once, in several splits and schedules, and captured into a graph. Executed on CPU threads,
// where host memory is device memory.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/on_cpu/block_runner.h"
#include "kernels/cuda/progressive.h"
#include "kernels/cuda/runtime.h"
#include "tests/conformance/progressive_tally.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

constexpr uint64_t kSeed = 53;
constexpr float kSkipTolerance = 0.2f;
constexpr float kTvTolerance = 0.3f;

// One read of a launch, with everything that it points to.
class DeviceRead {
 public:
  DeviceRead(const SequenceShape& shape, uint64_t seed, int32_t block_target)
      : sequence_(shape, seed, Backend::kReference),
        result_(sequence_.args(), kSkipTolerance),
        scratch_(cuda::ProgressiveScratchBytes(sequence_.args(), block_target) / sizeof(double) + 1,
                 std::numeric_limits<double>::quiet_NaN()),
        tolerance_(shape.group_size, kTvTolerance),
        certificates_(shape.group_size),
        read_(cuda::PlanProgressive(*result_.mutable_args(), result_.view(), block_target,
                                    scratch_.data())),
        finish_(cuda::PlanProgressiveFinish(read_, tolerance_.data(), certificates_.data())) {}
  DeviceRead(const DeviceRead&) = delete;
  DeviceRead& operator=(const DeviceRead&) = delete;

  const cuda::ProgressiveRead& read() const { return read_; }
  const cuda::FinishRead& finish() const { return finish_; }
  const ProgressiveRead& result() const { return result_; }
  const Certificate& certificate(int g) const { return certificates_[g]; }
  const SequenceCase& sequence() const { return sequence_; }

 private:
  SequenceCase sequence_;
  ProgressiveRead result_;
  std::vector<double> scratch_;
  std::vector<float> tolerance_;
  std::vector<Certificate> certificates_;
  cuda::ProgressiveRead read_;
  cuda::FinishRead finish_;
};

using DeviceReads = std::vector<std::unique_ptr<DeviceRead>>;

// Lengths, ranges and contents of one cache.
std::vector<SequenceShape> ShapesOfABatch() {
  SequenceShape shape = ShapeOfFormat("K8V4w1");
  shape.group_size = 5;
  shape.tile_count = 12;
  std::vector<SequenceShape> shapes(4, shape);
  shapes[0].content = Content::kNeedle;
  shapes[1].tile_count = 0;
  shapes[1].tail_count = 130;
  shapes[2].token_begin = 90;
  shapes[2].has_sink = true;
  shapes[3].tile_count = 19;
  shapes[3].tail_count = 0;
  return shapes;
}

DeviceReads MakeReads(const std::vector<SequenceShape>& shapes, int32_t block_target) {
  DeviceReads reads;
  for (size_t n = 0; n < shapes.size(); ++n) {
    reads.push_back(std::make_unique<DeviceRead>(shapes[n], kSeed + n, block_target));
  }
  return reads;
}

// All reads and their certificates on the stream. The records must live until they are done.
struct Launch {
  explicit Launch(const DeviceReads& all) {
    for (const auto& read : all) {
      reads.push_back(read->read());
      finishes.push_back(read->finish());
    }
  }
  int Run(CUstream_st* stream) const {
    const auto count = static_cast<int32_t>(reads.size());
    const int error = cuda::LaunchProgressive(cuda::PlanProgressiveLaunch(reads.data(), count),
                                              reads.data(), stream);
    if (error != 0) return error;
    return cuda::LaunchFinish(cuda::PlanFinishLaunch(finishes.data(), count), finishes.data(),
                              stream);
  }
  std::vector<cuda::ProgressiveRead> reads;
  std::vector<cuda::FinishRead> finishes;
};

void ExpectSame(const DeviceRead& seen, const DeviceRead& expected) {
  const AttendArgs& args = seen.sequence().args();
  const int64_t atoms = ProgressiveAtomsMax(args);
  for (int g = 0; g < args.group_size; ++g) {
    EXPECT_THAT(seen.result().output(g), testing::ElementsAreArray(expected.result().output(g)));
    EXPECT_EQ(seen.result().view().skipped_lse_nat[g], expected.result().view().skipped_lse_nat[g]);
    EXPECT_EQ(seen.certificate(g).worst_case_tv, expected.certificate(g).worst_case_tv);
    EXPECT_EQ(seen.certificate(g).output_error_bound, expected.certificate(g).output_error_bound);
    for (int32_t t = 0; t < args.tile_count; ++t) {
      EXPECT_EQ(seen.result().view().sub_blocks_read[g * args.tile_count + t],
                expected.result().view().sub_blocks_read[g * args.tile_count + t]);
    }
    for (int32_t a = 0; a < seen.result().view().atom_count[g]; ++a) {
      EXPECT_EQ(seen.result().view().block_lse[g * atoms + a],
                expected.result().view().block_lse[g * atoms + a]);
    }
  }
}

TEST(CudaProgressiveTest, ReadsOfOneLaunchAreAsReadsAloneUnderEverySchedule) {
  const std::vector<SequenceShape> shapes = ShapesOfABatch();
  const DeviceReads together = MakeReads(shapes, 3);
  ASSERT_EQ(Launch(together).Run(nullptr), 0);
  for (const uint64_t seed : {0, 1, 2}) {
    cuda_on_cpu::SetScheduleSeed(seed);
    for (size_t n = 0; n < shapes.size(); ++n) {
      SCOPED_TRACE(n);
      DeviceReads alone;
      alone.push_back(std::make_unique<DeviceRead>(shapes[n], kSeed + n, 3));
      ASSERT_EQ(Launch(alone).Run(nullptr), 0);
      ExpectSame(*together[n], *alone[0]);
    }
  }
  cuda_on_cpu::SetScheduleSeed(0);
}

TEST(CudaProgressiveTest, CertificatesOfEverySplitCoverTheTruth) {
  for (const int32_t block_target : {1, 2, 7, 1000}) {
    SCOPED_TRACE(block_target);
    const DeviceReads reads = MakeReads(ShapesOfABatch(), block_target);
    ASSERT_EQ(Launch(reads).Run(nullptr), 0);
    ProgressiveTally tally;
    for (const auto& read : reads) {
      const SequenceCase& sequence = read->sequence();
      AddProgressiveRead(Backend::kReference, read->result(), OriginalRows(sequence),
                         ServedRows(sequence, sequence.args(), 0), &tally);
      for (int g = 0; g < sequence.args().group_size; ++g) {
        // Of the device, beside the reference's of the same atoms.
        const Certificate expected = read->result().Finish(Backend::kReference, g);
        EXPECT_GE(read->certificate(g).worst_case_tv, expected.skipped_share);
        EXPECT_LE(read->certificate(g).skipped_share, kSkipTolerance * (1 + 1e-4));
      }
    }
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    EXPECT_LT(tally.ShareRead(), 0.95) << tally.Summary();
  }
}

TEST(CudaProgressiveTest, CapturedReadChoosesAnewWhenItIsReplayed) {
  const std::vector<SequenceShape> shapes = {ShapesOfABatch()[0]};
  const DeviceReads captured = MakeReads(shapes, 3);
  const Launch launch(captured);
  absl::StatusOr<cuda::Stream> stream = cuda::Stream::Create();
  ASSERT_TRUE(stream.ok()) << stream.status();
  absl::StatusOr<cuda::Graph> graph =
      cuda::Graph::Capture(*stream, [&launch](CUstream_st* own) { return launch.Run(own); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  // The queries are the sequence's own memory; turned round, they look elsewhere.
  const AttendArgs& args = captured[0]->sequence().args();
  auto* const queries = const_cast<float*>(args.queries);
  std::vector<std::vector<uint8_t>> masks;
  for (const float factor : {1.0f, -1.0f}) {
    for (int n = 0; n < args.group_size * args.layout->head_dim; ++n) queries[n] *= factor;
    ASSERT_EQ(graph->Launch(stream->get()), 0);
    const uint8_t* const mask = captured[0]->result().view().sub_blocks_read;
    masks.emplace_back(mask, mask + args.group_size * args.tile_count);
    const DeviceReads alone = MakeReads(shapes, 3);
    auto* const own = const_cast<float*>(alone[0]->sequence().args().queries);
    std::copy_n(queries, args.group_size * args.layout->head_dim, own);
    ASSERT_EQ(Launch(alone).Run(nullptr), 0);
    ExpectSame(*captured[0], *alone[0]);
  }
  EXPECT_NE(masks[0], masks[1]);
}

}  // namespace
}  // namespace certkv::conformance
