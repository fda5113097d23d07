// The copy of the device tier in a GPU's memory: what is sealed is in it, and whatever fails there,
// the store goes on from host memory and readers are told.
#include "services/kvstore/device_copy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "kernels/core/boot_id.h"
#include "kernels/core/device_export.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "services/kvstore/device_place.h"
#include "services/kvstore/slab_memory.h"
#include "services/kvstore/slot_pool.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using cuda_sharing::InjectFailures;

constexpr int64_t kEverything = int64_t{1} << 40;

DevicePlace Place() {
  EXPECT_TRUE(cuda::UseDevice().ok());
  DeviceRuntime* const runtime = RegisteredDeviceRuntime();
  return {runtime, runtime->Devices()->front()};
}

StoreShape ShapeOnDevice() {
  StoreShape shape;
  shape.device = Place();
  return shape;
}

class DeviceCopyTest : public testing::Test {
 protected:
  ~DeviceCopyTest() override {
    InjectFailures("");
    if (memory_ != nullptr) harness_.engine.CheckInvariants();
    if (memory_ != nullptr) RegisteredDeviceRuntime()->ReleaseMemory(memory_);
  }

  const DeviceExport& Record() const { return DeviceExportAt(worker_.device.data()); }
  // The copy, as whoever has the slab's header page opens it.
  uint8_t* Memory() {
    if (memory_ != nullptr) return memory_;
    DeviceHandle handle;
    std::memcpy(handle.data(), Record().memory_handle, handle.size());
    const auto opened = RegisteredDeviceRuntime()->ImportMemory(0, handle);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return memory_ = static_cast<uint8_t*>(*opened);
  }
  int64_t ScanOffset(const BlockHandle& handle) const {
    return harness_.device_layout.scan_offset(handle.device.slot, 0, 0, 0);
  }
  CacheStats Stats() { return harness_.engine.GetStats().caches.front(); }

  StoreHarness harness_{ShapeOnDevice()};
  StoreHarness::Worker worker_ = harness_.Attach("worker");
  uint8_t* memory_ = nullptr;
};

TEST_F(DeviceCopyTest, SealedBlocksAreInItByteForByte) {
  const auto sealed = harness_.Put(worker_, 1, 0, 5);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  for (int32_t i = 0; i < 5; ++i) {
    EXPECT_TRUE(CheckDevicePlanes(harness_.device_layout, harness_.spec, ChainKey(1, i),
                                  sealed->blocks[i].device.slot, Memory())
                    .ok());
  }
  EXPECT_GE(Stats().device_copied_bytes, 5 * (Stats().device_slot_bytes - 8));
  EXPECT_TRUE(Stats().has_device_copy);
}

TEST_F(DeviceCopyTest, HeaderPageSaysHowToReachIt) {
  EXPECT_EQ(Record().magic, kDeviceExportMagic);
  EXPECT_EQ(Record().version, kDeviceExportVersion);
  EXPECT_EQ(Record().state.load(), DeviceExportState::kReady);
  EXPECT_EQ(Record().size_bytes, harness_.device_layout.slab_bytes());
  const BootId boot = CurrentBootId();
  EXPECT_NE(boot, BootId{});
  EXPECT_EQ(std::memcmp(Record().boot_id, boot.data(), boot.size()), 0);
  const DeviceExport& inside = DeviceExportAt(Memory());
  EXPECT_EQ(inside.export_id, Record().export_id) << "whoever opens the handle finds the record";
  EXPECT_TRUE(harness_.device_layout.CheckHeader(Memory(), Record().size_bytes).ok());
}

TEST_F(DeviceCopyTest, SlabWithoutOneHasAnEmptyRecord) {
  StoreShape shape;
  shape.device = {};
  StoreHarness harness(shape);
  const auto worker = harness.Attach("worker");
  EXPECT_EQ(DeviceExportAt(worker.device.data()).magic, 0u);
  EXPECT_FALSE(harness.engine.GetStats().caches.front().has_device_copy);
  EXPECT_TRUE(harness.engine.GetStats().caches.front().device_error.ok());
}

TEST_F(DeviceCopyTest, BlocksThatComeBackToTheTierAreInIt) {
  for (int32_t chain = 0; chain < 3; ++chain) harness_.PutUnleased(worker_, chain, 0, 5);
  ASSERT_GT(harness_.engine.GetStats().counters.blocks_demoted, 0);
  const auto found = harness_.Lookup(worker_, 0, 5);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_GT(harness_.engine.GetStats().counters.blocks_promoted, 0);
  for (int32_t i = 0; i < static_cast<int32_t>(found->blocks.size()); ++i) {
    EXPECT_TRUE(CheckDevicePlanes(harness_.device_layout, harness_.spec, ChainKey(0, i),
                                  found->blocks[i].device.slot, Memory())
                    .ok());
  }
}

