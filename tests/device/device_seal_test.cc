// Blocks that are sealed on a GPU from what a worker wrote there: the bytes that the kernels make
// of what is kept, whatever the worker does meanwhile, and whatever the GPU fails to do, blocks
// that the host has sealed, or none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/device_export.h"
#include "kernels/core/status.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/tile_checksum.h"
#include "services/kvstore/device_sealer.h"
#include "tests/device/seal_harness.h"

namespace certkv::kvstore {
namespace {

using cuda_on_cpu::RuntimeCall;
using cuda_sharing::InjectFailures;

constexpr int64_t kEverything = int64_t{1} << 40;

// The copy of a worker's device slab, as other processes open it.
class OpenedCopy {
 public:
  explicit OpenedCopy(const StoreHarness::Worker& worker) {
    auto opened = ImportedMemory::Open(RegisteredDeviceRuntime(), worker.device.data(),
                                       worker.device.size_bytes());
    CERTKV_CHECK(opened.ok(), "the copy of a test is opened");
    memory_ = *std::move(opened);
  }
  const uint8_t* base() const { return memory_->base(); }
  bool is_ready() const { return memory_->IsReady(); }

 private:
  std::unique_ptr<ImportedMemory> memory_;
};

class DeviceSealTest : public testing::Test {
 protected:
  ~DeviceSealTest() override { InjectFailures(""); }
};

// A layer of every pair of formats that a GPU seals, with every kind of witness.
CacheSpec SpecOfAllFormats(OriginalDtype dtype, int32_t block_tokens) {
  CacheSpec spec = TinySpec(absl::StrCat("formats-", static_cast<int>(dtype), "-", block_tokens));
  spec.kv_head_count = 2;
  spec.head_dim = 80;
  spec.value_dim = 96;
  spec.block_tokens = block_tokens;
  spec.original_dtype = dtype;
  spec.layers.clear();
  const bool is_f16 = dtype == OriginalDtype::kF16;
  const ValueFormat raw = is_f16 ? ValueFormat::kF16 : ValueFormat::kBf16;
  std::vector<float> weights(2 * 80);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = 0.5f + static_cast<float>(i % 7) * 0.25f;
  spec.layers.push_back({KeyFormat::kK8, ValueFormat::kV4, 0});
  spec.layers.push_back({KeyFormat::kK8, ValueFormat::kV8, 1});
  spec.layers.push_back({KeyFormat::kK6, ValueFormat::kV8, 4});
  spec.layers.push_back({KeyFormat::kK4, ValueFormat::kV4, 1});
  spec.layers.push_back({KeyFormat::kFp8E4m3, ValueFormat::kV8, 4, 0.125f});
  spec.layers.push_back({is_f16 ? KeyFormat::kF16 : KeyFormat::kBf16, raw, 0});
  spec.layers.push_back({KeyFormat::kK6, ValueFormat::kV4, 1, 1.0f, 0, weights});
  EXPECT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
  return spec;
}

TEST_F(DeviceSealTest, EveryFormatHasTheKernelsBytesAndTheHostsCodes) {
  for (const OriginalDtype dtype : {OriginalDtype::kF16, OriginalDtype::kBf16}) {
    for (const int32_t block_tokens : {64, 128}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(dtype) << " " << block_tokens);
      SealHarness harness(ShapeWithStaging(), SpecOfAllFormats(dtype, block_tokens));
      auto worker = harness.AttachOnDevice("worker");
      ASSERT_NE(worker.staging, nullptr);
      const OpenedCopy copy(worker.worker);
      const auto sealed = harness.Seal(worker, harness.Stage(worker, 1, 2));
      ASSERT_TRUE(sealed.ok()) << sealed.status();
      for (uint32_t i = 0; i < 2; ++i) {
        const BlockHandle& block = sealed->blocks[i];
        EXPECT_TRUE(harness.HasOriginals(worker.worker, block, 100 + i));
        EXPECT_EQ(harness.WrongRecords(worker.worker, block, Backend::kCuda, true), 0);
        EXPECT_EQ(harness.WrongRecords(worker.worker, block, Backend::kCpu, false), 0);
        EXPECT_EQ(harness.DifferentRecords(worker.worker, block, copy.base()), 0);
      }
      const StoreCounters counters = harness.engine.GetStats().counters;
      EXPECT_EQ(counters.device_blocks_sealed, 2);
      EXPECT_EQ(counters.device_blocks_fallen, 0);
      while (harness.engine.Scrub(kEverything) > 0) continue;
      EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 0);
      EXPECT_EQ(harness.engine.GetStats().counters.blocks_lost, 0);
      EXPECT_EQ(harness.FreeSlots(worker), 16);
      harness.engine.CheckInvariants();
    }
  }
}

