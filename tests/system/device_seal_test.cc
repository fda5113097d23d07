// Sequences whose pages lie on the store's GPU are sealed there, and read with certificates as any
// other; whatever the GPU, its driver or the store do not do, they go through host memory, or
// nothing is held.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/cpp/block_copy.h"
#include "clients/cpp/paged_cache.h"
#include "kernels/core/device_export.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_runtime.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/device.h"
#include "kernels/ops/device_runtime.h"
#include "tests/device/paged_engine.h"
#include "tests/support/http_client.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::PagedCache;
using client::Sequence;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kTokenCount = 300;  // 4 blocks and a tail of 44
constexpr int32_t kSlots = 6;

class DeviceSealSystemTest : public SystemTest {
 protected:
  ~DeviceSealSystemTest() override {
    cuda_sharing::InjectFailures("");
    worker_.reset();
    RegisterDeviceRuntime(nullptr);
    RegisterDevice(nullptr);
  }
  void Open(const PagedEngineShape& shape = {"KBTHD"}, const std::string& staging = "16MiB",
            KeyFormat key_format = KeyFormat::kK8) {
    ClusterAccess access;
    http_port_ = FreePort();
    access.store_yaml =
        absl::StrCat("server:\n  http_address: 127.0.0.1:", http_port_,
                     "\nkvstore:\n  device_memory: 8MiB\n  backing_memory: 32MiB\n  device: cuda\n",
                     "  device_staging_memory: ", staging, "\n");
    access.certifier_yaml = "certifier:\n  device: cuda\n";
    access.on_device = true;
    auto cluster = Cluster::Start(GetParam(), "", access);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    CacheSpec spec = SmallSpec();
    spec.layers[0].key_format = key_format;
    if (shape.dtype == PagedDtype::kBf16) spec.original_dtype = OriginalDtype::kBf16;
    ASSERT_TRUE(cuda::UseDevice().ok());
    engine_ = std::make_unique<PagedEngine>(spec, shape, 21, RegisteredDeviceRuntime());
    auto cache = PagedCache::Create(spec, engine_->options);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_ = *std::move(cache);
    Attach();
    for (int32_t i = 0; i < kTokenCount; ++i) token_ids_.push_back(7000 + i);
    keys_ = ComputeBlockKeys(context(), token_ids_, spec.block_tokens);
  }
  void Attach() {
    worker_.reset();
    client::Options options = cluster_->options();
    options.pressure_wait_ms = 0;
    options.staging_slot_count = kSlots;
    options.device_staging = true;
    auto worker = client::Worker::Attach(options, engine_->spec());
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }
  BlockKeyContext context() const { return worker_->KeyContext(0); }

