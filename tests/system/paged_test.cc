// Sequences that are sealed straight from an engine's pages: the same blocks, and the same
// certified reads, as from rows; and whatever is wrong with pages or table, nothing of it is in the
// store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "clients/cpp/block_copy.h"
#include "clients/cpp/paged_cache.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/device.h"
#include "kernels/ops/device_runtime.h"
#include "tests/device/paged_engine.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::PagedCache;
using client::Sequence;

constexpr int64_t kTokenCount = 300;  // 4 blocks and a tail of 44

class PagedTest : public SystemTest {
 protected:
  ~PagedTest() override {
    cuda_sharing::InjectFailures("");
    sequences_.clear();
    worker_.reset();
    RegisterDeviceRuntime(nullptr);
    RegisterDevice(nullptr);
  }
  void Open(const PagedEngineShape& shape, bool on_device = false) {
    StartCluster();
    CacheSpec spec = SmallSpec();
    if (shape.dtype == PagedDtype::kBf16) spec.original_dtype = OriginalDtype::kBf16;
    if (on_device) {
      ASSERT_TRUE(cuda::UseDevice().ok());
    }
    engine_ = std::make_unique<PagedEngine>(spec, shape, 21,
                                            on_device ? RegisteredDeviceRuntime() : nullptr);
    auto cache = PagedCache::Create(spec, engine_->options);
    ASSERT_TRUE(cache.ok()) << cache.status();
    cache_ = *std::move(cache);
    client::Options options = cluster_->options();
    options.pressure_wait_ms = 0;
    options.staging_slot_count = 6;
    auto worker = client::Worker::Attach(options, spec);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    for (int32_t i = 0; i < kTokenCount; ++i) token_ids_.push_back(7000 + i);
    keys_ = ComputeBlockKeys(context(), token_ids_, spec.block_tokens);
  }
  BlockKeyContext context() const { return worker_->KeyContext(0); }

  // Every row of the sequence is in the store as the engine has it, tail included.
  void ExpectEnginesNumbers(const Sequence& sequence) {
    const CacheSpec& spec = worker_->spec();
    std::vector<uint16_t> block(client::BlockElements(spec));
    for (size_t b = 0; b < sequence.blocks().size(); ++b) {
      const absl::Status copied = client::CopyBlock(*worker_, sequence, static_cast<int64_t>(b),
                                                    client::BlockSource::kOriginal, block.data());
      ASSERT_TRUE(copied.ok()) << copied;
      ExpectRows(reinterpret_cast<const uint8_t*>(block.data()), 0, b * spec.block_tokens,
                 spec.block_tokens);
    }
    const client::TailRef& tail = sequence.tail();
    if (tail.staging_slot < 0) return;
    ExpectRows(worker_->staging_base(),
               worker_->staging_layout().key_offset(tail.staging_slot, 0, 0),
               sequence.token_count() - tail.token_count, tail.token_count);
  }
  // Slots of the worker that can be reserved now.
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
  int32_t StoredBlocks() {
    auto found = worker_->LookupBlocks(keys_);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? static_cast<int32_t>((*found)->blocks().size()) : -1;
  }

  std::unique_ptr<PagedEngine> engine_;
  std::unique_ptr<PagedCache> cache_;
  std::unique_ptr<client::Worker> worker_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<int32_t> token_ids_;
  std::vector<BlockKey> keys_;