TEST_F(DeviceSealTest, CallsOfMoreThanABatchAndWithBlocksThatAreThereAlready) {
  CacheSpec spec = TinySpec("batches");
  spec.layers.resize(1);
  SealHarness harness(ShapeWithStaging(80), spec);
  auto worker = harness.AttachOnDevice("worker", 80);
  ASSERT_NE(worker.staging, nullptr);
  const auto first = harness.Seal(worker, harness.Stage(worker, 2, 3));
  ASSERT_TRUE(first.ok()) << first.status();
  const auto all = harness.Seal(worker, harness.Stage(worker, 2, 75));
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->shared_count, 3);
  for (uint32_t i = 0; i < 75; ++i) {
    EXPECT_TRUE(harness.HasOriginals(worker.worker, all->blocks[i], 200 + i));
    if (i >= 4 && i < 62) continue;  // a batch ends after 64 new ones
    EXPECT_EQ(harness.WrongRecords(worker.worker, all->blocks[i], Backend::kCuda, true), 0);
  }
  EXPECT_EQ(harness.engine.GetStats().counters.device_blocks_sealed, 75);
}

// Blocks that were sealed before and have left the tier are the host's to promote.
TEST_F(DeviceSealTest, PromotionsAmongThemAreMadeByTheHost) {
  StoreShape shape = ShapeWithStaging(8);
  shape.backing_slots = 16;
  SealHarness harness(shape);
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  for (int32_t chain = 1; chain <= 2; ++chain) {
    const auto sealed = harness.Seal(worker, harness.Stage(worker, chain, 6));
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    ASSERT_TRUE(harness.engine.ReleaseLease(worker.worker.session, sealed->lease).ok());
  }
  ASSERT_GT(harness.engine.GetStats().counters.blocks_demoted, 0);
  const auto again = harness.Seal(worker, harness.Stage(worker, 1, 8));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->shared_count, 6);
  EXPECT_GT(harness.engine.GetStats().counters.blocks_promoted, 0);
  const OpenedCopy copy(worker.worker);
  for (uint32_t i = 0; i < 8; ++i) {
    EXPECT_TRUE(harness.HasOriginals(worker.worker, again->blocks[i], 100 + i));
    EXPECT_EQ(harness.WrongRecords(worker.worker, again->blocks[i], Backend::kCpu, false), 0);
    EXPECT_EQ(harness.DifferentRecords(worker.worker, again->blocks[i], copy.base()), 0);
  }
  harness.engine.CheckInvariants();
}

TEST_F(DeviceSealTest, MemoryIsClearedBeforeAWorkerHasIt) {
  SealHarness harness;
  const auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  const SlabLayout& layout = worker.worker.staging->layout();
  const uint8_t* const base = worker.staging->base();
  EXPECT_TRUE(layout.CheckHeader(base, layout.slab_bytes()).ok());
  EXPECT_EQ(std::count(base + kSlabPageBytes, base + layout.slab_bytes(), 0),
            layout.slab_bytes() - kSlabPageBytes);
}

