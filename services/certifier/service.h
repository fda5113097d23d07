// CertifierServer: the Certifier service of proto/certkv/certifier/v1 over the read engine.
#ifndef CERTKV_SERVICES_CERTIFIER_SERVICE_H_
#define CERTKV_SERVICES_CERTIFIER_SERVICE_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "services/certifier/config.h"
#include "services/common/clock.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace certkv {

// Reads are computed on the io_context's threads; the store is called on a thread of its own, so
// that the store may run on the same io_context.
// Threads: all methods are safe.
class CertifierServer {
 public:
  // `clock` and `io_context` outlive the server. The store is first called when a view is opened.
  // Errors: those of SelectedCpuIsa.
  static absl::StatusOr<std::unique_ptr<CertifierServer>> Create(
      const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context);
  // Comes after the gRPC server was shut down. Logs what was done.
  ~CertifierServer();

  std::vector<grpc::Service*> grpc_services();

  // Ends Attend streams after the message they are at, with UNAVAILABLE [DRAINING]. Unary calls go
  // on. Doesn't block.
  void Drain();

 private:
  class Core;
  explicit CertifierServer(std::shared_ptr<Core> core);
  const std::shared_ptr<Core> core_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_CERTIFIER_SERVICE_H_