  // Puts the sequence from its pages, which works, and reads it with certificates.
  void PutAndRead() {
    auto sequence = worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context());
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    EXPECT_EQ((*sequence)->blocks().size(), 4u);
    EXPECT_EQ((*sequence)->tail().token_count, kTokenCount % 64);
    ExpectEnginesNumbers(**sequence);
    TestSequence data(worker_->spec(), kTokenCount, 1);
    data.token_ids = token_ids_;
    for (int32_t layer = 0; layer < 2; ++layer) {
      data.keys[layer] = engine_->RowsOf(layer, 0, kTokenCount);
      data.values[layer] = engine_->RowsOf(layer, 1, kTokenCount);
    }
    auto request = OpenRequest("paged");
    auto attention = client::Attention::Open(*worker_, **sequence, *request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    for (const auto& result : ReadAndCheck(**attention, data, kTokenCount, 3)) {
      EXPECT_FALSE(result.in_process);
    }
    attention->reset();
    EXPECT_EQ(FreeSlots(), kSlots - 1) << "all but the tail's";
  }
  void ExpectEnginesNumbers(const Sequence& sequence) {
    const CacheSpec& spec = worker_->spec();
    std::vector<uint16_t> block(client::BlockElements(spec));
    for (size_t b = 0; b < sequence.blocks().size(); ++b) {
      const absl::Status copied = client::CopyBlock(*worker_, sequence, static_cast<int64_t>(b),
                                                    client::BlockSource::kOriginal, block.data());
      ASSERT_TRUE(copied.ok()) << copied;
      ExpectRows(block.data(), static_cast<int64_t>(b) * spec.block_tokens, spec.block_tokens);
    }
    const client::TailRef& tail = sequence.tail();
    if (tail.staging_slot < 0) return;
    const int64_t at = worker_->staging_layout().key_offset(tail.staging_slot, 0, 0);
    ExpectRows(reinterpret_cast<const uint16_t*>(worker_->staging_base() + at),
               sequence.token_count() - tail.token_count, tail.token_count);
  }
  void ExpectRows(const uint16_t* numbers, int64_t first_token, int64_t token_count) {
    const CacheSpec& spec = worker_->spec();
    int64_t wrong = 0;
    for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
      for (int32_t head = 0; head < spec.kv_head_count; ++head) {
        for (int part = 0; part < 2; ++part) {
          const int32_t channels = part == 0 ? spec.head_dim : spec.value_dim;
          for (int64_t i = 0; i < token_count * channels; ++i) {
            wrong += numbers[i] != engine_->OriginalAt(layer, part, first_token + i / channels,
                                                       head, static_cast<int32_t>(i % channels));
          }
          numbers += int64_t{spec.block_tokens} * channels;
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "from token " << first_token;
  }
  int32_t FreeSlots() {
    std::vector<client::StagedBlocks> staged;
    for (;;) {
      auto one = worker_->StageBlocks(*cache_, engine_->pages(), 0, 1);
      if (!one.ok()) {
        EXPECT_EQ(ReasonOf(one.status()), "STAGING_FULL") << one.status();
        return static_cast<int32_t>(staged.size());
      }
      staged.push_back(*std::move(one));
    }
  }
  // Blocks that were sealed on the GPU, that fell to the host there, that failed there.
  void ExpectStaged(int sealed, int fallen, int failed) {
    const std::string text = HttpGet(http_port_, "/metrics").body;
    const std::pair<const char*, int> counts[] = {
        {"sealed", sealed}, {"fallen", fallen}, {"failed", failed}};
    for (const auto& [result, count] : counts) {
      EXPECT_THAT(text,
                  HasSubstr(absl::StrCat("certkv_kvstore_device_staged_blocks_total{result=\"",
                                         result, "\"} ", count, "\n")));
    }
  }

  uint16_t http_port_ = 0;
  std::unique_ptr<PagedEngine> engine_;
  std::unique_ptr<PagedCache> cache_;
  std::unique_ptr<client::Worker> worker_;
  std::vector<int32_t> token_ids_;
  std::vector<BlockKey> keys_;
};

INSTANTIATE_TEST_SUITE_P(Shapes, DeviceSealSystemTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

TEST_P(DeviceSealSystemTest, ReadsOfBlocksThatTheGpuSealedAreCertified) {
  ASSERT_NO_FATAL_FAILURE(Open({"BKTHD", PagedDtype::kBf16, 32, 12}));
  PutAndRead();
  EXPECT_TRUE(worker_->device_staging().ok()) << worker_->device_staging();
  ExpectStaged(4, 0, 0);
  ASSERT_TRUE(cluster_->Stop().ok());
  EXPECT_THAT(cluster_->Logs(), Not(HasSubstr("device_sealing_fell_to_host")));
}

TEST_P(DeviceSealSystemTest, EveryDtypeAndLayoutGivesTheEnginesNumbers) {
  const PagedEngineShape shapes[] = {{"KBTHD"},
                                     {"LBTHD", PagedDtype::kF16, 24, 16},
                                     {"BKHTD", PagedDtype::kFp8E4m3, 24, 16},
                                     {"BHDTD", PagedDtype::kF16, 16, 24}};
  for (const PagedEngineShape& shape : shapes) {
    SCOPED_TRACE(shape.axes);
    worker_.reset();
    token_ids_.clear();
    ASSERT_NO_FATAL_FAILURE(Open(shape));
    auto sequence = worker_->LookupBlocks({});
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    const absl::Status appended =
        worker_->AppendPaged(**sequence, keys_, *cache_, engine_->pages());
    ASSERT_TRUE(appended.ok()) << appended;
    ExpectEnginesNumbers(**sequence);
    EXPECT_TRUE(worker_->device_staging().ok()) << worker_->device_staging();
    ExpectStaged(4, 0, 0);
  }
}

TEST_P(DeviceSealSystemTest, StagedBlocksAreOfTheMoment) {
  ASSERT_NO_FATAL_FAILURE(Open());
  auto staged = worker_->StageBlocks(*cache_, engine_->pages(), 0, 4);
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_TRUE(staged->is_on_device());
  EXPECT_EQ(FreeSlots(), kSlots - 4);
  const size_t memory_bytes = engine_->options.tensors[0].allocation_bytes;
  std::memset(engine_->memory(0), 0, memory_bytes);  // engines reuse pages
  auto sequence = worker_->LookupBlocks({});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ASSERT_TRUE(worker_->AppendStaged(**sequence, keys_, *std::move(staged)).ok());
  ExpectEnginesNumbers(**sequence);
  EXPECT_EQ(FreeSlots(), kSlots);
  ExpectStaged(4, 0, 0);
}

TEST_P(DeviceSealSystemTest, NumberThatIsNotFiniteLeavesNothingBehind) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const int32_t page = engine_->pages()[13];  // of the fourth block
  reinterpret_cast<uint16_t*>(engine_->memory(1))[int64_t{page} * 16 * 2 * 64 + 5] = 0x7e00;
  const absl::Status status =
      worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context()).status();
  EXPECT_EQ(ReasonOf(status), "NON_FINITE_KEY") << status;
  EXPECT_TRUE(worker_->device_staging().ok()) << "it isn't the GPU's fault";
  EXPECT_EQ(FreeSlots(), kSlots);
  ExpectStaged(0, 0, 0);
}

TEST_P(DeviceSealSystemTest, StoreWhoseGpuFailsHasTheHostsBlocksFromTheSamePages) {
  ASSERT_NO_FATAL_FAILURE(Open());
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaMemcpyAsync=719");
  PutAndRead();
  EXPECT_EQ(ReasonOf(worker_->device_staging()), "DEVICE_FAILED") << worker_->device_staging();
  ExpectStaged(0, 0, 4);
  ASSERT_TRUE(cluster_->Stop().ok());
  EXPECT_THAT(cluster_->Logs(), HasSubstr("device_sealing_fell_to_host"));
}

TEST_P(DeviceSealSystemTest, BlocksWhosePagesMayBeGoneAreSealedByTheHostOrRefused) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const auto keys = absl::MakeConstSpan(keys_);
  auto staged = worker_->StageBlocks(*cache_, engine_->pages(), 0, 2);
  auto next = worker_->StageBlocks(*cache_, engine_->pages(), 0, 2);
  auto sequence = worker_->LookupBlocks({});
  ASSERT_TRUE(staged.ok() && next.ok() && sequence.ok());
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaMemcpyAsync=719");
  const absl::Status refused =
      worker_->AppendStaged(**sequence, keys.subspan(0, 2), *std::move(staged));
  EXPECT_EQ(ReasonOf(refused), "DEVICE_FAILED") << refused;
  // It brings these, and fails after that.
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaSetDevice=101");
  const absl::Status fallen =
      worker_->AppendStaged(**sequence, keys.subspan(0, 2), *std::move(next));
  EXPECT_TRUE(fallen.ok()) << fallen;
  ExpectEnginesNumbers(**sequence);
  ExpectStaged(0, 2, 2);
  staged = worker_->StageBlocks(*cache_, engine_->pages(), 0, 1);
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_FALSE(staged->is_on_device()) << "it was given up";
  staged->DropFirst(1);
  EXPECT_EQ(FreeSlots(), kSlots);
}

