// What a decode path does with the launches of kernels/cuda: its own stream, its own 16-bit
// queries, launches captured once and replayed. Runs on CPU threads and, where there is one, on a
// GPU.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/cuda/copied_read.h"
#include "kernels/cuda/finish.h"
#include "kernels/cuda/runtime.h"
#include "tests/conformance/path.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

using ::testing::ElementsAreArray;

constexpr uint64_t kSeed = 61;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class CudaStreamTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

cuda::Launches LaunchesOf(const cuda::CopiedRead& copied) {
  return [&copied](CUstream_st* stream) {
    return cuda::LaunchAttend(cuda::PlanLaunch(&copied.read(), 1), copied.device_read(), stream);
  };
}

// The read on a stream of its own.
void RunOnStream(const AttendArgs& args, const cuda::QueryRows& queries, ReadResult* result) {
  absl::StatusOr<cuda::Stream> stream = cuda::Stream::Create();
  ASSERT_TRUE(stream.ok()) << stream.status();
  absl::StatusOr<cuda::CopiedRead> copied =
      cuda::CopiedRead::Make(args, result->view(), {.queries = queries});
  ASSERT_TRUE(copied.ok()) << copied.status();
  ASSERT_EQ(LaunchesOf(*copied)(stream->get()), 0);
  ASSERT_TRUE(stream->Synchronize().ok());
  const absl::Status status = copied->ReadBack();
  ASSERT_TRUE(status.ok()) << status;
}

void ExpectSameBits(const ReadResult& seen, const ReadResult& expected, int g) {
  EXPECT_THAT(seen.output(g), ElementsAreArray(expected.output(g)));
  EXPECT_THAT(seen.block_lse(g), ElementsAreArray(expected.block_lse(g)));
  EXPECT_THAT(seen.block_max_logit(g), ElementsAreArray(expected.block_max_logit(g)));
  EXPECT_THAT(seen.half_width(g), ElementsAreArray(expected.half_width(g)));
  EXPECT_THAT(seen.top_half_width(g), ElementsAreArray(expected.top_half_width(g)));
  EXPECT_THAT(seen.tile_value_error(g), ElementsAreArray(expected.tile_value_error(g)));
  EXPECT_EQ(seen.view().lse_nat[g], expected.view().lse_nat[g]);
  EXPECT_EQ(seen.view().value_term[g], expected.view().value_term[g]);
  EXPECT_EQ(seen.view().rounding_term[g], expected.view().rounding_term[g]);
  EXPECT_EQ(seen.view().value_radius[0], expected.view().value_radius[0]);
}

// Queries of a case in 16 bits, and what they are as floats.
struct HalfQueries {
  HalfQueries(const AttendArgs& args, OriginalDtype dtype) {
    for (int n = 0; n < args.group_size * args.layout->head_dim; ++n) {
      bits.push_back(FloatToOriginal(dtype, args.queries[n]));
      // Beyond the range of fp16: its largest number.
      if (std::isinf(OriginalToFloat(dtype, bits.back()))) --bits.back();
      widened.push_back(OriginalToFloat(dtype, bits.back()));
    }
  }
  std::vector<uint16_t> bits;
  std::vector<float> widened;
};

TEST_P(CudaStreamTest, QueriesOf16BitsAreReadAsTheFloatsThatTheyAre) {
  for (const OriginalDtype dtype : {OriginalDtype::kF16, OriginalDtype::kBf16}) {
    for (const NamedShape& named : ShapesOf(Backend::kCuda, AllShapes())) {
      SCOPED_TRACE(named.name);
      SequenceCase sequence(named.shape, kSeed, Backend::kReference);
      const HalfQueries queries(sequence.args(), dtype);
      AttendArgs args = sequence.args();
      args.queries = nullptr;
      ReadResult seen(args);
      ASSERT_NO_FATAL_FAILURE(RunOnStream(args, {queries.bits.data(), dtype}, &seen));
      args.queries = queries.widened.data();
      ReadResult expected(args);
      ASSERT_NO_FATAL_FAILURE(RunOnStream(args, {}, &expected));
      for (int g = 0; g < args.group_size; ++g) ExpectSameBits(seen, expected, g);
    }
  }
}

