// The store's RPCs over an engine.
#ifndef CERTKV_SERVICES_KVSTORE_SERVICE_CALLS_H_
#define CERTKV_SERVICES_KVSTORE_SERVICE_CALLS_H_

#include <memory>
#include <string>

#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "services/common/access_control.h"
#include "services/kvstore/bulk_plane.h"
#include "services/kvstore/cluster_link.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/store_engine.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace certkv::kvstore {

// Every call ends on gRPC's thread, or, where it computes, on one of the pool.
// Threads: all calls are safe concurrently.
class StoreCalls : public v1::KvStore::CallbackService {
 public:
  // Calls are answered from now on. Before it all but GetStats get Unavailable [STORE_OPENING].
  virtual void Open() = 0;
  // From now on they get Unavailable [STORE_STOPPING].
  virtual void Drain() = 0;
  // OK, or one of the two.
  virtual absl::Status CheckServing() const = 0;
  // What PullBlocks uses; to be called before the first call.
  virtual void SetBulkPlane(BulkPlane* bulk) = 0;
  // Whom lookups ask for what this store lacks; to be called before the first call, or not at all.
  virtual void SetCluster(ClusterLink* link, boost::asio::io_context* io_context) = 0;
};

// What it borrows outlives it. `access` null: everybody may call.
std::unique_ptr<StoreCalls> MakeStoreCalls(StoreEngine* engine, ComputePool* pool,
                                           const AccessControl* access, std::string fd_socket);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SERVICE_CALLS_H_