TEST_P(DeviceSealSystemTest, WorkerWhoseDriverOpensNoHandleGoesThroughHostMemory) {
  ASSERT_NO_FATAL_FAILURE(Open());
  cuda_sharing::InjectFailures("cudaIpcOpenMemHandle=205");
  PutAndRead();
  EXPECT_EQ(ReasonOf(worker_->device_staging()), "DEVICE_IMPORT_REFUSED");
  cuda_sharing::InjectFailures("");
  EXPECT_FALSE(worker_->StageBlocks(*cache_, engine_->pages(), 0, 1)->is_on_device());
  ExpectStaged(0, 0, 0);
}

TEST_P(DeviceSealSystemTest, KernelThatFailsToGatherGoesThroughHostMemory) {
  ASSERT_NO_FATAL_FAILURE(Open());
  cuda_on_cpu::InjectFailure(cuda_on_cpu::RuntimeCall::kLaunch, 0, cudaErrorLaunchFailure);
  PutAndRead();
  EXPECT_EQ(ReasonOf(worker_->device_staging()), "DEVICE_FAILED") << worker_->device_staging();
  ExpectStaged(0, 0, 0);
}

TEST_P(DeviceSealSystemTest, RecordThatIsNotOfThisBootOrGpuIsNotOpened) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const struct {
    void (*spoil)(DeviceExport*);
    const char* reason;
  } cases[] = {{[](DeviceExport* r) { r->boot_id[3] ^= 1; }, "DEVICE_HANDLE_STALE"},
               {[](DeviceExport* r) { r->export_id ^= 1; }, "DEVICE_HANDLE_STALE"},
               {[](DeviceExport* r) { r->device_uuid[3] ^= 1; }, "DEVICE_NOT_HERE"},
               {[](DeviceExport* r) { r->state = DeviceExportState::kWithdrawn; },
                "DEVICE_STAGING_MISSING"}};
  for (const auto& one : cases) {
    ASSERT_NO_FATAL_FAILURE(Attach());
    one.spoil(&DeviceExportAt(const_cast<uint8_t*>(worker_->staging_base())));
    const auto staged = worker_->StageBlocks(*cache_, engine_->pages(), 0, 1);
    ASSERT_TRUE(staged.ok()) << staged.status();
    EXPECT_FALSE(staged->is_on_device());
    EXPECT_EQ(ReasonOf(worker_->device_staging()), one.reason) << worker_->device_staging();
  }
}