// Nobody on the host has looked at an engine's queries.
TEST_P(CudaStreamTest, HeadWhoseQueryIsNotFiniteIsUnknownAndAloneIn) {
  for (const char* format : {"K8V4", "K6V8w4", "FP8V4w4"}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity}) {
      SCOPED_TRACE(testing::Message() << format << " with " << bad);
      const SequenceShape shape = ShapeOfFormat(format);
      const SequenceCase sequence(shape, kSeed, Backend::kReference);
      const AttendArgs& args = sequence.args();
      HalfQueries queries(args, OriginalDtype::kBf16);
      ReadResult expected(args);
      ASSERT_NO_FATAL_FAILURE(
          RunOnStream(args, {queries.bits.data(), OriginalDtype::kBf16}, &expected));
      queries.bits[shape.head_dim + 5] = FloatToBf16(bad);
      ReadResult seen(args);
      ASSERT_NO_FATAL_FAILURE(
          RunOnStream(args, {queries.bits.data(), OriginalDtype::kBf16}, &seen));
      for (const int g : {0, 2}) ExpectSameBits(seen, expected, g);
      EXPECT_EQ(seen.view().lse_nat[1], kInfinity);
      EXPECT_EQ(seen.view().value_term[1], kInfinity);
      EXPECT_EQ(seen.view().rounding_term[1], kInfinity);
      EXPECT_EQ(seen.block_lse(1)[0], kInfinity);
      EXPECT_EQ(seen.half_width(1)[0], kInfinity);
      EXPECT_THAT(seen.output(1), testing::Each(0.0f));
    }
  }
}

// A read and its certificates, as a decode path queues them.
class ReadAndFinish {
 public:
  ReadAndFinish(const AttendArgs& args, const ReadResult& result) : certificates_(args.group_size) {
    absl::StatusOr<cuda::CopiedRead> copied =
        cuda::CopiedRead::Make(args, result.view(), {.block_target = 3});
    EXPECT_TRUE(copied.ok()) << copied.status();
    copied_ = std::make_unique<cuda::CopiedRead>(*std::move(copied));
    const std::vector<float> tolerances(args.group_size, 0.05f);
    Place(tolerances.data(), tolerances.size() * sizeof(float), &tolerance_);
    Place(certificates_.data(), certificates_.size() * sizeof(Certificate), &on_device_);
    finish_ =
        cuda::PlanFinish(copied_->read(), tolerance_->As<float>(), on_device_->As<Certificate>());
    Place(&finish_, sizeof(finish_), &device_finish_);
  }

  int Launch(CUstream_st* stream) const {
    const int error =
        cuda::LaunchAttend(cuda::PlanLaunch(&copied_->read(), 1), copied_->device_read(), stream);
    if (error != 0) return error;
    return cuda::LaunchFinish(cuda::PlanFinishLaunch(&finish_, 1),
                              device_finish_->As<cuda::FinishRead>(), stream);
  }
  void ReadBack() {
    ASSERT_TRUE(copied_->ReadBack().ok());
    ASSERT_TRUE(
        on_device_->CopyTo(certificates_.data(), certificates_.size() * sizeof(Certificate)).ok());
  }
  cuda::CopiedRead* copied() { return copied_.get(); }
  const Certificate& certificate(int g) const { return certificates_[g]; }

 private:
  static void Place(const void* data, size_t size_bytes, std::unique_ptr<cuda::Buffer>* place) {
    absl::StatusOr<cuda::Buffer> buffer = cuda::Buffer::Allocate(static_cast<int64_t>(size_bytes));
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    ASSERT_TRUE(buffer->CopyFrom(data, static_cast<int64_t>(size_bytes)).ok());
    *place = std::make_unique<cuda::Buffer>(*std::move(buffer));
  }

  std::unique_ptr<cuda::CopiedRead> copied_;
  std::unique_ptr<cuda::Buffer> tolerance_;
  std::unique_ptr<cuda::Buffer> on_device_;
  std::unique_ptr<cuda::Buffer> device_finish_;
  cuda::FinishRead finish_{};
  std::vector<Certificate> certificates_;
};

