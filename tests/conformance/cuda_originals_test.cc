// Originals of a repaired read on their way to the device: those that heads ask for and no others,
// gathered where the device reads host memory itself, with the same bits either way.
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/ops/resident.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

using cuda_on_cpu::InjectFailure;
using cuda_on_cpu::RuntimeCall;
using ::testing::ElementsAreArray;

constexpr uint64_t kSeed = 91;
constexpr int kTiles = 5;

// Addresses at which nothing can be read.
class Unreadable {
 public:
  explicit Unreadable(int64_t size_bytes) : size_bytes_(size_bytes) {
    void* const address = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CERTKV_CHECK(address != MAP_FAILED, "there are addresses left");
    base_ = static_cast<uint8_t*>(address);
  }
  Unreadable(const Unreadable&) = delete;
  Unreadable& operator=(const Unreadable&) = delete;
  ~Unreadable() { munmap(base_, static_cast<size_t>(size_bytes_)); }
  uint8_t* base() const { return base_; }

 private:
  uint8_t* base_;
  int64_t size_bytes_;
};

SequenceShape Shape() {
  SequenceShape shape = ShapeOfFormat("K8V4");
  shape.tile_count = kTiles;
  shape.group_size = 2;
  shape.value_dim = 80;
  // Tile 0 lies before the range, tile 4 after it.
  shape.token_begin = 70;
  shape.token_end = 250;
  shape.tail_count = 0;
  return shape;
}

class CudaOriginalsTest : public testing::Test {
 protected:
  CudaOriginalsTest() : sequence_(Shape(), kSeed, Backend::kReference), args_(sequence_.args()) {
    RegisterDevice(&cuda::HostMemoryOps());
    tiles_.assign(args_.tiles, args_.tiles + kTiles);
    // Heads by tiles. Asked in all: keys of tile 1 by one head and its values by the other, values
    // of tile 2, nothing of tile 3; what is asked outside the range counts for nothing.
    sources_ = {3, kSourceOriginalKeys,   kSourceQuantized,      0, 3,  //
                3, kSourceOriginalValues, kSourceOriginalValues, 0, 3};
    args_.tile_sources = sources_.data();
    expected_ = std::make_unique<ReadResult>(args_);
    expected_->Run(Backend::kCuda, args_);
    args_.tiles = tiles_.data();
  }
  int64_t key_bytes() const { return int64_t{2} * kTileTokens * sequence_.layout().head_dim; }
  int64_t value_bytes() const { return int64_t{2} * kTileTokens * sequence_.layout().value_dim; }
  const uint16_t* At(const uint8_t* address) { return reinterpret_cast<const uint16_t*>(address); }
  // Copies what is asked of tile `t` to `to`, keys first, and points the tile to `from`.
  void Lay(int t, uint8_t* to, const uint8_t* from) {
    if (t == 1) std::memcpy(to, tiles_[t].original_keys, key_bytes());
    std::memcpy(to + key_bytes(), tiles_[t].original_values, value_bytes());
    tiles_[t].original_keys = At(from);
    tiles_[t].original_values = At(from + key_bytes());
  }
  void ExpectSameBits() {
    ReadResult seen(args_);
    ASSERT_NO_FATAL_FAILURE(seen.Run(Backend::kCuda, args_));
    for (int g = 0; g < args_.group_size; ++g) {
      EXPECT_THAT(seen.output(g), ElementsAreArray(expected_->output(g)));
      EXPECT_THAT(seen.block_lse(g), ElementsAreArray(expected_->block_lse(g)));
      EXPECT_THAT(seen.half_width(g), ElementsAreArray(expected_->half_width(g)));
      EXPECT_EQ(seen.view().value_term[g], expected_->view().value_term[g]);
    }
  }
  // Of a read that succeeds.
  int LaunchCount() {
    const AlignedBytes workspace = AllocateAligned(AttendWorkspaceBytes(args_));
    for (int count = 0;; ++count) {
      ReadResult result(args_);
      InjectFailure(RuntimeCall::kLaunch, count, cudaErrorLaunchFailure);
      const absl::Status status = Attend(Backend::kCuda, args_, result.view(), workspace.get());
      InjectFailure(RuntimeCall::kLaunch, -1, cudaSuccess);
      if (status.ok() || count == 100) return count;
      EXPECT_EQ(ReasonOf(status), "DEVICE_FAILED");
    }
  }

