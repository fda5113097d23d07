// What membership asks of etcd (v3 API, server 3.3 and later), as plain calls.
#ifndef CERTKV_SERVICES_CLUSTER_ETCD_CLIENT_H_
#define CERTKV_SERVICES_CLUSTER_ETCD_CLIENT_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/common/certificate.h"

namespace certkv::cluster {

struct EtcdOptions {
  std::vector<std::string> endpoints;  // host:port; asked in turn until one answers
  CertificateFiles tls;                // without a CA no TLS
  int64_t timeout_ms = 3000;           // of a call
};

struct EtcdEntry {
  std::string key;
  std::string value;
  int64_t mod_revision = 0;  // 0: the key is not there
};
struct EtcdListing {
  std::vector<EtcdEntry> entries;
  int64_t revision = 0;  // the store's, when it was read
};
struct EtcdChange {
  bool deleted = false;
  EtcdEntry entry;  // of a deletion without its value
};

// Errors of every call: Unavailable [ETCD_UNAVAILABLE] naming endpoint and cause; the next call
// goes to the next endpoint. Nothing is retried here.
// Threads: safe. Stop() ends calls that run and makes later ones fail.
class EtcdClient {
 public:
  explicit EtcdClient(EtcdOptions options) : options_(std::move(options)) {}
  ~EtcdClient() { Stop(); }
  EtcdClient(const EtcdClient&) = delete;
  EtcdClient& operator=(const EtcdClient&) = delete;

  // A lease of `ttl_seconds`; its id.
  absl::StatusOr<int64_t> GrantLease(int64_t ttl_seconds) ABSL_LOCKS_EXCLUDED(mutex_);
  // Errors: NotFound [ETCD_LEASE_ENDED].
  absl::Status KeepAlive(int64_t lease) ABSL_LOCKS_EXCLUDED(mutex_);
  // Deletes the lease's keys.
  absl::Status Revoke(int64_t lease) ABSL_LOCKS_EXCLUDED(mutex_);
  // Puts `value` under `lease` if the key's mod_revision is still that one (0: it is not there), in
  // one step; says whether it did.
  absl::StatusOr<bool> PutIf(const std::string& key, const std::string& value, int64_t lease,
                             int64_t mod_revision) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<EtcdListing> List(const std::string& prefix) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<EtcdEntry> Get(const std::string& key) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `on_changes` with what happens to keys of `prefix` from `revision` on, in order, and the
  // revision reached; until the connection breaks, which it returns. At most one at a time.
  // Errors: OutOfRange [ETCD_COMPACTED]: changes in between are gone; list again.
  absl::Status Watch(
      const std::string& prefix, int64_t revision,
      const std::function<void(const std::vector<EtcdChange>&, int64_t revision)>& on_changes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // A call's context, cancelled by Stop().
  class Call;

  // The channel to the endpoint of now, and its name.
  std::shared_ptr<grpc::Channel> Channel(std::string* endpoint) ABSL_LOCKS_EXCLUDED(mutex_);
  // Makes a unary call with a deadline.
  absl::Status Ask(
      absl::FunctionRef<grpc::Status(const std::shared_ptr<grpc::Channel>&, grpc::ClientContext*)>
          method) ABSL_LOCKS_EXCLUDED(mutex_);
  // `status` as an error of ours; the next call goes elsewhere.
  absl::Status Failed(const std::string& endpoint, const grpc::Status& status)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const EtcdOptions options_;
  absl::Mutex mutex_;
  size_t endpoint_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<grpc::Channel> channel_ ABSL_GUARDED_BY(mutex_);  // null: none was made
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<grpc::ClientContext*> running_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::cluster

#endif  // CERTKV_SERVICES_CLUSTER_ETCD_CLIENT_H_
