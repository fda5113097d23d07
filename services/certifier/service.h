// CertifierServer: the Certifier service of proto/certkv/certifier/v1 over views and a ReadEngine.
#ifndef CERTKV_SERVICES_CERTIFIER_SERVICE_H_
#define CERTKV_SERVICES_CERTIFIER_SERVICE_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "services/certifier/cache_provider.h"
#include "services/certifier/config.h"
#include "services/certifier/counters.h"
#include "services/certifier/read_kernels.h"
#include "services/common/access_control.h"
#include "services/common/clock.h"
#include "services/common/metrics.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio
namespace grpc {
class Service;
}  // namespace grpc

namespace certkv {

// Stateless but for caches: views and what their leases have spent.
// Threads: all methods are safe; calls are served on gRPC's and the io_context's threads.
class CertifierServer {
 public:
  // `clock` and `io_context` outlive the server. Starts a timer on the io_context that closes idle
  // views. `access` outlives the server; null: everybody may call. The store is asked when the
  // first view is opened; it need not run yet. Errors: InvalidArgument [CPU_ISA_UNKNOWN];
  // FailedPrecondition [CPU_ISA_UNSUPPORTED].
  static absl::StatusOr<std::unique_ptr<CertifierServer>> Create(
      const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context,
      const AccessControl* access = nullptr);
  // With another source of caches and other kernels; for tests.
  static std::unique_ptr<CertifierServer> CreateWith(
      const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context,
      std::unique_ptr<certifier::CacheProvider> provider, certifier::ReadKernels kernels,
      const AccessControl* access = nullptr);
  // Comes after the gRPC server was shut down. Logs the counters.
  ~CertifierServer();

  std::vector<grpc::Service*> grpc_services();
  const certifier::CertifierCounters& counters() const;

  static absl::Span<const MetricInfo> MetricInfos();
  void CollectMetrics(MetricSink* sink) const;

  // Ends Attend streams after the messages that they have taken, with UNAVAILABLE [DRAINING], and
  // refuses new views. Other unary calls go on. Doesn't block.
  void Drain();

 private:
  class Core;
  explicit CertifierServer(std::shared_ptr<Core> core);
  const std::shared_ptr<Core> core_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_CERTIFIER_SERVICE_H_