TEST_F(DeviceSealTest, NumbersThatAreNotFiniteAreRefusedAndHoldNothing) {
  SealHarness harness;
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  const SlabLayout& layout = worker.worker.staging->layout();
  for (const bool is_value : {false, true}) {
    const std::vector<SealEntry> entries = harness.Stage(worker, 1, 2);
    const int32_t slot = entries[1].staging_slot;
    auto* const rows = reinterpret_cast<uint16_t*>(
        worker.staging->base() +
        (is_value ? layout.value_offset(slot, 1, 0) : layout.key_offset(slot, 1, 0)));
    rows[3 * 64 + 5] = 0x7e00;
    const auto sealed = harness.Seal(worker, entries);
    EXPECT_EQ(ReasonOf(sealed.status()), is_value ? "NON_FINITE_VALUE" : "NON_FINITE_KEY");
    EXPECT_THAT(std::string(sealed.status().message()),
                testing::HasSubstr("layer 1, KV head 0, tokens from 0"));
    EXPECT_THAT(std::string(sealed.status().message()),
                testing::HasSubstr("of token 3 of the tile, channel 5"));
  }
  EXPECT_EQ(harness.CountPrefix(1, 2), 0);
  EXPECT_EQ(harness.FreeSlots(worker), 16);
  EXPECT_EQ(harness.engine.GetStats().counters.device_blocks_fallen, 0);
  harness.engine.CheckInvariants();
}

// A process that writes to its staging memory without end, with numbers that can be sealed.
class WriterProcess {
 public:
  WriterProcess(uint8_t* base, const SlabLayout& layout) : pid_(fork()) {
    if (pid_ != 0) return;
    auto* const numbers = reinterpret_cast<volatile uint16_t*>(base + layout.key_offset(0, 0, 0));
    const int64_t count = layout.slot_count() * layout.slot_bytes() / 2;
    for (uint32_t i = 0;; ++i) numbers[i * 2654435761u % count] = 0x3000 + (i >> 8) % 0x800;
  }
  ~WriterProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  const pid_t pid_;
};

TEST_F(DeviceSealTest, RecordsAreOfTheOriginalsThatAreKeptWhateverTheWorkerWrites) {
  CacheSpec spec = TinySpec("raced");
  SealHarness harness(ShapeWithStaging(), spec);
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  const OpenedCopy copy(worker.worker);
  const WriterProcess writer(worker.staging->base(), worker.worker.staging->layout());
  int changed = 0;
  for (int32_t round = 0; round < 10; ++round) {
    const auto sealed = harness.Seal(worker, harness.Stage(worker, 10 + round, 2));
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    for (int32_t i = 0; i < 2; ++i) {
      const BlockHandle& block = sealed->blocks[i];
      changed += harness.HasOriginals(worker.worker, block, (10 + round) * 100 + i) ? 0 : 1;
      ASSERT_EQ(harness.WrongRecords(worker.worker, block, Backend::kCuda, true), 0);
      ASSERT_EQ(harness.DifferentRecords(worker.worker, block, copy.base()), 0);
    }
    ASSERT_TRUE(harness.engine.ReleaseLease(worker.worker.session, sealed->lease).ok());
  }
  EXPECT_GT(changed, 0) << "the worker has written in time";
  while (harness.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(harness.engine.GetStats().counters.blocks_lost, 0);
  EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 0);
}

// What becomes of a block when a call of the device fails.
struct FailedCall {
  const char* failure;  // of on_cpu/sharing, or "" and a call of kernels/cuda
  RuntimeCall call = RuntimeCall::kLaunch;
  int skipped = 0;
  const char* reason = "";  // of the seal; "" where it went well
  int sealed_count = 0;
  int fallen_count = 0;
  bool is_withdrawn = false;
};

