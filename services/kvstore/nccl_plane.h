// NcclPlane: the store's ends of NCCL, where its config and the machine have it.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_PLANE_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_PLANE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/common/clock.h"
#include "services/kvstore/bulk_detour.h"
#include "services/kvstore/device_copy.h"
#include "services/kvstore/nccl_config.h"
#include "services/kvstore/nccl_counters.h"
#include "services/kvstore/nccl_puller.h"
#include "services/kvstore/nccl_rendezvous.h"
#include "services/kvstore/nccl_server.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Threads: all methods are safe.
class NcclPlane {
 public:
  struct Dependencies {
    StoreEngine* engine = nullptr;
    const Clock* clock = nullptr;
    DevicePlace place;         // no runtime: the process has no GPU,
    absl::Status no_device;    // and why
    int64_t lease_ms_max = 0;  // of the engine
    std::unique_ptr<NcclRendezvous> rendezvous;
  };

  // With choice kAuto a library or a GPU that isn't there is said once, in a log line and a
  // counter, and nothing comes by NCCL. Errors: with kRequire, those of nccl::OpenLibrary;
  // FailedPrecondition [DEVICE_MISSING]; always, those of NcclConfig::PeerAddresses.
  static absl::StatusOr<std::unique_ptr<NcclPlane>> Create(const NcclConfig& config,
                                                           Dependencies with);
  // As Stop; joins the threads.
  ~NcclPlane();

  // How pulls use it; null: they don't.
  BulkDetour* detour() const { return puller_.get(); }
  // What other stores ask. Errors: FailedPrecondition [NCCL_OFF], there is none here, and why.
  absl::StatusOr<NcclServer*> server() const;
  // Ends what runs, soon, and takes nothing new. Doesn't block.
  void Stop();

  bool is_on() const { return config_.is_on(); }
  const NcclCounters& counters() const { return counters_; }

 private:
  explicit NcclPlane(const NcclConfig& config);
  absl::Status Open(const Dependencies& with);

  const NcclConfig config_;
  NcclCounters counters_;
  absl::Status off_;  // why there is no server
  std::unique_ptr<NcclRendezvous> rendezvous_;
  std::unique_ptr<PairCommunicatorLibrary> library_;
  std::unique_ptr<NcclServer> server_;
  std::unique_ptr<NcclPuller> puller_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_PLANE_H_
