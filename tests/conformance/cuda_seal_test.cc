// Tiles whose originals are on the device: sealed there with the bytes of QuantizeTile, of several
// layers in one call, and moved there.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/seal_on_device.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

using cuda_on_cpu::InjectFailure;
using cuda_on_cpu::RuntimeCall;

constexpr uint64_t kSeed = 53;
constexpr uint8_t kUntouched = 0xa5;

class CudaSealTest : public testing::Test {
 protected:
  CudaSealTest() { RegisterDevice(&cuda::HostMemoryOps()); }
  ~CudaSealTest() override { RegisterDevice(nullptr); }
};

// Originals of one layer, and records that touch each other.
class Layer {
 public:
  explicit Layer(const SequenceShape& shape)
      : shape_(shape),
        sequence_(shape, kSeed, Backend::kReference),
        records_(AllocateAligned((shape.tile_count + 1) * layout().tile_bytes())) {
    std::memset(records_.get(), kUntouched, (shape.tile_count + 1) * layout().tile_bytes());
  }

  const TileLayout& layout() const { return sequence_.layout(); }
  DeviceSeal seal() const {
    DeviceSeal seal{&sequence_.spec(), 0, &layout(), {}};
    for (int t = 0; t < shape_.tile_count; ++t) {
      const AttendTile& tile = sequence_.args().tiles[t];
      uint8_t* const scan = records_.get() + t * layout().tile_bytes();
      seal.tiles.push_back({tile.original_keys, tile.original_values, 0, TagOf(t), scan,
                            scan + layout().scan_bytes});
    }
    return seal;
  }
  // The bytes are those of QuantizeTile once their checksums are written, and nothing beside them.
  void ExpectSealed() const {
    const AlignedBytes made = AllocateAligned(layout().tile_bytes());
    for (int t = 0; t < shape_.tile_count; ++t) {
      QuantizeTileArgs args{};
      args.spec = &sequence_.spec();
      args.layout = &layout();
      args.keys = sequence_.args().tiles[t].original_keys;
      args.values = sequence_.args().tiles[t].original_values;
      args.witness_weights = WitnessWeightsOf(sequence_.spec(), 0, 0);
      args.key_stride = layout().head_dim;
      args.value_stride = layout().value_dim;
      args.identity_tag = TagOf(t);
      args.scan = records_.get() + t * layout().tile_bytes();
      args.detail = args.scan + layout().scan_bytes;
      ASSERT_TRUE(CheckTileOriginals(args).ok());
      WriteTileChecksums(args);
      EXPECT_TRUE(VerifyTile(layout(), args.scan, args.detail, args.keys, args.values).ok());
      const uint8_t* const seen = args.scan;
      args.scan = made.get();
      args.detail = made.get() + layout().scan_bytes;
      ASSERT_TRUE(QuantizeTile(Backend::kCuda, args).ok());
      EXPECT_EQ(std::memcmp(seen, made.get(), layout().tile_bytes()), 0) << "tile " << t;
    }
    const uint8_t* const end = records_.get() + shape_.tile_count * layout().tile_bytes();
    EXPECT_EQ(std::count(end, end + layout().tile_bytes(), kUntouched), layout().tile_bytes());
  }

 private:
  static uint64_t TagOf(int tile) { return 0x1000 + static_cast<uint64_t>(tile); }

  const SequenceShape shape_;
  const SequenceCase sequence_;
  const AlignedBytes records_;
};

TEST_F(CudaSealTest, EveryShapeHasTheBytesOfQuantizeTile) {
  for (const auto& shapes : {FormatShapes(), DimensionShapes(), ContentShapes()}) {
    for (const NamedShape& named : ShapesOf(Backend::kCuda, shapes)) {
      SCOPED_TRACE(named.name);
      const Layer layer(named.shape);
      ASSERT_TRUE(SealOnDevice({layer.seal()}).ok());
      layer.ExpectSealed();
    }
  }
}

