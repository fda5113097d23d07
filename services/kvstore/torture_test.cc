// Eight workers on a store ten times too small, with sessions that die, with and without a tier on
// disk, while a scrubber runs: every byte that is read is compared with what follows from its key.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "kernels/core/status.h"
#include "services/common/clock.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

constexpr int32_t kThreads = 8;
constexpr int32_t kChains = 12;
constexpr int32_t kChainLength = 10;
constexpr int32_t kDeviceSlots = 8;
constexpr int32_t kBackingSlots = 12;
static_assert(kChains * kChainLength >= 10 * kBackingSlots);

// What the readers saw.
struct Tally {
  std::atomic<int64_t> reads{0};        // with the right bytes
  std::atomic<int64_t> stale{0};        // given up because the generation had moved on
  std::atomic<int64_t> wrong{0};        // another block's bytes, or torn ones
  std::atomic<int64_t> lost_leases{0};  // leased, and the generation had moved on all the same
  std::atomic<int64_t> store_full{0};
  std::atomic<int64_t> unexpected{0};  // errors that no worker should see
};

enum class GenerationCheck { kBeforeAndAfter, kNone };

class Torture {
 public:
  Torture(GenerationCheck check, uint32_t seed, bool with_disk = false)
      : check_(check),
        seed_(seed),
        tier_(std::make_unique<FakeSpillStore>(&disk_),
              // A third of the blocks fit, so that blocks leave the disk as well.
              {.size_bytes = kChains * kChainLength / 3 * int64_t{55'000}}, RealClock()),
        store_(Shape(with_disk ? &tier_ : nullptr)) {
    EXPECT_TRUE(tier_.Load().ok());
  }

  void Run(std::chrono::milliseconds duration) {
    end_ = std::chrono::steady_clock::now() + duration;
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < kThreads; ++i) threads.emplace_back([this, i] { RunWorker(i); });
    threads.emplace_back([this] {
      while (std::chrono::steady_clock::now() < end_) {
        store_.engine.Scrub(1 << 20);
        store_.engine.SpillAhead();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    for (std::thread& thread : threads) thread.join();
  }

  StoreHarness& store() { return store_; }
  const Tally& tally() const { return tally_; }

 private:
  static StoreShape Shape(SpillTier* spill) {
    StoreShape shape;
    shape.spill = spill;
    shape.device_slots = kDeviceSlots;
    shape.backing_slots = kBackingSlots;
    return shape;
  }

  void RunWorker(int32_t number) {
    std::mt19937 random(seed_ + static_cast<uint32_t>(number));
    auto worker = store_.Attach("w" + std::to_string(number), 4);
    std::vector<BlockHandle> released;  // read again without a lease
    while (std::chrono::steady_clock::now() < end_) {
      // Few chains are hot.
      const auto chain = static_cast<int32_t>(std::min(random() % kChains, random() % kChains));
      ReadAndGrow(worker, chain, static_cast<int32_t>(1 + random() % kChainLength), &released);
      for (const BlockHandle& handle : released) Read(worker, handle, /*is_leased=*/false);
      if (released.size() > 12) released.erase(released.begin(), released.begin() + 6);
      if (random() % 50 == 0) {
        store_.engine.EndSession(worker.session, "killed by the test");
        worker = store_.Attach("w" + std::to_string(number), 4);
      }
    }
    store_.engine.EndSession(worker.session, "the test is over");
  }

  // Looks a chain up, reads what is there, and adds a block or two at its end.
  void ReadAndGrow(StoreHarness::Worker& worker, int32_t chain, int32_t length,
                   std::vector<BlockHandle>* released) {
    auto found = store_.Lookup(worker, chain, length);
    if (!Expect(found.status())) return;
    for (const BlockHandle& handle : found->blocks) Read(worker, handle, /*is_leased=*/true);
    const auto have = static_cast<int32_t>(found->blocks.size());
    const int32_t growth = std::min(2, length - have);
    if (growth > 0) {
      auto sealed = store_.Put(worker, chain, have, growth);
      if (Expect(sealed.status())) {
        for (const BlockHandle& handle : sealed->blocks) Read(worker, handle, /*is_leased=*/true);
        released->insert(released->end(), sealed->blocks.begin(), sealed->blocks.end());
        Expect(store_.engine.ReleaseLease(worker.session, sealed->lease));
      }
    }
    if (found->lease != LeaseId{}) {
      Expect(store_.engine.ReleaseLease(worker.session, found->lease));
    }
    released->insert(released->end(), found->blocks.begin(), found->blocks.end());
  }

  bool Expect(const absl::Status& status) {
    if (ReasonOf(status) == "STORE_FULL") {
      tally_.store_full.fetch_add(1);
    } else if (!status.ok()) {
      tally_.unexpected.fetch_add(1);
      ADD_FAILURE() << status;
    }
    return status.ok();
  }

  void Read(const StoreHarness::Worker& worker, const BlockHandle& handle, bool is_leased) {
    Count(worker.backing, store_.backing_layout, handle.backing, is_leased, [&] {
      return HasOriginalsOf(store_.backing_layout, store_.spec, handle.key, handle.backing.slot,
                            worker.backing.data());
    });
    if (!handle.device.present()) return;
    Count(worker.device, store_.device_layout, handle.device, is_leased, [&] {
      return CheckDevicePlanes(store_.device_layout, store_.spec, handle.key, handle.device.slot,
                               worker.device.data())
          .ok();
    });
  }

  template <typename ReadBytes>
  void Count(const Mapping& slab, const SlabLayout& layout, const SlotRef& ref, bool is_leased,
             const ReadBytes& read_bytes) {
    const bool checks = check_ == GenerationCheck::kBeforeAndAfter;
    bool is_current = !checks || GenerationMatches(slab.data(), layout, ref);
    const bool is_right = is_current && read_bytes();
    if (checks && is_current) is_current = GenerationStillMatches(slab.data(), layout, ref);
    if (!is_current) {
      (is_leased ? tally_.lost_leases : tally_.stale).fetch_add(1);
    } else {
      (is_right ? tally_.reads : tally_.wrong).fetch_add(1);
    }
  }

  const GenerationCheck check_;
  const uint32_t seed_;
  FakeDisk disk_;
  SpillTier tier_;
  StoreHarness store_;
  std::chrono::steady_clock::time_point end_;
  Tally tally_;
};

class TortureTest : public testing::TestWithParam<bool> {};

TEST_P(TortureTest, NoReaderGetsWrongBytesAndNoLeaseIsBroken) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Torture torture(GenerationCheck::kBeforeAndAfter, seed, /*with_disk=*/GetParam());
  torture.Run(std::chrono::milliseconds(10'000));
  const Tally& tally = torture.tally();
  const StoreStats stats = torture.store().engine.GetStats();
  std::printf(
      "seed %u: %ld reads, %ld stale, %ld store full; %ld sealed, %ld shared, %ld demoted, "
      "%ld promoted, %ld evicted, %ld spilled, %ld restored, %ld scrubbed, %ld aborted\n",
      seed, tally.reads.load(), tally.stale.load(), tally.store_full.load(),
      stats.counters.blocks_sealed, stats.counters.blocks_shared, stats.counters.blocks_demoted,
      stats.counters.blocks_promoted, stats.counters.blocks_evicted, stats.counters.blocks_spilled,
      stats.counters.blocks_restored, stats.counters.blocks_scrubbed,
      stats.counters.blocks_aborted);
  EXPECT_EQ(tally.wrong.load(), 0);
  EXPECT_EQ(tally.lost_leases.load(), 0);
  EXPECT_EQ(tally.unexpected.load(), 0);
  // The test is not vacuous: all that can happen did.
  EXPECT_GT(tally.reads.load(), 1000);
  EXPECT_GT(tally.stale.load(), 0);
  EXPECT_GT(GetParam() ? stats.counters.blocks_restored : stats.counters.blocks_evicted, 0);
  EXPECT_EQ(stats.counters.blocks_rebuilt, 0) << "nobody damages anything";
  EXPECT_EQ(stats.counters.blocks_lost, 0);
  EXPECT_EQ(stats.spill.blocks_damaged, 0);
  EXPECT_GT(stats.counters.blocks_demoted, 0);
  EXPECT_GT(stats.counters.blocks_promoted, 0);
  // Nothing leaked.
  EXPECT_EQ(stats.session_count, 0);
  EXPECT_EQ(stats.lease_count, 0);
  EXPECT_EQ(stats.caches[0].blocks_leased, 0);
  torture.store().engine.CheckInvariants();
  auto worker = torture.store().Attach("last");
  EXPECT_TRUE(torture.store().Put(worker, 1000, 0, kDeviceSlots).ok()) << "every slot is usable";
}

INSTANTIATE_TEST_SUITE_P(Tiers, TortureTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "WithDisk" : "MemoryOnly"; });

// The canary: a reader that trusts handles without their generations must be caught.
TEST(TortureCanaryTest, ReaderThatSkipsTheGenerationCheckIsCaught) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Torture torture(GenerationCheck::kNone, seed);
  torture.Run(std::chrono::milliseconds(1000));
  EXPECT_GT(torture.tally().wrong.load(), 0);
}

}  // namespace
}  // namespace certkv::kvstore