void ExpectOutcome(const FailedCall& one) {
  SCOPED_TRACE(testing::Message() << one.failure << " " << static_cast<int>(one.call) << "@"
                                  << one.skipped);
  SealHarness harness;
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  const OpenedCopy copy(worker.worker);
  const std::vector<SealEntry> entries = harness.Stage(worker, 1, 1);
  InjectFailures(one.failure);
  if (*one.failure == 0) cuda_on_cpu::InjectFailure(one.call, one.skipped, cudaErrorLaunchFailure);
  const auto sealed = harness.Seal(worker, entries);
  InjectFailures("");
  EXPECT_EQ(ReasonOf(sealed.status()), one.reason) << sealed.status();
  EXPECT_EQ(copy.is_ready(), !one.is_withdrawn);
  const StoreStats stats = harness.engine.GetStats();
  EXPECT_EQ(stats.counters.device_blocks_sealed, one.sealed_count);
  EXPECT_EQ(stats.counters.device_blocks_fallen, one.fallen_count);
  EXPECT_EQ(stats.counters.device_blocks_failed, *one.reason == 0 ? 0 : 1);
  EXPECT_EQ(harness.CountPrefix(1, 1), sealed.ok() ? 1 : 0);
  EXPECT_EQ(stats.caches.front().device_staging_error.ok(),
            one.fallen_count == 0 && *one.reason == 0);
  if (sealed.ok()) {
    const BlockHandle& block = sealed->blocks[0];
    EXPECT_TRUE(harness.HasOriginals(worker.worker, block, 100));
    const Backend backend = one.sealed_count > 0 ? Backend::kCuda : Backend::kCpu;
    EXPECT_EQ(harness.WrongRecords(worker.worker, block, backend, true), 0);
    if (!one.is_withdrawn) {
      EXPECT_EQ(harness.DifferentRecords(worker.worker, block, copy.base()), 0);
    }
    while (harness.engine.Scrub(kEverything) > 0) continue;
    EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 0);
  }
  EXPECT_EQ(harness.FreeSlots(worker), 16);
  harness.engine.CheckInvariants();
}

TEST_F(DeviceSealTest, EveryCallOfTheDeviceThatFailsSealsOnTheHostOrNothing) {
  const FailedCall calls[] = {
      {.failure = "cudaMemcpyAsync=719", .reason = "DEVICE_FAILED"},
      {.failure = "cudaMemcpyAsync=719@2", .reason = "DEVICE_FAILED"},
      {.failure = "cudaStreamSynchronize=214", .reason = "DEVICE_FAILED"},
      {.failure = "*=46", .reason = "DEVICE_FAILED"},
      {.failure = "cudaMemcpyAsync=719@3", .fallen_count = 1, .is_withdrawn = true},
      {.failure = "cudaStreamSynchronize=214@2", .fallen_count = 1, .is_withdrawn = true},
      {.failure = "cudaStreamSynchronize=214@3", .sealed_count = 1, .is_withdrawn = true},
      {.failure = "cudaEventRecord=46", .sealed_count = 1, .is_withdrawn = true},
      {.failure = "cudaSetDevice=101", .fallen_count = 1},
      {.failure = "cudaSetDevice=101@2", .sealed_count = 1}};
  for (const FailedCall& one : calls) ExpectOutcome(one);
}

// Tables of two layers and a launch for each, then those of the copy.
TEST_F(DeviceSealTest, EveryCallOfTheKernelsThatFailsSealsOnTheHost) {
  const std::pair<RuntimeCall, int> counts[] = {{RuntimeCall::kAllocate, 2},
                                                {RuntimeCall::kCopy, 2},
                                                {RuntimeCall::kLaunch, 2},
                                                {RuntimeCall::kSynchronize, 1}};
  for (const auto& [call, count] : counts) {
    for (int skipped = 0; skipped < count; ++skipped) {
      ExpectOutcome({.failure = "", .call = call, .skipped = skipped, .fallen_count = 1});
    }
    // The host's bytes are copied instead.
    ExpectOutcome({.failure = "", .call = call, .skipped = count, .sealed_count = 1});
  }
}

// Staging memory for 16 slots and some more, not for twice as many.
StoreShape ShapeForOneWorker() {
  StoreShape shape = ShapeWithStaging();
  shape.config.device_staging_memory_bytes =
      SlabLayout(TinySpec(), SlabKind::kStaging, 16).slab_bytes() * 3 / 2;
  return shape;
}