TEST_P(CudaStreamTest, CapturedLaunchesAreReplayedOverWhatTheDeviceHoldsThen) {
  SequenceShape shape = ShapeOfFormat("K8V4w1");
  shape.tile_count = 5;
  SequenceCase sequence(shape, kSeed, Backend::kReference);
  const AttendArgs& args = sequence.args();
  ReadResult seen(args);
  ReadAndFinish captured(args, seen);
  absl::StatusOr<cuda::Stream> stream = cuda::Stream::Create();
  ASSERT_TRUE(stream.ok()) << stream.status();
  absl::StatusOr<cuda::Graph> graph =
      cuda::Graph::Capture(*stream, [&captured](CUstream_st* own) { return captured.Launch(own); });
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (const float factor : {1.0f, -0.5f, 2.0f}) {
    SCOPED_TRACE(factor);
    std::vector<float> queries(args.queries, args.queries + shape.group_size * shape.head_dim);
    for (float& query : queries) query *= factor;
    ASSERT_TRUE(captured.copied()->CopyQueries(queries.data()).ok());
    ASSERT_EQ(graph->Launch(stream->get()), 0);
    ASSERT_TRUE(stream->Synchronize().ok());
    ASSERT_NO_FATAL_FAILURE(captured.ReadBack());
    AttendArgs changed = args;
    changed.queries = queries.data();
    ReadResult expected(args);
    ReadAndFinish alone(changed, expected);
    ASSERT_EQ(alone.Launch(stream->get()), 0);
    ASSERT_TRUE(stream->Synchronize().ok());
    ASSERT_NO_FATAL_FAILURE(alone.ReadBack());
    for (int g = 0; g < shape.group_size; ++g) {
      ExpectSameBits(seen, expected, g);
      EXPECT_EQ(captured.certificate(g).worst_case_tv, alone.certificate(g).worst_case_tv);
      EXPECT_LT(captured.certificate(g).worst_case_tv, 1.0f);
    }
  }
}

// What the test above rests on.
TEST_P(CudaStreamTest, CaptureOfWhatAllocatesOrWaitsFails) {
  absl::StatusOr<cuda::Stream> stream = cuda::Stream::Create();
  ASSERT_TRUE(stream.ok()) << stream.status();
  absl::StatusOr<cuda::Buffer> buffer = cuda::Buffer::Allocate(256);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  uint8_t* const bytes = buffer->As<uint8_t>();
  const cuda::Launches allowed = [&](CUstream_st* own) {
    return cuda::LaunchCopy(bytes, bytes + 128, 128, own);
  };
  EXPECT_TRUE(cuda::Graph::Capture(*stream, allowed).ok());
  const std::vector<std::pair<const char*, cuda::Launches>> refused = {
      {"allocates",
       [](CUstream_st*) {
         const absl::StatusOr<cuda::Buffer> other = cuda::Buffer::Allocate(256);
         return 0;
       }},
      {"waits",
       [&](CUstream_st*) {
         stream->Synchronize().IgnoreError();
         return 0;
       }},
  };
  for (const auto& [name, launches] : refused) {
    SCOPED_TRACE(name);
    const absl::StatusOr<cuda::Graph> graph = cuda::Graph::Capture(*stream, launches);
    EXPECT_EQ(ReasonOf(graph.status()), "DEVICE_FAILED") << graph.status();
  }
  // The stream is as good as before.
  EXPECT_TRUE(cuda::Graph::Capture(*stream, allowed).ok());
  EXPECT_EQ(allowed(stream->get()), 0);
  EXPECT_TRUE(stream->Synchronize().ok());
}

std::vector<Path> DevicePaths() {
  std::vector<Path> paths;
  for (const Path& path : AllPaths()) {
    if (path.backend == Backend::kCuda) paths.push_back(path);
  }
  return paths;
}

INSTANTIATE_TEST_SUITE_P(Paths, CudaStreamTest, ::testing::ValuesIn(DevicePaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
