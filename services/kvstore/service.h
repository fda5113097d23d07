// KvStoreServer: the store's gRPC service, its descriptor socket, threads and timer.
#ifndef CERTKV_SERVICES_KVSTORE_SERVICE_H_
#define CERTKV_SERVICES_KVSTORE_SERVICE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/common/access_control.h"
#include "services/common/clock.h"
#include "services/common/metrics.h"
#include "services/kvstore/config.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio
namespace grpc {
class Service;
}  // namespace grpc

namespace certkv {
namespace kvstore {
class SpillTier;
}  // namespace kvstore

class KvStoreServer {
 public:
  // Listens on the descriptor socket and starts the timer on `io_context`, which runs, like
  // `clock`, until after the server is destroyed or was stopped before.
  // Opens the tier on disk. The index of a large one is read on a thread of its own: calls but
  // GetStats get Unavailable [STORE_OPENING] until it is there. Errors: those of FdServer::Create
  // about `config.fd_socket`, of OpenSpill about `config.spill_directory`, and of BulkPlane::Create
  // about `config.bulk`.
  // `access` outlives the server; null: everybody may call, and only this user connects to the
  // descriptor socket.
  static absl::StatusOr<std::unique_ptr<KvStoreServer>> Create(
      const KvStoreConfig& config, const Clock* clock, boost::asio::io_context* io_context,
      const AccessControl* access = nullptr);
  // The same on a tier whose index is still to be read, or (null) without one.
  static absl::StatusOr<std::unique_ptr<KvStoreServer>> CreateOn(
      std::unique_ptr<kvstore::SpillTier> spill, const KvStoreConfig& config, const Clock* clock,
      boost::asio::io_context* io_context, const AccessControl* access = nullptr);
  // To be called when no RPC runs any more. Finishes what computes; ends all sessions; writes what
  // is in memory to disk, where there is a tier on disk.
  ~KvStoreServer();

  // certkv.kvstore.v1.KvStore. Owned by this object.
  std::vector<grpc::Service*> grpc_services();

  // Calls `ready` once, when the store serves: now, or later on another thread; never after the
  // server's end. To be called once.
  void WhenReady(std::function<void()> ready);

  // Path of the descriptor socket.
  const std::string& fd_socket() const;

  static absl::Span<const MetricInfo> MetricInfos();
  void CollectMetrics(MetricSink* sink);

  // No new work: calls get Unavailable [STORE_STOPPING], event streams end after what is queued.
  // Running calls finish. Doesn't block.
  void Drain();

 private:
  class Impl;
  explicit KvStoreServer(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_KVSTORE_SERVICE_H_
