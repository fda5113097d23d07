// A deterministic simulation of the store's engine: seeded operations, a clock and a disk that the
// test moves and breaks, and a model that says what must be there.
//
//   CERTKV_SIM_SEED=7      this seed instead of the first of a row
//   CERTKV_SIM_SECONDS=60  seeds one after the other for so long, instead of a fixed few
//
// A failing seed prints the command that replays it. `./dev sim --hours N` goes on and on.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

constexpr int32_t kStepsPerSeed = 4000;
constexpr int32_t kSeedsByDefault = 4;
constexpr int32_t kChains = 8;
constexpr int32_t kChainLength = 6;
constexpr int32_t kWorkers = 3;
constexpr int64_t kLeaseMs = 1000;

class Simulation {
 public:
  explicit Simulation(uint32_t seed) : random_(seed) { Start(); }

  void Run(int32_t steps) {
    for (int32_t step = 0; step < steps && !testing::Test::HasFatalFailure(); ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      Step();
      if (step % 8 == 0) CheckLeases();
      if (step % 64 == 0) store_->engine.CheckInvariants();
      if (testing::Test::HasFailure()) return;
    }
    End();
  }

  int64_t crashes() const { return crashes_; }

 private:
  struct Held {
    int32_t worker;
    LeaseId lease;
    int64_t end_ms;
    std::vector<BlockHandle> blocks;
  };

  uint32_t Draw(uint32_t count) { return static_cast<uint32_t>(random_() % count); }