TEST_F(CudaSealTest, LayersOfOneCallAreSealedAsAlone) {
  const Layer layers[] = {Layer(ShapeOfFormat("K8V4")), Layer(ShapeOfFormat("K6V4w1c")),
                          Layer(ShapeOfFormat("FP8V4w4"))};
  ASSERT_TRUE(SealOnDevice({layers[0].seal(), layers[1].seal(), layers[2].seal()}).ok());
  for (const Layer& layer : layers) layer.ExpectSealed();
}

TEST_F(CudaSealTest, FormatWithoutAKernelAndAMissingDeviceAreRefused) {
  const SequenceCase dithered(ShapeOfFormat("K8DV4"), kSeed, Backend::kReference);
  const absl::Status lacks = CheckSealsOnDevice(dithered.spec());
  EXPECT_EQ(ReasonOf(lacks), "DEVICE_LACKS_OPERATION") << lacks;
  EXPECT_EQ(ReasonOf(SealOnDevice({DeviceSeal{&dithered.spec(), 0, &dithered.layout(), {}}})),
            "DEVICE_LACKS_OPERATION");
  const Layer layer(ShapeOfFormat("K8V4"));
  RegisterDevice(nullptr);
  EXPECT_EQ(ReasonOf(SealOnDevice({layer.seal()})), "DEVICE_MISSING");
  EXPECT_EQ(ReasonOf(CopyRunsOnDevice({})), "DEVICE_MISSING");
}

TEST_F(CudaSealTest, EveryCallThatFailsIsAnError) {
  const Layer layer(ShapeOfFormat("K6V4w1c"));  // with weights, a table more
  const AlignedBytes bytes = AllocateAligned(256);
  const std::vector<DeviceRun> runs = {{bytes.get(), bytes.get() + 128, 64}};
  const std::pair<RuntimeCall, int> counts[] = {{RuntimeCall::kAllocate, 2},
                                                {RuntimeCall::kCopy, 2},
                                                {RuntimeCall::kLaunch, 1},
                                                {RuntimeCall::kSynchronize, 1}};
  for (const auto& [call, count] : counts) {
    for (int skipped = 0; skipped < count; ++skipped) {
      InjectFailure(call, skipped, cudaErrorLaunchFailure);
      EXPECT_EQ(ReasonOf(SealOnDevice({layer.seal()})), "DEVICE_FAILED")
          << static_cast<int>(call) << "@" << skipped;
    }
    InjectFailure(call, 0, cudaErrorMemoryAllocation);
    EXPECT_EQ(ReasonOf(CopyRunsOnDevice(runs)), "DEVICE_MEMORY_FULL") << static_cast<int>(call);
  }
  ASSERT_TRUE(SealOnDevice({layer.seal()}).ok());
  layer.ExpectSealed();
}

TEST_F(CudaSealTest, RunsAreCopiedAndNothingBesideThem) {
  const AlignedBytes bytes = AllocateAligned(4096);
  for (int i = 0; i < 4096; ++i) bytes[i] = static_cast<uint8_t>(i % 251);
  std::vector<uint8_t> expected(bytes.get(), bytes.get() + 4096);
  std::vector<DeviceRun> runs;
  for (const auto& [from, to, size] :
       {std::array{0, 2048, 64}, std::array{64, 2128, 16}, std::array{1024, 3072, 1008}}) {
    runs.push_back({bytes.get() + from, bytes.get() + to, size});
    std::copy_n(bytes.get() + from, size, expected.begin() + to);
  }
  ASSERT_TRUE(CopyRunsOnDevice(runs).ok());
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes.get()));
  EXPECT_TRUE(CopyRunsOnDevice({}).ok());
  runs[1].to = bytes.get() + 2056;
  EXPECT_DEATH(CopyRunsOnDevice(runs).IgnoreError(), "whole 16 bytes");
}

}  // namespace
}  // namespace certkv::conformance