 private:
  void ExpectRows(const uint8_t* base, int64_t offset, int64_t first_token, int64_t token_count) {
    const CacheSpec& spec = worker_->spec();
    const auto* numbers = reinterpret_cast<const uint16_t*>(base + offset);
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
};

INSTANTIATE_TEST_SUITE_P(Shapes, PagedTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

TEST_P(PagedTest, SequenceOfPagesIsTheSequenceOfItsRows) {
  Open({"KBTHD"});
  auto paged = worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context());
  ASSERT_TRUE(paged.ok()) << paged.status();
  EXPECT_EQ((*paged)->shared_block_count(), 0);
  EXPECT_EQ((*paged)->tail().token_count, kTokenCount % 64);
  ExpectEnginesNumbers(**paged);
  // Its rows are found under the same keys.
  std::vector<std::vector<uint16_t>> rows;
  std::vector<client::LayerKv> layers;
  for (int32_t layer = 0; layer < 2; ++layer) {
    rows.push_back(engine_->RowsOf(layer, 0, kTokenCount));
    rows.push_back(engine_->RowsOf(layer, 1, kTokenCount));
  }
  for (int32_t layer = 0; layer < 2; ++layer) {
    layers.push_back({rows[2 * layer].data(), rows[2 * layer + 1].data()});
  }
  auto put = worker_->PutSequence(token_ids_, layers, context());
  ASSERT_TRUE(put.ok()) << put.status();
  EXPECT_EQ((*put)->shared_block_count(), 4);
  // And reads of the sequence that was put from pages are certified against these rows.
  TestSequence data(worker_->spec(), kTokenCount, 1);
  data.token_ids = token_ids_;
  for (int32_t layer = 0; layer < 2; ++layer) {
    data.keys[layer] = rows[2 * layer];
    data.values[layer] = rows[2 * layer + 1];
  }
  auto request = OpenRequest("paged");
  auto attention = client::Attention::Open(*worker_, **paged, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  EXPECT_EQ(ReadAndCheck(**attention, data, kTokenCount, 3).size(), 2u);
  attention->reset();
}

TEST_P(PagedTest, BlocksOfEightBitCodesAreTheirProducts) {
  Open({"BKHTD", PagedDtype::kFp8E4m3, 24, 16});
  auto sequence = worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context());
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ExpectEnginesNumbers(**sequence);
}

TEST_P(PagedTest, BlocksAreAppendedByKeyAfterThoseThatWereFound) {
  Open({"BHDT", PagedDtype::kBf16, 32, 12});
  auto first = worker_->LookupBlocks({});
  ASSERT_TRUE(first.ok()) << first.status();
  const auto keys = absl::MakeConstSpan(keys_);
  ASSERT_TRUE(worker_->AppendPaged(**first, keys.subspan(0, 3), *cache_, engine_->pages()).ok());
  EXPECT_EQ((*first)->token_count(), 192);
  auto second = worker_->LookupBlocks(keys_);
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_EQ((*second)->blocks().size(), 3u);
  ASSERT_TRUE(worker_->AppendPaged(**second, keys.subspan(3), *cache_, engine_->pages()).ok());
  ASSERT_EQ((*second)->blocks().size(), 4u);
  ExpectEnginesNumbers(**second);
  EXPECT_EQ(FreeSlots(), 6);
}

TEST_P(PagedTest, StagedBlocksAreOfTheMomentAndGiveTheirSlotsBack) {
  Open({"KBTHD"});
  auto staged = worker_->StageBlocks(*cache_, engine_->pages(), 0, 4);
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_EQ(FreeSlots(), 2);
  auto too_many = worker_->StageBlocks(*cache_, engine_->pages(), 0, 3);
  EXPECT_EQ(ReasonOf(too_many.status()), "STAGING_FULL");
  EXPECT_EQ(ReasonOf(worker_->StageBlocks(*cache_, engine_->pages(), 0, 0).status()),
            "SEQUENCE_INVALID");
  EXPECT_EQ(ReasonOf(worker_->StageBlocks(*cache_, engine_->pages(), 0, 7).status()),
            "SEQUENCE_INVALID");
  auto sequence = worker_->LookupBlocks({});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  // Engines reuse pages now.
  const size_t memory_bytes = engine_->options.tensors[0].allocation_bytes;
  std::vector<uint8_t> before(engine_->memory(0), engine_->memory(0) + memory_bytes);
  std::memset(engine_->memory(0), 0, memory_bytes);
  auto one = worker_->AppendStaged(**sequence, {keys_[0]}, *std::move(staged));
  EXPECT_EQ(ReasonOf(one), "SEQUENCE_INVALID") << one;  // four blocks, one key
  EXPECT_EQ(FreeSlots(), 6);
  std::memcpy(engine_->memory(0), before.data(), memory_bytes);
  staged = worker_->StageBlocks(*cache_, engine_->pages(), 0, 4);
  ASSERT_TRUE(staged.ok()) << staged.status();
  std::memset(engine_->memory(0), 0, memory_bytes);
  ASSERT_TRUE(worker_->AppendStaged(**sequence, keys_, *std::move(staged)).ok());
  ExpectEnginesNumbers(**sequence);
  EXPECT_EQ(FreeSlots(), 6);
  // What is there already is dropped by the one who staged it.
  staged = worker_->StageBlocks(*cache_, engine_->pages(), 64, 3);
  ASSERT_TRUE(staged.ok());
  staged->DropFirst(2);
  EXPECT_EQ(staged->block_count(), 1);
  EXPECT_EQ(FreeSlots(), 5);
}

TEST_P(PagedTest, NothingIsSealedOfATableThatIsWrong) {
  Open({"KBTHD"});
  auto sequence = worker_->LookupBlocks({});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  std::vector<int32_t> pages = engine_->pages();
  pages[9] = 24;  // of the third block
  EXPECT_EQ(ReasonOf(worker_->PutPaged(token_ids_, *cache_, pages, context()).status()),
            "BLOCK_TABLE_INVALID");
  EXPECT_EQ(ReasonOf(worker_->AppendPaged(**sequence, keys_, *cache_, pages)),
            "BLOCK_TABLE_INVALID");
  EXPECT_EQ(ReasonOf(worker_->StageBlocks(*cache_, pages, 128, 1).status()), "BLOCK_TABLE_INVALID");
  pages.resize(18);  // 288 tokens
  pages[9] = 0;
  EXPECT_EQ(ReasonOf(worker_->PutPaged(token_ids_, *cache_, pages, context()).status()),
            "BLOCK_TABLE_INVALID");
  // A cache of another spec.
  CacheSpec other = worker_->spec();
  other.model = "another";
  auto cache = PagedCache::Create(other, engine_->options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ(ReasonOf(worker_->PutPaged(token_ids_, **cache, engine_->pages(), context()).status()),
            "PAGED_CACHE_INVALID");
  EXPECT_EQ(StoredBlocks(), 0);
  EXPECT_EQ(FreeSlots(), 6);
}

TEST_P(PagedTest, NumberThatIsNotFiniteLeavesNothingBehind) {
  Open({"KBTHD"});
  const int32_t page = engine_->pages()[13];  // of the fourth block
  reinterpret_cast<uint16_t*>(engine_->memory(1))[int64_t{page} * 16 * 2 * 64 + 5] = 0x7e00;
  const absl::Status status =
      worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context()).status();
  EXPECT_EQ(ReasonOf(status), "NON_FINITE_KEY") << status;
  EXPECT_EQ(StoredBlocks(), 0);
  EXPECT_EQ(FreeSlots(), 6);
}

TEST_P(PagedTest, DevicePagesAreSealedByTheKernel) {
  Open({"BKTHD", PagedDtype::kF16, 32, 12}, /*on_device=*/true);
  auto sequence = worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context());
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ExpectEnginesNumbers(**sequence);
}

TEST_P(PagedTest, DeviceThatFailsSealsNothingAndHoldsNoSlot) {
  Open({"KBTHD"}, /*on_device=*/true);
  const auto reason = [&] {
    return ReasonOf(worker_->PutPaged(token_ids_, *cache_, engine_->pages(), context()).status());
  };
  cuda_sharing::InjectFailures("cudaHostRegister=2");
  EXPECT_EQ(reason(), "DEVICE_MEMORY_FULL");
  cuda_sharing::InjectFailures("");
  using cuda_on_cpu::RuntimeCall;
  for (const RuntimeCall call : {RuntimeCall::kAllocate, RuntimeCall::kCopy, RuntimeCall::kLaunch,
                                 RuntimeCall::kSynchronize}) {
    cuda_on_cpu::InjectFailure(call, 0, cudaErrorLaunchFailure);
    EXPECT_EQ(reason(), "DEVICE_FAILED") << static_cast<int>(call);
    EXPECT_EQ(StoredBlocks(), 0);
  }
  EXPECT_EQ(FreeSlots(), 6);
  EXPECT_EQ(reason(), "");
  EXPECT_EQ(StoredBlocks(), 4);
}

}  // namespace
}  // namespace certkv
