// BulkPool: connections to other stores that no pull uses at the moment, for the next one.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_POOL_H_
#define CERTKV_SERVICES_KVSTORE_BULK_POOL_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/common/clock.h"
#include "services/kvstore/bulk_client.h"
#include "services/kvstore/bulk_config.h"
#include "services/kvstore/bulk_counters.h"

namespace certkv::kvstore {

// Invariants:
//  1. A connection is used by one pull at a time.
//  2. A pull gets only connections to its peer that were made for its cache and tenant, with the
//     token and the certificate files of now.
//  3. At most config.idle_connections to one peer rest, kIdleMax in all, none for longer than
//     config.idle_time_ms, and none that is older than kAgeMsMax: what was believed of a peer when
//     it showed its certificate is asked again then.
// Threads: all methods are safe; none blocks but on files.
class BulkPool : public std::enable_shared_from_this<BulkPool> {
 public:
  using ClientPtr = std::shared_ptr<BulkClient>;

  BulkPool(const BulkConfig& config, const Clock* clock, BulkCounters* counters,
           boost::asio::io_context* io_context);
  ~BulkPool();

  // A context from the files as they are now; the same one while they are the same. Whether they
  // are valid and private is asked once a minute. Null where the config says insecure. Errors: as
  // MakeBulkClientTls.
  absl::StatusOr<BulkSocket::Tls> CurrentTls() ABSL_LOCKS_EXCLUDED(mutex_);
  // The connection to `peer` that was used last, or a new one, which connects when it is first
  // used.
  ClientPtr Take(const BulkPeer& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes it back; no Fetch of it runs. One that is of no more use is closed.
  void Return(const ClientPtr& client) ABSL_LOCKS_EXCLUDED(mutex_);
  // Closes what rests, and what comes back. Doesn't block.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  static constexpr size_t kIdleMax = 128;
  static constexpr int64_t kAgeMsMax = 300'000;
  static constexpr int64_t kFilesCheckMs = 60'000;

 private:
  struct Idle {
    ClientPtr client;
    int64_t since_ns = 0;
  };

  // Of what the certificate files hold.
  std::string FilesDigest() const;
  bool IsOld(const BulkClient& client) const;
  void CloseFirst() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Closes what rests for too long or is too old.
  void CloseExpired() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Has the timer call Sweep when the first is to be closed.
  void Schedule() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Sweep() ABSL_LOCKS_EXCLUDED(mutex_);

  const BulkConfig config_;
  const Clock* const clock_;
  BulkCounters* const counters_;
  boost::asio::io_context* const io_context_;

  absl::Mutex mutex_;
  std::string tls_digest_ ABSL_GUARDED_BY(mutex_);
  BulkSocket::Tls tls_ ABSL_GUARDED_BY(mutex_);
  int64_t tls_checked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::list<Idle> idle_ ABSL_GUARDED_BY(mutex_);  // the longest first
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(mutex_);
  bool is_scheduled_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_POOL_H_
