// StoreClient: the certifier's connection to its store. Attaches as a reader, maps the slabs, and
// notices when the store goes away.
//
// Two threads of its own, because both block: one asks the store (gRPC and the descriptor socket),
// one waits on the descriptor sockets. They are not the io_context's: in certkvd the store answers
// on those.
#ifndef CERTKV_SERVICES_CERTIFIER_STORE_CLIENT_H_
#define CERTKV_SERVICES_CERTIFIER_STORE_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "services/certifier/cache_provider.h"

namespace certkv::certifier {

struct StoreClientOptions {
  std::string store_socket;         // path of the Unix socket of the store's gRPC service
  int64_t timeout_ms = 2000;        // of each call and each exchange on the descriptor socket
  std::string token_file = {};      // read for each attachment; "" = no token is shown
  DeviceRuntime* device = nullptr;  // opens the GPU's copies of caches that have one
  bool pin_originals = false;       // and pins the originals of these
};

// Invariants:
//  1. At most one live attachment per cache and tenant; it lives while its descriptor socket is
//  connected.
//  2. When that socket closes, the attachment's MappedCache is marked dead before another one of
//     that cache is made: what was mapped may be freed and given anew by the store that comes next.
// Threads: all methods may be called concurrently.
class StoreClient final : public CacheProvider {
 public:
  explicit StoreClient(StoreClientOptions options);
  // Detaches from the store. Calls what `done`s are left with Unavailable [STORE_UNREACHABLE].
  ~StoreClient() override;

  void Acquire(const CacheOwner& owner, int64_t staging_id, Done done,
               const std::string& traceparent = "") override;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_STORE_CLIENT_H_
