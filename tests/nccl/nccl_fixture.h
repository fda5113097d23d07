// Two stores of a test whose GPUs are host memory and whose NCCL is the stub, with the bulk plane
// between them for what that doesn't bring.
#ifndef CERTKV_TESTS_NCCL_NCCL_FIXTURE_H_
#define CERTKV_TESTS_NCCL_NCCL_FIXTURE_H_

#include <stdlib.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "services/kvstore/nccl_plane.h"
#include "tests/nccl/stub.h"
#include "tests/support/bulk_fixture.h"

namespace certkv::kvstore {

// Both stores' device slabs have copies, so that none is sealed before its copy has the bytes.
inline const bool kStoresHaveDevices = setenv(kTestDevice, "1", 1) == 0;

// Reaches the other store's plane without a wire; a test may change what is said.
class LocalRendezvous final : public NcclRendezvous {
 public:
  struct Changes {
    std::function<void(NcclOffer*)> offer = [](NcclOffer*) {};
    std::function<void(absl::StatusOr<NcclJoined>*)> joined = [](auto*) {};
    std::function<void(absl::StatusOr<std::vector<BulkBlock>>*)> sent = [](auto*) {};
  };
  LocalRendezvous(const std::unique_ptr<NcclPlane>* to, Changes* changes)
      : to_(*to), changes_(*changes) {}

  absl::StatusOr<NcclJoined> Join(const std::string& address, const NcclOffer& offered,
                                  int64_t) override {
    EXPECT_EQ(address, "grpc:1");
    NcclOffer offer = offered;
    changes_.offer(&offer);
    absl::StatusOr<NcclJoined> joined = absl::UnknownError("");
    const auto server = to_->server();
    joined = server.ok() ? (*server)->Join(offer, "target") : server.status();
    changes_.joined(&joined);
    return joined;
  }
  absl::StatusOr<std::vector<BulkBlock>> Send(const std::string&, const NcclAsk& ask,
                                              int64_t timeout_ms) override {
    struct Answer {
      absl::StatusOr<std::vector<BulkBlock>> blocks = absl::UnknownError("");
      absl::Notification done;
    };
    const auto answer = std::make_shared<Answer>();
    CERTKV_ASSIGN_OR_RETURN(NcclServer* const server, to_->server());
    server->Send(ask, [answer](const auto& blocks) {
      answer->blocks = blocks;
      answer->done.Notify();
    });
    if (!answer->done.WaitForNotificationWithTimeout(absl::Milliseconds(timeout_ms))) {
      return absl::UnavailableError("deadline");
    }
    changes_.sent(&answer->blocks);
    return answer->blocks;
  }
  void Cancel() override {}

 private:
  const std::unique_ptr<NcclPlane>& to_;
  Changes& changes_;
};

class NcclPlaneTest : public BulkPlaneTest {
 protected:
  NcclPlaneTest() { place_ = DeviceOfTests(); }
  ~NcclPlaneTest() override {
    if (target_nccl_ != nullptr) target_nccl_->Stop();
    client_ = nullptr;
    cuda_sharing::InjectFailures("");
  }

  static NcclConfig Config() {
    NcclConfig config;
    config.choice = NcclChoice::kAuto;
    config.library = StubNccl();
    config.in_flight_bytes = 1 << 18;
    config.timeout_ms = 5000;
    return config;
  }
  absl::StatusOr<std::unique_ptr<NcclPlane>> MakeNccl(StoreHarness* store, const NcclConfig& config,
                                                      const std::unique_ptr<NcclPlane>* other) {
    NcclPlane::Dependencies with;
    with.engine = &store->engine;
    with.clock = RealClock();
    with.place = place_;
    // A GPU of its own.
    if (store == &source_) with.place.device.uuid[0] ^= 1;
    with.lease_ms_max = 3'600'000;
    with.rendezvous = std::make_unique<LocalRendezvous>(other, &changes_);
    return NcclPlane::Create(config, std::move(with));
  }
  // The source serves by TCP and NCCL; the target pulls by both.
  void StartNccl(NcclConfig config = Config()) {
    BulkConfig serving = BulkPlaneTest::Config();
    serving.address = "127.0.0.1:0";
    server_ = MakePlane(&source_, serving);
    proxy_ = std::make_unique<TcpProxy>(server_->port());
    NcclConfig sending = config;
    source_nccl_ = *MakeNccl(&source_, sending, &target_nccl_);
    config.peers = proxy_->address() + "=grpc:1";
    target_nccl_ = *MakeNccl(&target_, config, &source_nccl_);
    StartTarget(BulkPlaneTest::Config(), proxy_->address(), target_nccl_->detour());
  }
  const NcclCounters& received() const { return target_nccl_->counters(); }
  const NcclCounters& sent() const { return source_nccl_->counters(); }
  int64_t FailuresOf(const std::string& reason) const {
    const auto failures = received().Failures();
    const auto found = failures.find(reason);
    return found == failures.end() ? 0 : found->second;
  }
  int64_t TcpBytes() const { return client_->counters().bytes_received; }
  // Waits at most two seconds.
  static bool Soon(const std::function<bool()>& is_so) {
    for (int i = 0; i < 2000 && !is_so(); ++i) poll(nullptr, 0, 1);
    return is_so();
  }

  StubFailures failures_;
  DevicePlace place_;
  LocalRendezvous::Changes changes_;
  std::unique_ptr<NcclPlane> source_nccl_;
  std::unique_ptr<NcclPlane> target_nccl_;  // its threads end before the source's plane
};

}  // namespace certkv::kvstore

#endif  // CERTKV_TESTS_NCCL_NCCL_FIXTURE_H_