TEST_F(DeviceSealTest, WorkerGetsNoneWhereTheDeviceHasNoneAndSealsOnTheHost) {
  const std::pair<const char*, const char*> failures[] = {
      {"cudaMalloc=2", "DEVICE_MEMORY_FULL"},
      {"cudaMalloc=2@2", "DEVICE_MEMORY_FULL"},
      {"cudaMalloc=2@3", "DEVICE_MEMORY_FULL"},
      {"cudaHostRegister=1", "DEVICE_FAILED"},
      {"cudaHostRegister=2@2", "DEVICE_MEMORY_FULL"},
      {"cudaHostGetDevicePointer=1", "DEVICE_FAILED"},
      {"cudaStreamCreateWithFlags=46", "DEVICE_FAILED"},
      {"cudaStreamCreateWithFlags=46@2", "DEVICE_FAILED"},
      {"cudaIpcGetMemHandle=801", "DEVICE_IMPORT_REFUSED"},
      {"cudaMemsetAsync=719", "DEVICE_FAILED"},
      {"cudaMemcpyAsync=719", "DEVICE_FAILED"},
      {"cudaStreamSynchronize=214", "DEVICE_FAILED"}};
  for (const auto& [failure, reason] : failures) {
    SCOPED_TRACE(failure);
    SealHarness harness(ShapeForOneWorker());
    InjectFailures(failure);
    auto worker = harness.AttachOnDevice("worker");
    InjectFailures("");
    EXPECT_EQ(worker.staging, nullptr);
    EXPECT_EQ(DeviceExportAt(worker.worker.mapped_staging.data()).magic, 0u);
    EXPECT_EQ(ReasonOf(harness.engine.GetStats().caches.front().device_staging_error), reason);
    EXPECT_TRUE(harness.Put(worker.worker, 3, 0, 2).ok());
    const auto refused = harness.Seal(worker, harness.Write(worker.worker, 4, 0, 2));
    EXPECT_EQ(ReasonOf(refused.status()), "DEVICE_STAGING_MISSING") << refused.status();
    EXPECT_EQ(harness.FreeSlots(worker), 16);
    EXPECT_NE(harness.AttachOnDevice("next").staging, nullptr) << "nothing is left behind";
  }
}

TEST_F(DeviceSealTest, IsGivenWithinItsMemoryAndTakenBackWithTheSession) {
  SealHarness harness(ShapeForOneWorker());
  auto first = harness.AttachOnDevice("first");
  ASSERT_NE(first.staging, nullptr);
  EXPECT_EQ(harness.AttachOnDevice("second").staging, nullptr);
  const absl::Status error = harness.engine.GetStats().caches.front().device_staging_error;
  EXPECT_EQ(ReasonOf(error), "STAGING_MEMORY_FULL") << error;
  EXPECT_NE(harness.AttachOnDevice("small", 4).staging, nullptr);
  first.staging.reset();
  harness.engine.EndSession(first.worker.session, "it was detached");
  EXPECT_NE(harness.AttachOnDevice("third").staging, nullptr);
}

TEST_F(DeviceSealTest, RecordSaysThatTheMemoryIsGoneOnceTheSessionHasEnded) {
  SealHarness harness;
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  worker.worker.staging.reset();
  harness.engine.EndSession(worker.worker.session, "it was detached");
  harness.pool.Join();
  EXPECT_FALSE(worker.staging->IsReady());
  const Mapping& mapped = worker.worker.mapped_staging;
  EXPECT_EQ(
      ReasonOf(ImportedMemory::Open(RegisteredDeviceRuntime(), mapped.data(), mapped.size_bytes())
                   .status()),
      "DEVICE_STAGING_MISSING");
}