  SequenceCase sequence_;
  AttendArgs args_;
  std::vector<AttendTile> tiles_;
  std::vector<uint8_t> sources_;
  std::unique_ptr<ReadResult> expected_;
};

TEST_F(CudaOriginalsTest, OnlyWhatHeadsAskForIsCopied) {
  const Unreadable nothing(1 << 20);
  for (const int t : {0, 3, 4}) {
    tiles_[t].original_keys = At(nothing.base());
    tiles_[t].original_values = At(nothing.base());
  }
  tiles_[2].original_keys = At(nothing.base());
  ExpectSameBits();
  // And nothing where nobody asks, or where there are no sources at all.
  args_.tile_sources = nullptr;
  for (const int t : {1, 2}) {
    tiles_[t].original_keys = nullptr;
    tiles_[t].original_values = At(nothing.base());
  }
  ReadResult seen(args_);
  seen.Run(Backend::kCuda, args_);
}

// The host's addresses can't be read, the device's can: what is taken from pinned memory is taken
// by the device, and no more than is asked.
TEST_F(CudaOriginalsTest, PinnedOriginalsAreGatheredByTheDevice) {
  const int64_t slot_bytes = key_bytes() + value_bytes();
  const Unreadable host(4 * slot_bytes);
  const AlignedBytes on_device = AllocateAligned(4 * slot_bytes);
  // NaNs where nothing was laid.
  std::memset(on_device.get(), 0xff, static_cast<size_t>(4 * slot_bytes));
  Lay(1, on_device.get() + 2 * slot_bytes, host.base() + 2 * slot_bytes);
  Lay(2, on_device.get(), host.base());
  for (const int t : {0, 3, 4}) {
    tiles_[t].original_keys = At(host.base() + 3 * slot_bytes);
    tiles_[t].original_values = At(host.base() + 3 * slot_bytes);
  }
  AddPinned({host.base(), 4 * slot_bytes, on_device.get()});
  ExpectSameBits();
  RemovePinned(host.base());
}

TEST_F(CudaOriginalsTest, AllPinnedOriginalsComeWithOneLaunch) {
  const int64_t slot_bytes = key_bytes() + value_bytes();
  const AlignedBytes pinned = AllocateAligned(2 * slot_bytes);
  const int before = LaunchCount();
  Lay(1, pinned.get(), pinned.get());
  Lay(2, pinned.get() + slot_bytes, pinned.get() + slot_bytes);
  EXPECT_EQ(LaunchCount(), before) << "not pinned yet";
  AddPinned({pinned.get(), 2 * slot_bytes, pinned.get()});
  EXPECT_EQ(LaunchCount(), before + 1);
  ExpectSameBits();
  RemovePinned(pinned.get());
}

// The contract of a read asks for no alignment beyond a word's; the gather's kernel does.
TEST_F(CudaOriginalsTest, PinnedOriginalsThatTheKernelCannotReadAreCopied) {
  const int64_t slot_bytes = key_bytes() + value_bytes();
  const AlignedBytes pinned = AllocateAligned(slot_bytes + 64);
  const int before = LaunchCount();
  AddPinned({pinned.get(), slot_bytes + 64, pinned.get()});
  Lay(1, pinned.get() + 2, pinned.get() + 2);
  EXPECT_EQ(LaunchCount(), before);
  ExpectSameBits();
  RemovePinned(pinned.get());
}

// One tile reaches beyond what is pinned: it is copied, the other gathered.
TEST_F(CudaOriginalsTest, OriginalsThatArePinnedInPartAreCopied) {
  const int64_t slot_bytes = key_bytes() + value_bytes();
  const AlignedBytes host = AllocateAligned(2 * slot_bytes);
  const AlignedBytes on_device = AllocateAligned(2 * slot_bytes);
  Lay(1, on_device.get(), host.get());
  Lay(2, host.get() + slot_bytes, host.get() + slot_bytes);
  AddPinned({host.get(), 2 * slot_bytes - 16, on_device.get()});
  ExpectSameBits();
  RemovePinned(host.get());
}

}  // namespace
}  // namespace certkv::conformance
