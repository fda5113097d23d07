// How a client reaches the services.
#ifndef CERTKV_CLIENTS_CPP_OPTIONS_H_
#define CERTKV_CLIENTS_CPP_OPTIONS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace certkv::client {

// gRPC targets: "unix:/run/certkv/certkvd.sock" or "host:port". An empty certifier or gate target
// is that of the store (certkvd serves all three on one socket). That of the certifier may name
// several (certifier_link.h), and so may that of gate, whose replicas share a ledger: a request
// stays with one of them while it is there (StartAnywhere).
struct Options {
  std::string kvstore_target;  // "" = DefaultTarget()
  std::string certifier_target;
  std::string gate_target;
  std::string worker_name = "worker";  // for people, in lists and errors
  // Whose blocks, quota and requests; "" = the only one that the identity may act for, or nobody in
  // particular.
  std::string tenant;
  // Paths of PEM files, for targets that are not Unix sockets; each is read again when it changes.
  std::string ca_file;           // whose certificate the server has; "" = no TLS
  std::string certificate_file;  // this client's, where the server asks for one
  std::string key_file;          // its private key
  // Of a bearer token, which goes into every call; "" = none. Others may not read it.
  std::string token_file;
  int64_t rpc_timeout_ms = 10000;     // deadline of a unary call
  int64_t seal_timeout_ms = 120000;   // deadline of SealBlocks, which quantizes
  int64_t lease_duration_ms = 30000;  // block leases; renewed at a third of it
  // W3C trace context that goes along with calls to the store, into the servers' logs; "" = none.
  std::string traceparent;
  // How long a call waits in all, and never beyond its deadline, when the store has no room and
  // says when to ask again; 0 = it fails at once.
  int64_t pressure_wait_ms = 5000;
  int32_t staging_slot_count = 0;  // blocks a worker can have open at once; 0 = server's default
  // Staging slots on the store's GPU, too: blocks of a PagedCache that is on it are sealed there.
  // Without them, and where that fails, they go through the mapped slots (Worker::device_staging).
  bool device_staging = false;
};

// unix:<runtime directory>/certkvd.sock; see services/common/runtime_directory.h.
std::string DefaultTarget();

// `options` with the empty targets filled in.
Options ResolveTargets(const Options& options);

// May gRPC find several servers there? "unix:/a.sock,/b.sock", "ipv4:10.0.0.1:7003,10.0.0.2:7003",
// "ipv6:...", "dns:///name:7003", "xds:///name:7003"; a plain "host:7003" is one.
bool IsReplicated(absl::string_view target);

// The addresses of a list, in their order from the one on that `random` chooses; other targets as
// they are. gRPC connects to the first that answers, and goes on to the next when it is gone. So
// clients spread over all, and all calls of a client's channel meet one of them.
std::string StartAnywhere(const std::string& target, uint64_t random);

// Can calls be made with these files?
// Errors: InvalidArgument [TLS_CERTIFICATE_INVALID | TOKEN_FILE_INVALID | TOKEN_UNPROTECTED];
// FailedPrecondition [TLS_CERTIFICATE_EXPIRED | SECRET_FILE_UNSAFE]; NotFound
// [SECRET_FILE_UNREADABLE].
absl::Status CheckAccess(const Options& options);

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_OPTIONS_H_