TEST_F(DeviceSealTest, NoneIsGivenUnlessConfigFormatsAndCopyAllowIt) {
  StoreShape none = ShapeWithStaging();
  none.config.device_staging_memory_bytes = 0;
  StoreShape no_copy = ShapeWithStaging();
  no_copy.device = {};
  CacheSpec dithered = TinySpec("dithered");
  dithered.layers[1].key_format = KeyFormat::kK8D;
  const struct {
    StoreShape shape;
    CacheSpec spec;
    const char* reason;
  } cases[] = {{none, TinySpec(), "DEVICE_STAGING_MISSING"},
               {no_copy, TinySpec(), "DEVICE_STAGING_MISSING"},
               {ShapeWithStaging(), dithered, "DEVICE_LACKS_OPERATION"}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.spec.model + " " + one.reason);
    SealHarness harness(one.shape, one.spec);
    auto worker = harness.AttachOnDevice("worker");
    EXPECT_EQ(worker.staging, nullptr);
    EXPECT_EQ(ReasonOf(harness.engine.GetStats().caches.front().device_staging_error), one.reason);
    EXPECT_TRUE(harness.Put(worker.worker, 1, 0, 2).ok());
  }
  SealHarness harness;
  const auto plain = harness.Attach("plain");
  EXPECT_EQ(DeviceExportAt(plain.mapped_staging.data()).magic, 0u) << "it has not asked";
  EXPECT_TRUE(harness.engine.GetStats().caches.front().device_staging_error.ok());
}

TEST_F(DeviceSealTest, NothingIsSealedThereOnceTheCopyIsWithdrawn) {
  SealHarness harness;
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  InjectFailures("cudaMemcpyAsync=719");
  harness.PutUnleased(worker.worker, 7, 0, 1);
  InjectFailures("");
  const auto refused = harness.Seal(worker, harness.Stage(worker, 1, 2));
  EXPECT_EQ(ReasonOf(refused.status()), "DEVICE_STAGING_MISSING") << refused.status();
  EXPECT_EQ(harness.CountPrefix(1, 2), 0);
  EXPECT_EQ(harness.FreeSlots(worker), 16);
  EXPECT_EQ(harness.engine.GetStats().counters.device_blocks_failed, 2);
  EXPECT_EQ(harness.AttachOnDevice("late").staging, nullptr);
}

// Bounds may be rounded otherwise by who sealed a block than by the host that repairs it.
TEST_F(DeviceSealTest, RepairOfOneRecordLeavesTheOthersAsTheyWereSealed) {
  CacheSpec spec = TinySpec("repaired");
  spec.layers[0].witness_bands = 1;
  spec.layers[1].witness_bands = 1;
  SealHarness harness(ShapeWithStaging(), spec);
  auto worker = harness.AttachOnDevice("worker");
  ASSERT_NE(worker.staging, nullptr);
  const auto sealed = harness.Seal(worker, harness.Stage(worker, 1, 1));
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  const SlabLayout& layout = harness.device_layout;
  const int32_t slot = sealed->blocks[0].device.slot;
  uint8_t* const base = worker.worker.device_memory->base();
  const int64_t scan_bytes = layout.tile_layout(1).scan_bytes;
  uint8_t* const kept = base + layout.scan_offset(slot, 1, 0, 0);
  // A bound of another rounding, as whole a record as before.
  TileHeader header;
  std::memcpy(&header, kept, sizeof(header));
  header.key_norm = std::nextafter(header.key_norm, 1e9f);
  std::memcpy(kept, &header, sizeof(header));
  header.scan_checksum = ScanChecksum(layout.tile_layout(1), kept);
  std::memcpy(kept, &header, sizeof(header));
  const std::vector<uint8_t> before(kept, kept + scan_bytes);
  base[layout.scan_offset(slot, 0, 0, 0) + 200] ^= 1;
  while (harness.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 1);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), kept));
  EXPECT_EQ(harness.WrongRecords(worker.worker, sealed->blocks[0], Backend::kCpu, false), 0);
  const OpenedCopy copy(worker.worker);
  EXPECT_EQ(std::memcmp(copy.base() + layout.scan_offset(slot, 1, 0, 0), kept,
                        static_cast<size_t>(scan_bytes)),
            0);
  while (harness.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 1) << "it is good now";
}

}  // namespace
}  // namespace certkv::kvstore
