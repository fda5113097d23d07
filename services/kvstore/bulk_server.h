// BulkServer: gives sealed blocks to other stores.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_SERVER_H_
#define CERTKV_SERVICES_KVSTORE_BULK_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/common/access_control.h"
#include "services/common/clock.h"
#include "services/kvstore/bulk_config.h"
#include "services/kvstore/bulk_counters.h"
#include "services/kvstore/bulk_socket.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Each connection is a reader's session of the engine, of one cache and one tenant that its caller
// may use: what a lookup finds for that tenant is sent, nothing else. A block is leased while it is
// sent, for one timeout at most, and is written to the socket from where it lies.
// Threads: handlers run on the io_context's threads; lookups that compute block them.
class BulkServer {
 public:
  struct Dependencies {
    StoreEngine* engine = nullptr;
    const AccessControl* access = nullptr;  // null: everybody may read
    const Clock* clock = nullptr;
    BulkCounters* counters = nullptr;
    int64_t lease_ms = 0;  // of a block while it is sent; longer than config.timeout_ms
    std::function<absl::Status()> check_serving;  // does the store serve now?
  };

  // Listens on config.address. Errors: Unavailable [LISTEN_FAILED]; as MakeBulkServerTls.
  static absl::StatusOr<std::unique_ptr<BulkServer>> Create(const BulkConfig& config,
                                                            Dependencies dependencies,
                                                            boost::asio::io_context* io_context);
  // As Stop; the io_context's handlers have ended.
  ~BulkServer();

  // Port where it listens.
  int32_t port() const;
  // Accepts no more and closes what is open; handlers end soon after.
  void Stop();

 private:
  class Impl;
  explicit BulkServer(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_SERVER_H_