  void Start() {
    tier_ = std::make_unique<SpillTier>(
        std::make_unique<FakeSpillStore>(&disk_),
        SpillLimits{.size_bytes = int64_t{55'000} * 24, .ttl_ms = 3'600'000}, &disk_clock_);
    ASSERT_TRUE(tier_->Load().ok());
    StoreShape shape;
    shape.device_slots = 8;
    shape.backing_slots = 12;
    shape.config.lease_duration_ms = kLeaseMs;
    shape.spill = tier_.get();
    store_ = std::make_unique<StoreHarness>(shape);
    for (int32_t i = 0; i < kWorkers; ++i) Attach(i);
  }
  void Attach(int32_t number) { workers_[number] = store_->Attach(absl::StrCat("w", number), 4); }

  void Step() {
    const auto worker = static_cast<int32_t>(Draw(kWorkers));
    const auto chain = static_cast<int32_t>(std::min(Draw(kChains), Draw(kChains)));
    const uint32_t action = Draw(1000);
    if (action < 280) return Put(worker, chain);
    if (action < 560) return LookUp(worker, chain);
    if (action < 820) return Release();
    if (action < 840) return Renew();
    if (action < 880) return Advance(static_cast<int64_t>(Draw(400)));
    if (action < 900) return Drop(worker, chain);
    if (action < 920) return Die(worker);
    if (action < 945) return Flip(chain);
    if (action < 970) return Scrub();
    if (action < 985) return store_->engine.SpillAhead();
    if (action < 990) return ToggleDisk();
    if (action < 995) return CorruptDisk();
    Crash();
  }

  void Put(int32_t worker, int32_t chain) {
    // After what is there, as a worker does that has looked up; or somewhere, which is refused.
    auto found = store_->engine.LookupAndLease(workers_[worker].session,
                                               ChainKeys(chain, kChainLength), kLeaseMs);
    if (!Expect(found.status())) return;
    const auto have = static_cast<int32_t>(found->blocks.size());
    const auto first = Draw(10) == 0 ? static_cast<int32_t>(Draw(kChainLength)) : have;
    const auto count = std::min(1 + static_cast<int32_t>(Draw(2)), kChainLength - first);
    if (count > 0) {
      const auto sealed = store_->Put(workers_[worker], chain, first, count, kLeaseMs);
      if (Expect(sealed.status())) Keep(worker, *sealed);
    }
    if (found->lease == LeaseId{}) return;
    CheckFound(chain, found->blocks);
    EXPECT_TRUE(store_->engine.ReleaseLease(workers_[worker].session, found->lease).ok());
  }

  void LookUp(int32_t worker, int32_t chain) {
    const auto found = store_->engine.LookupAndLease(workers_[worker].session,
                                                     ChainKeys(chain, kChainLength), kLeaseMs);
    if (!Expect(found.status())) return;
    CheckFound(chain, found->blocks);
    if (found->lease != LeaseId{}) Keep(worker, *found);
    // What somebody leases is there, unless its originals were damaged.
    const auto count = static_cast<int32_t>(found->blocks.size());
    for (int32_t index = 0; index < kChainLength; ++index) {
      const BlockKey key = ChainKey(chain, index);
      if (!IsLeased(key) || IsTainted(key)) break;
      EXPECT_LT(index, count) << "a leased block was not found";
    }
  }

  void Keep(int32_t worker, const LeasedBlocks& leased) {
    held_.push_back({worker, leased.lease, store_->clock.NowMs() + kLeaseMs, leased.blocks});
    EXPECT_EQ(leased.expire_time_ms, held_.back().end_ms);
  }
  void Release() {
    if (held_.empty()) return;
    const size_t place = Draw(static_cast<uint32_t>(held_.size()));
    const Held& held = held_[place];
    EXPECT_TRUE(store_->engine.ReleaseLease(workers_[held.worker].session, held.lease).ok());
    held_.erase(held_.begin() + static_cast<int64_t>(place));
  }
  void Renew() {
    if (held_.empty()) return;
    Held& held = held_[Draw(static_cast<uint32_t>(held_.size()))];
    const auto renewed =
        store_->engine.RenewLease(workers_[held.worker].session, held.lease, kLeaseMs);
    ASSERT_TRUE(renewed.ok()) << "a lease ended before its deadline: " << renewed.status();
    held.end_ms = *renewed;
  }
  void Advance(int64_t milliseconds) {
    store_->clock.AdvanceMs(milliseconds);
    disk_clock_.AdvanceMs(milliseconds);
    store_->engine.Tick();
    for (const Held& held : held_) {
      if (held.end_ms > store_->clock.NowMs()) continue;
      const auto late =
          store_->engine.RenewLease(workers_[held.worker].session, held.lease, kLeaseMs);
      EXPECT_EQ(ReasonOf(late.status()), "LEASE_NOT_FOUND") << "a lease outlived its deadline";
    }
    std::erase_if(held_, [this](const Held& held) { return held.end_ms <= store_->clock.NowMs(); });
  }

  void Drop(int32_t worker, int32_t chain) {
    const BlockKey key = ChainKey(chain, static_cast<int32_t>(Draw(kChainLength)));
    const auto dropped = store_->engine.DropBlocks(workers_[worker].session, {key});
    if (!dropped.ok()) {
      EXPECT_EQ(ReasonOf(dropped.status()), "BLOCK_LEASED") << dropped.status();
      return;
    }
    EXPECT_FALSE(IsLeased(key)) << "a leased block was dropped";
    EXPECT_FALSE(store_->engine.GetBlock(store_->cache, key).ok());
    EXPECT_FALSE(tier_->Contains(DigestCacheSpec(store_->spec), key));
  }

  void Die(int32_t worker) {
    store_->engine.EndSession(workers_[worker].session, "the simulation killed it");
    const auto late = store_->engine.ReserveBlocks(workers_[worker].session, 1);
    EXPECT_EQ(ReasonOf(late.status()), "SESSION_NOT_FOUND");
    std::erase_if(held_, [worker](const Held& held) { return held.worker == worker; });
    Attach(worker);
  }

  // Flips a bit of a block in memory; until it is scrubbed its bytes are not looked at.
  void Flip(int32_t chain) {
    const BlockKey key = ChainKey(chain, static_cast<int32_t>(Draw(kChainLength)));
    const auto info = store_->engine.GetBlock(store_->cache, key);
    if (!info.ok() || info->lost) return;
    const auto layer = static_cast<int32_t>(Draw(2));
    uint8_t* byte = nullptr;
    if (Draw(3) == 0 || !info->handle.device.present()) {
      byte = workers_[0].backing_memory->base() +
             store_->backing_layout.key_offset(info->handle.backing.slot, layer, 0);
      tainted_originals_.insert(key);
    } else {
      byte = workers_[0].device_memory->base() +
             store_->device_layout.detail_offset(info->handle.device.slot, layer, 0, 0);
      tainted_planes_.insert(key);
    }
    byte[Draw(2000)] ^= static_cast<uint8_t>(1 << Draw(8));
  }
  void Scrub() {
    while (store_->engine.Scrub(1 << 20) > 0) continue;
    tainted_planes_.clear();
    for (const BlockKey& key : tainted_originals_) {
      const auto info = store_->engine.GetBlock(store_->cache, key);
      // Lost, or gone, or sealed again meanwhile; then what is there is good.
      if (!info.ok()) continue;
      EXPECT_TRUE(info->lost || store_->IsReadable(workers_[0], info->handle));
    }
    lost_.insert(tainted_originals_.begin(), tainted_originals_.end());
    tainted_originals_.clear();
  }

  void ToggleDisk() { disk_.is_full = !disk_.is_full; }
  void CorruptDisk() {
    if (disk_.files.empty()) return;
    auto file = disk_.files.begin();
    std::advance(file, Draw(static_cast<uint32_t>(disk_.files.size())));
    auto& payload = file->second.payload;
    payload[Draw(static_cast<uint32_t>(payload.size()))] ^= static_cast<uint8_t>(1 << Draw(8));
  }
  // kill -9: memory is gone, the disk stays.
  void Crash() {
    ++crashes_;
    held_.clear();
    tainted_planes_.clear();
    tainted_originals_.clear();
    lost_.clear();
    for (auto& worker : workers_) worker = StoreHarness::Worker{};
    const int64_t now_ms = store_->clock.NowMs();
    store_.reset();
    const auto before = disk_.files.size();
    Start();
    store_->clock.AdvanceMs(now_ms - FakeClock::kStartMs);
    EXPECT_EQ(static_cast<size_t>(tier_->GetStats().blocks), before)
        << "what was written is found again";
  }

  // The blocks are the chain's, in order, with the right bytes.
  void CheckFound(int32_t chain, const std::vector<BlockHandle>& blocks) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      ASSERT_EQ(blocks[i].key, ChainKey(chain, static_cast<int32_t>(i)));
      ASSERT_TRUE(blocks[i].device.present());
      CheckBytes(blocks[i]);
    }
  }
  void CheckLeases() {
    std::set<BlockKey> seen;
    for (const Held& held : held_) {
      for (const BlockHandle& handle : held.blocks) {
        if (seen.insert(handle.key).second) CheckBytes(handle);
      }
    }
  }
  void CheckBytes(const BlockHandle& handle) {
    if (tainted_planes_.contains(handle.key) || IsTainted(handle.key)) return;
    ASSERT_TRUE(store_->IsReadable(workers_[0], handle))
        << "a leased block has other bytes, or lost its slot";
  }
  bool IsTainted(const BlockKey& key) const {
    return tainted_originals_.contains(key) || lost_.contains(key);
  }
  bool IsLeased(const BlockKey& key) const {
    for (const Held& held : held_) {
      for (const BlockHandle& handle : held.blocks) {
        if (handle.key == key) return true;
      }
    }
    return false;
  }

  // Only what such operations may answer.
  bool Expect(const absl::Status& status) {
    static const std::set<std::string> kFair = {"STORE_FULL", "PARENT_NOT_FOUND", "BLOCK_DAMAGED",
                                                "ORIGINAL_LOST"};
    EXPECT_TRUE(status.ok() || kFair.contains(ReasonOf(status))) << status;
    return status.ok();
  }

  void End() {
    disk_.is_full = false;
    for (const auto& worker : workers_) store_->engine.EndSession(worker.session, "the end");
    const StoreStats stats = store_->engine.GetStats();
    EXPECT_EQ(stats.session_count, 0);
    EXPECT_EQ(stats.lease_count, 0);
    EXPECT_EQ(stats.caches[0].blocks_leased, 0);
    EXPECT_EQ(stats.caches[0].blocks_writing, 0);
    store_->engine.CheckInvariants();
    auto last = store_->Attach("last", 16);
    EXPECT_TRUE(store_->Put(last, 1000, 0, 8).ok()) << "every device slot is usable";
  }

  std::mt19937_64 random_;
  FakeClock disk_clock_;
  FakeDisk disk_;
  std::unique_ptr<SpillTier> tier_;
  std::unique_ptr<StoreHarness> store_;
  StoreHarness::Worker workers_[kWorkers];
  std::vector<Held> held_;
  std::set<BlockKey> tainted_planes_;
  std::set<BlockKey> tainted_originals_;
  std::set<BlockKey> lost_;
  int64_t crashes_ = 0;
};

TEST(SimulationTest, TheModelAgreesWithTheEngine) {
  const char* seed_text = std::getenv("CERTKV_SIM_SEED");
  const char* seconds_text = std::getenv("CERTKV_SIM_SECONDS");
  const auto first = static_cast<uint32_t>(seed_text == nullptr ? 1 : std::atol(seed_text));
  const auto start = std::chrono::steady_clock::now();
  const std::chrono::duration<double> limit(seconds_text == nullptr ? 0 : std::atof(seconds_text));
  const int32_t least = seed_text != nullptr ? 1 : kSeedsByDefault;
  int64_t steps = 0;
  int64_t crashes = 0;
  std::chrono::duration<double> passed{};
  for (uint32_t seed = first; seed < first + least || passed < limit; ++seed) {
    SCOPED_TRACE(absl::StrCat("replay: CERTKV_SIM_SEED=", seed,
                              " build/release/test_bin/services_kvstore_simulation_test"));
    Simulation simulation(seed);
    simulation.Run(kStepsPerSeed);
    steps += kStepsPerSeed;
    crashes += simulation.crashes();
    passed = std::chrono::steady_clock::now() - start;
    if (HasFailure()) break;
  }
  std::printf("%ld steps with %ld crashes, %.0f steps per second\n", steps, crashes,
              static_cast<double>(steps) / passed.count());
}

}  // namespace
}  // namespace certkv::kvstore