TEST_P(DeviceSealSystemTest, CopyThatIsWithdrawnIsSeenBeforeAnythingIsStaged) {
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_TRUE(worker_->StageBlocks(*cache_, engine_->pages(), 0, 1)->is_on_device());
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaMemcpyAsync=719");
  const std::vector<uint16_t> zeros(client::BlockElements(worker_->spec()));
  auto sequence = worker_->LookupBlocks({});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  const BlockKey other = ComputeBlockKeys(context(), std::vector<int32_t>(64, 1), 64)[0];
  ASSERT_TRUE(worker_->AppendBlocks(**sequence, {other}, {zeros.data()}).ok());
  cluster_->SetDeviceFailures(ClusterService::kStore, "");
  PutAndRead();
  EXPECT_EQ(ReasonOf(worker_->device_staging()), "DEVICE_STAGING_MISSING");
  ExpectStaged(0, 0, 0);
}

TEST_P(DeviceSealSystemTest, PagesOfAnotherRuntimeGoThroughHostMemoryAndTheOthersDoNot) {
  ASSERT_NO_FATAL_FAILURE(Open());
  EXPECT_TRUE(worker_->StageBlocks(*cache_, engine_->pages(), 0, 1)->is_on_device());
  cuda::CudaDeviceRuntime other;
  client::PagedCacheOptions options = engine_->options;
  options.runtime = &other;
  auto cache = PagedCache::Create(worker_->spec(), options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_FALSE(worker_->StageBlocks(**cache, engine_->pages(), 0, 1)->is_on_device());
  EXPECT_EQ(ReasonOf(worker_->device_staging()), "DEVICE_NOT_HERE") << worker_->device_staging();
  EXPECT_TRUE(worker_->StageBlocks(*cache_, engine_->pages(), 0, 1)->is_on_device());
  EXPECT_TRUE(worker_->device_staging().ok());
  worker_.reset();  // before the runtime that pinned its slots
}

TEST_P(DeviceSealSystemTest, StoreThatGivesNoneAndFormatsWithoutAKernelAreTheHosts) {
  for (const bool is_off : {true, false}) {
    worker_.reset();
    token_ids_.clear();
    ASSERT_NO_FATAL_FAILURE(
        Open({"KBTHD"}, is_off ? "0" : "16MiB", is_off ? KeyFormat::kK8 : KeyFormat::kK8D));
    PutAndRead();
    EXPECT_EQ(ReasonOf(worker_->device_staging()), "DEVICE_STAGING_MISSING");
    ExpectStaged(0, 0, 0);
    worker_.reset();
    ASSERT_TRUE(cluster_->Stop().ok());
    EXPECT_THAT(cluster_->Logs(), HasSubstr("device_sealing_fell_to_host"));
    EXPECT_THAT(cluster_->Logs(), HasSubstr(is_off ? "device_staging_memory" : "K8D keys"));
  }
}

}  // namespace
}  // namespace certkv
