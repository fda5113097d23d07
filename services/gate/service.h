// GateServer: the Gate service of proto/certkv/gate/v1 over a RequestRegistry.
#ifndef CERTKV_SERVICES_GATE_SERVICE_H_
#define CERTKV_SERVICES_GATE_SERVICE_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "services/common/access_control.h"
#include "services/common/clock.h"
#include "services/common/http_server.h"
#include "services/common/metrics.h"
#include "services/gate/config.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace certkv {

// Threads: all methods are safe; calls are served on gRPC's and the io_context's threads.
class GateServer {
 public:
  // `clock`, `io_context` and `access` (null: everybody may call) outlive the server. Starts a
  // timer on the io_context: it sweeps idle and old requests once a second and feeds watchers ten
  // times a second. Errors: InvalidArgument [POLICY_INVALID], the config was not read by its
  // schema; as LedgerRunner::Create.
  static absl::StatusOr<std::unique_ptr<GateServer>> Create(const GateConfig& config,
                                                            const Clock* clock,
                                                            boost::asio::io_context* io_context,
                                                            const AccessControl* access = nullptr);
  // Comes after the gRPC server was shut down.
  ~GateServer();

  std::vector<grpc::Service*> grpc_services();

  static absl::Span<const MetricInfo> MetricInfos();
  void CollectMetrics(MetricSink* sink) const;

  // The dashboard. The routes live as long as the server.
  std::vector<HttpRoute> HttpRoutes();

  // Ends report streams after the batch they are at, and watches, with UNAVAILABLE [DRAINING].
  // Unary calls go on. Doesn't block.
  void Drain();

  // Puts the policy of `config` in force for leases given from now on, when it differs from the one
  // that is. One that is not valid is logged and changes nothing. Other settings need a restart.
  void Reload(const GateConfig& config);

 private:
  class Core;
  explicit GateServer(std::shared_ptr<Core> core);
  const std::shared_ptr<Core> core_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_GATE_SERVICE_H_
