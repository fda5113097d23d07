// What leads to a slab's copy is checked before anything is read by it.
#include "kernels/ops/imported_slab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>

#include "kernels/core/device_export.h"
#include "kernels/core/status.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/resident.h"
#include "tests/device/device_cache.h"

namespace certkv {
namespace {

using cuda_sharing::InjectFailures;

class ImportedSlabTest : public testing::Test {
 protected:
  ImportedSlabTest() {
    std::mt19937_64 random(7);
    fake_.Put(certifier::RandomSequence(fake_.spec(), 300, 1.0f, &random));
    copy_ = CopyOf(&fake_);
  }
  ~ImportedSlabTest() override { InjectFailures(""); }

  absl::StatusOr<std::unique_ptr<ImportedSlab>> Open() {
    const certifier::MappedSlab& slab = fake_.cache()->device();
    return ImportedSlab::Open(HostMemoryDevice(), slab.base(), slab.layout().slab_bytes());
  }
  DeviceExport& record() { return DeviceExportAt(StoreBase(&fake_)); }

  certifier::FakeCache fake_{certifier::SmallSpec(2, 2, 2, 64), 16};
  std::unique_ptr<kvstore::DeviceCopy> copy_;
};

TEST_F(ImportedSlabTest, ReachesEveryByteOfTheCopy) {
  const auto slab = Open();
  ASSERT_TRUE(slab.ok()) << slab.status();
  EXPECT_TRUE((*slab)->IsReady());
  const certifier::MappedSlab& mapped = fake_.cache()->device();
  const SlabLayout& layout = mapped.layout();
  std::vector<ImportedSlab::Range> ranges;
  for (const BlockHandle& block : fake_.blocks()) {
    for (int32_t layer = 0; layer < 2; ++layer) {
      ranges.push_back({layout.scan_offset(block.device.slot, layer, 1, 0),
                        layout.tile_layout(layer).scan_bytes});
      ranges.push_back({layout.detail_offset(block.device.slot, layer, 1, 0),
                        layout.tile_layout(layer).detail_bytes});
    }
  }
  EXPECT_TRUE(*(*slab)->Equals(ranges));
  *fake_.detail(2, 1, 1, 0) ^= 1;
  EXPECT_FALSE(*(*slab)->Equals(ranges)) << "the host's byte is another now";
  *fake_.detail(2, 1, 1, 0) ^= 1;
  EXPECT_TRUE(*(*slab)->Equals(ranges));
}

TEST_F(ImportedSlabTest, ReachesUploadsThatPassTheChunksMoreThanOnce) {
  certifier::FakeCache fake(certifier::SmallSpec(8, 4, 2, 128), 32);
  std::mt19937_64 random(8);
  fake.Put(certifier::RandomSequence(fake.spec(), 1600, 1.0f, &random));
  const auto copy = CopyOf(&fake);
  ASSERT_GT(copy->uploaded_bytes(),
            kvstore::DeviceCopy::kChunkBytes * int64_t{kvstore::DeviceCopy::kChunkCount});
  const certifier::MappedSlab& mapped = fake.cache()->device();
  const SlabLayout& layout = mapped.layout();
  const auto slab = ImportedSlab::Open(HostMemoryDevice(), mapped.base(), layout.slab_bytes());
  ASSERT_TRUE(slab.ok()) << slab.status();
  for (const BlockHandle& block : fake.blocks()) {
    for (int32_t layer = 0; layer < layout.layer_count(); ++layer) {
      for (int32_t head = 0; head < layout.kv_head_count(); ++head) {
        const TileLayout& tile = layout.tile_layout(layer);
        EXPECT_TRUE(*(*slab)->Equals({{layout.scan_offset(block.device.slot, layer, head, 0),
                                       layout.tiles_per_block() * tile.scan_bytes},
                                      {layout.detail_offset(block.device.slot, layer, head, 0),
                                       layout.tiles_per_block() * tile.detail_bytes}}));
      }
    }
  }
}

TEST_F(ImportedSlabTest, ComparesRangesThatAreLargerThanItsBuffer) {
  const auto slab = Open();
  ASSERT_TRUE(slab.ok()) << slab.status();
  // The header page, which is in the copy but for the record's state, and slots that are not.
  const int64_t begin = fake_.cache()->device().layout().scan_offset(0, 0, 0, 0);
  std::vector<ImportedSlab::Range> ranges;
  const int64_t slot_bytes = fake_.cache()->device().layout().tile_layout(0).scan_bytes;
  for (int64_t used = 0; used < 3 << 20; used += slot_bytes) ranges.push_back({begin, slot_bytes});
  const int32_t slot = fake_.blocks()[0].device.slot;
  for (auto& range : ranges) range.offset += slot * slot_bytes;
  EXPECT_TRUE(*(*slab)->Equals(ranges));
  ranges.back().offset = 0;
  ranges.back().size_bytes = kSlabPageBytes;
  EXPECT_FALSE(*(*slab)->Equals(ranges)) << "the last of them differs";
}

TEST_F(ImportedSlabTest, MakesTheMappedSlabResidentWhileItLives) {
  const certifier::MappedSlab& mapped = fake_.cache()->device();
  const int64_t size_bytes = mapped.layout().slab_bytes();
  {
    const auto slab = Open();
    ASSERT_TRUE(slab.ok());
    EXPECT_EQ(ResidentAddress(mapped.base() + 4096, 64), (*slab)->device_base() + 4096);
    EXPECT_EQ(ResidentAddress(mapped.base() + size_bytes - 64, 64),
              (*slab)->device_base() + size_bytes - 64);
    EXPECT_EQ(ResidentAddress(mapped.base() + size_bytes - 64, 65), nullptr);
    EXPECT_EQ(ResidentAddress(mapped.base() - 1, 1), nullptr);
  }
  EXPECT_EQ(ResidentAddress(mapped.base() + 4096, 64), nullptr);
}

TEST_F(ImportedSlabTest, IsNotReadyOnceTheStoreWithdrewIt) {
  const auto slab = Open();
  ASSERT_TRUE(slab.ok());
  copy_.reset();
  EXPECT_FALSE((*slab)->IsReady());
  EXPECT_EQ(ReasonOf(Open().status()), "DEVICE_COPY_MISSING");
}

TEST_F(ImportedSlabTest, RefusesARecordThatIsNotThisSlabs) {
  const struct {
    const char* what;
    const char* reason;
    std::function<void(DeviceExport*)> spoil;
  } cases[] = {
      {"none", "DEVICE_COPY_MISSING", [](DeviceExport* r) { r->magic = 0; }},
      {"not ready", "DEVICE_COPY_MISSING",
       [](DeviceExport* r) { r->state = DeviceExportState::kNone; }},
      {"another program's", "DEVICE_HANDLE_STALE", [](DeviceExport* r) { r->magic ^= 1; }},
      {"a later version", "DEVICE_HANDLE_STALE", [](DeviceExport* r) { ++r->version; }},
      {"another boot", "DEVICE_HANDLE_STALE", [](DeviceExport* r) { r->boot_id[3] ^= 1; }},
      {"another size", "DEVICE_HANDLE_STALE", [](DeviceExport* r) { r->size_bytes += 4096; }},
      {"another export", "DEVICE_HANDLE_STALE", [](DeviceExport* r) { ++r->export_id; }},
      {"another GPU", "DEVICE_NOT_HERE", [](DeviceExport* r) { r->device_uuid[0] ^= 1; }},
      {"a handle of a process that is gone", "DEVICE_IMPORT_REFUSED",
       [](DeviceExport* r) { r->memory_handle[8] ^= 1; }},
      {"an event of a process that is gone", "DEVICE_IMPORT_REFUSED",
       [](DeviceExport* r) { r->event_handle[8] ^= 1; }},
  };
  unsigned char saved[sizeof(DeviceExport)];
  std::memcpy(saved, &record(), sizeof(saved));
  for (const auto& one : cases) {
    SCOPED_TRACE(one.what);
    one.spoil(&record());
    EXPECT_EQ(ReasonOf(Open().status()), one.reason) << Open().status();
    std::memcpy(static_cast<void*>(&record()), saved, sizeof(saved));
    EXPECT_TRUE(Open().ok());
  }
}

TEST_F(ImportedSlabTest, SaysWhatTheDeviceSays) {
  for (const char* failure : {"cudaSetDevice=101", "cudaStreamCreateWithFlags=46",
                              "cudaMemcpyAsync=719", "cudaStreamSynchronize=214"}) {
    SCOPED_TRACE(failure);
    InjectFailures(failure);
    const auto failed = Open();
    InjectFailures("");
    if (std::strcmp(failure, "cudaSetDevice=101") != 0) {
      EXPECT_EQ(ReasonOf(failed.status()), "DEVICE_FAILED") << failed.status();
    }
    EXPECT_TRUE(Open().ok());
  }
  const auto slab = Open();
  InjectFailures("cudaStreamSynchronize=214");
  EXPECT_EQ(ReasonOf((*slab)->Equals({{0, 4096}}).status()), "DEVICE_FAILED");
  InjectFailures("cudaStreamWaitEvent=46");
  EXPECT_EQ(ReasonOf((*slab)->Prepare()), "DEVICE_FAILED");
}

}  // namespace
}  // namespace certkv