TEST_F(DeviceCopyTest, AScrubFindsWhatChangedInItAndCopiesItAgain) {
  const auto sealed = harness_.Put(worker_, 1, 0, 2);
  ASSERT_TRUE(sealed.ok());
  Memory()[ScanOffset(sealed->blocks[1]) + 100] ^= 1;
  while (harness_.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(harness_.engine.GetStats().counters.blocks_rebuilt, 1);
  EXPECT_EQ(std::memcmp(Memory() + ScanOffset(sealed->blocks[1]),
                        worker_.device.data() + ScanOffset(sealed->blocks[1]), 128),
            0);
  while (harness_.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(harness_.engine.GetStats().counters.blocks_rebuilt, 1) << "it is good now";
}

TEST_F(DeviceCopyTest, WithdrawnForGoodWhenABlockCannotBeCopied) {
  for (const char* failure : {"cudaMemcpyAsync=719", "cudaMemcpyAsync=719@3",
                              "cudaStreamSynchronize=214", "cudaEventRecord=46", "*=46"}) {
    SCOPED_TRACE(failure);
    StoreHarness harness(ShapeOnDevice());
    auto worker = harness.Attach("worker");
    const DeviceExport& record = DeviceExportAt(worker.device.data());
    harness.PutUnleased(worker, 1, 0, 2);
    ASSERT_EQ(record.state.load(), DeviceExportState::kReady);
    InjectFailures(failure);
    const auto sealed = harness.Put(worker, 2, 0, 2);
    ASSERT_TRUE(sealed.ok()) << sealed.status() << ": the host has what it needs";
    EXPECT_EQ(record.state.load(), DeviceExportState::kWithdrawn);
    for (const BlockHandle& handle : sealed->blocks) {
      EXPECT_TRUE(harness.IsReadable(worker, handle));
    }
    InjectFailures("");
    harness.PutUnleased(worker, 3, 0, 2);
    EXPECT_EQ(record.state.load(), DeviceExportState::kWithdrawn) << "slots are missing in it";
    const CacheStats stats = harness.engine.GetStats().caches.front();
    EXPECT_FALSE(stats.has_device_copy);
    EXPECT_EQ(ReasonOf(stats.device_error), "DEVICE_FAILED") << stats.device_error;
    harness.engine.CheckInvariants();
  }
}

TEST_F(DeviceCopyTest, WithdrawnWhenItCannotBeReadBack) {
  harness_.PutUnleased(worker_, 1, 0, 2);
  InjectFailures("cudaMemcpyAsync=214");
  while (harness_.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(Record().state.load(), DeviceExportState::kWithdrawn);
  EXPECT_EQ(harness_.engine.GetStats().counters.blocks_rebuilt, 0) << "the host's bytes are good";
  EXPECT_EQ(harness_.engine.GetStats().counters.blocks_lost, 0);
}

TEST_F(DeviceCopyTest, CacheGoesOnOrIsRefusedWhenThereCanBeNone) {
  const struct {
    const char* failure;
    const char* reason;
  } cases[] = {{"cudaMalloc=2", "DEVICE_MEMORY_FULL"},
               {"cudaSetDevice=101", "DEVICE_FAILED"},
               {"cudaStreamCreateWithFlags=2", "DEVICE_MEMORY_FULL"},
               {"cudaHostRegister=304", "DEVICE_FAILED"},
               {"cudaEventCreateWithFlags=46", "DEVICE_FAILED"},
               {"cudaIpcGetMemHandle=801", "DEVICE_IMPORT_REFUSED"},
               {"cudaIpcGetEventHandle=801", "DEVICE_IMPORT_REFUSED"},
               {"cudaMemcpyAsync=719", "DEVICE_FAILED"}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.failure);
    StoreShape shape = ShapeOnDevice();
    InjectFailures(one.failure);
    StoreHarness harness(shape);
    auto worker = harness.Attach("worker");
    EXPECT_EQ(DeviceExportAt(worker.device.data()).magic, 0u);
    EXPECT_EQ(ReasonOf(harness.engine.GetStats().caches.front().device_error), one.reason);
    EXPECT_TRUE(harness.Put(worker, 1, 0, 2).ok());
    KvStoreConfig config;
    config.device = DeviceChoice::kCuda;
    StoreEngine strict(config, &harness.clock, &harness.pool, nullptr, shape.device);
    const auto refused = strict.RegisterCache(TinySpec("strict"));
    EXPECT_EQ(ReasonOf(refused.status()), one.reason) << refused.status();
    InjectFailures("");
  }
}

TEST(DeviceSlotPoolTest, SlotIsNotSealedBeforeItsBytesAreCopied) {
  auto memory = *SlabMemory::Create(TinySpec(), SlabKind::kDevice, 4);
  ASSERT_TRUE(memory->AddDeviceCopy(Place()).ok());
  SlotPool pool(memory);
  const int32_t slot = pool.Take(1).front();
  EXPECT_DEATH(pool.Seal(slot), "copied to the device before it is sealed");
  memory->CopyToDevice({slot});
  pool.Seal(slot);
  pool.Free(slot);
  ASSERT_EQ(pool.Take(1).front(), slot);
  EXPECT_DEATH(pool.Seal(slot), "copied to the device before it is sealed")
      << "it is another block";
  InjectFailures("cudaStreamSynchronize=719");
  memory->CopyToDevice({slot});
  InjectFailures("");
  pool.Seal(slot);  // who reads the copy is told that there is none
  EXPECT_FALSE(memory->device_copy()->is_ready());
}

TEST(DevicePlaceTest, FollowsTheConfig) {
  KvStoreConfig config;
  Place();
  EXPECT_EQ(ChooseDevice(config)->runtime, nullptr);
  config.device = DeviceChoice::kAuto;
  EXPECT_EQ(ChooseDevice(config)->runtime, RegisteredDeviceRuntime());
  config.device_index = 1;
  EXPECT_EQ(ReasonOf(ChooseDevice(config).status()), "DEVICE_NOT_HERE");
  config.device_index = 0;
  RegisterDeviceRuntime(nullptr);
  ASSERT_TRUE(ChooseDevice(config).ok());
  EXPECT_EQ(ChooseDevice(config)->runtime, nullptr);
  config.device = DeviceChoice::kCuda;
  EXPECT_EQ(ReasonOf(ChooseDevice(config).status()), "DEVICE_MISSING");
  config.device_error = absl::UnavailableError("no driver");
  EXPECT_EQ(ChooseDevice(config).status(), config.device_error);
}

}  // namespace
}  // namespace certkv::kvstore
