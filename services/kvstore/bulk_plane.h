// BulkPlane: the store's end of the bulk plane: its threads, what it serves, what it pulls.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_PLANE_H_
#define CERTKV_SERVICES_KVSTORE_BULK_PLANE_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/common/access_control.h"
#include "services/common/clock.h"
#include "services/kvstore/bulk_config.h"
#include "services/kvstore/bulk_counters.h"
#include "services/kvstore/bulk_puller.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Threads: all calls are safe. It has threads of its own, so that a slow peer or disk keeps nobody
// else waiting.
class BulkPlane {
 public:
  struct Dependencies {
    StoreEngine* engine = nullptr;
    ComputePool* pool = nullptr;
    const AccessControl* access = nullptr;  // null: everybody may read
    const Clock* clock = nullptr;
    int64_t lease_ms_max = 0;                     // of the engine
    std::function<absl::Status()> check_serving;  // does the store serve now?
    BulkDetour* detour = nullptr;                 // stopped before the plane ends
  };

  // Listens where config.address is set. Without address and peers it has no threads, and every
  // pull is refused. Errors: as BulkServer::Create.
  static absl::StatusOr<std::unique_ptr<BulkPlane>> Create(const BulkConfig& config,
                                                           const Dependencies& dependencies);
  // As Stop; joins the threads.
  ~BulkPlane();

  // As BulkPuller::Start.
  void Pull(PullRequest request, BulkPuller::Done done);
  // Ends what runs, soon, and takes nothing new. Doesn't block.
  void Stop();

  int32_t port() const;  // where it listens; 0: it does not
  const BulkCounters& counters() const;

 private:
  class Impl;
  explicit BulkPlane(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_PLANE_H_
