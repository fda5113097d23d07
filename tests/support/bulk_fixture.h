// Two stores of a test, with the bulk plane between them.
#ifndef CERTKV_TESTS_SUPPORT_BULK_FIXTURE_H_
#define CERTKV_TESTS_SUPPORT_BULK_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/core/status.h"
#include "services/common/clock.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/bulk_plane.h"
#include "tests/support/store_harness.h"
#include "tests/support/tcp_proxy.h"

namespace certkv::kvstore {

// 64 blocks in both tiers.
inline StoreShape BulkShape() {
  StoreShape shape;
  shape.device_slots = 64;
  shape.backing_slots = 64;
  return shape;
}

class BulkPlaneTest : public testing::Test {
 protected:
  explicit BulkPlaneTest(const CacheSpec& spec = TinySpec())
      : source_(BulkShape(), spec), target_(BulkShape(), spec) {
    writer_ = source_.Attach("writer", 64);
    worker_ = target_.Attach("worker", 64);
    const auto cache = source_.engine.CacheOf(writer_.session);
    plane_bytes_ = PlaneBytesOf(**cache);
    original_bytes_ = OriginalBytesOf(**cache);
  }

  static BulkConfig Config() {
    BulkConfig config;
    config.access.tcp_security = TcpSecurity::kInsecure;
    config.timeout_ms = 2000;
    config.connections = 2;
    return config;
  }
  static std::unique_ptr<BulkPlane> MakePlane(StoreHarness* store, const BulkConfig& config,
                                              const AccessControl* access = nullptr,
                                              BulkDetour* detour = nullptr) {
    BulkPlane::Dependencies with;
    with.engine = &store->engine;
    with.pool = &store->pool;
    with.access = access;
    with.clock = RealClock();
    with.lease_ms_max = 3'600'000;
    with.check_serving = [] { return absl::OkStatus(); };
    with.detour = detour;
    auto plane = BulkPlane::Create(config, with);
    EXPECT_TRUE(plane.ok()) << plane.status();
    return *std::move(plane);
  }
  // The source serves; the target pulls from `peer`, or from it.
  void Start(BulkConfig config = Config(), const AccessControl* access = nullptr) {
    BulkConfig serving = config;
    serving.address = "127.0.0.1:0";
    serving.peers = "";
    server_ = MakePlane(&source_, serving, access);
    proxy_ = std::make_unique<TcpProxy>(server_->port());
    StartTarget(config, proxy_->address());
  }
  void StartTarget(BulkConfig config, const std::string& peer, BulkDetour* detour = nullptr) {
    peer_ = peer;
    config.peers = peer;
    client_ = MakePlane(&target_, config, nullptr, detour);
  }

  PullRequest Request(int32_t chain, int32_t count, PullOrder order = PullOrder::kWhole) const {
    PullRequest request;
    request.session = worker_.session;
    request.peer = peer_;
    request.keys = ChainKeys(chain, count);
    request.order = order;
    return request;
  }
  absl::StatusOr<PullResult> Pull(PullRequest request) {
    absl::StatusOr<PullResult> result = absl::UnknownError("");
    absl::Notification done;
    client_->Pull(std::move(request), [&](const absl::StatusOr<PullResult>& got) {
      result = got;
      done.Notify();
    });
    EXPECT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return result;
  }
  absl::StatusOr<PullResult> Pull(int32_t chain, int32_t count,
                                  PullOrder order = PullOrder::kWhole) {
    return Pull(Request(chain, count, order));
  }

  // Reads the target's blocks and compares every byte with what was sealed, and planes with the
  // source's.
  void ExpectSame(int32_t chain, int32_t count) {
    const auto here = target_.Lookup(worker_, chain, count);
    const auto there = source_.Lookup(writer_, chain, count);
    ASSERT_TRUE(here.ok() && there.ok());
    ASSERT_EQ(static_cast<int32_t>(here->blocks.size()), count);
    for (size_t i = 0; i < here->blocks.size(); ++i) {
      EXPECT_TRUE(target_.IsReadable(worker_, here->blocks[i])) << i;
      EXPECT_EQ(PlanesAt(target_, worker_, here->blocks[i]),
                PlanesAt(source_, writer_, there->blocks[i]))
          << i;
    }
    ASSERT_TRUE(target_.engine.ReleaseLease(worker_.session, here->lease).ok());
    ASSERT_TRUE(source_.engine.ReleaseLease(writer_.session, there->lease).ok());
    target_.engine.CheckInvariants();
  }
  static std::string PlanesAt(StoreHarness& store, const StoreHarness::Worker& worker,
                              const BlockHandle& handle) {
    BlockWrite slots;
    slots.device_slot = handle.device.slot;
    slots.backing_slot = handle.backing.slot;
    const auto cache = store.engine.CacheOf(worker.session);
    std::string bytes;
    for (const auto& span : PayloadSpans(**cache, slots, true, false)) {
      bytes.append(reinterpret_cast<const char*>(span.data()), span.size());
    }
    return bytes;
  }
  // Slots of the target that hold blocks, or are being written.
  int32_t SlotsUsed() { return target_.engine.GetStats().caches[0].backing_slots_used; }
  // Waits until no pull of the target holds slots or blocks any more.
  void WaitUntilIdle() {
    for (int i = 0; i < 2000 && target_.engine.GetStats().caches[0].blocks_leased > 0; ++i) {
      poll(nullptr, 0, 5);
    }
  }
  int64_t block_bytes() const { return plane_bytes_ + original_bytes_; }

  StoreHarness source_;
  StoreHarness target_;
  StoreHarness::Worker writer_;
  StoreHarness::Worker worker_;
  int64_t plane_bytes_ = 0;
  int64_t original_bytes_ = 0;
  std::string peer_;
  // Their threads end before the engines.
  std::unique_ptr<BulkPlane> server_;
  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<BulkPlane> client_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_TESTS_SUPPORT_BULK_FIXTURE_H_
