// The store's RPCs as plain calls with core types. Used by Worker and the command line.
#ifndef CERTKV_CLIENTS_CPP_STORE_CLIENT_H_
#define CERTKV_CLIENTS_CPP_STORE_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "clients/cpp/options.h"
#include "clients/cpp/pull_order.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"

namespace certkv::client {

struct LeasedBlocks {
  std::vector<BlockHandle> blocks;
  LeaseId lease{};  // 0 when `blocks` is empty
  int64_t expire_time_ms = 0;
  int32_t shared_count = 0;  // SealBlocks: how many were there already
  int32_t pulled_count = 0;  // PullBlocks: how many came from the other store
};

struct SealItem {
  int32_t staging_slot = -1;
  BlockKey key;
  BlockKey parent;
};

struct RegisteredCache {
  CacheId cache{};
  SpecDigest digest;
  int32_t device_slot_count = 0;
  int32_t backing_slot_count = 0;
  std::string tenant_salt;  // for the keys of its blocks
};

struct AttachedSession {
  SessionId session{};
  std::string fd_token;   // 16 bytes
  std::string fd_socket;  // path
  int32_t staging_slot_count = 0;
  int64_t staging_id = 0;
};

// Errors are the server's, reason included; UNAVAILABLE when it can't be reached. Only calls that
// are idempotent are retried on UNAVAILABLE; what the store refuses for want of room is asked again
// as RetryPlan says. Threads: all calls are safe concurrently.
class StoreClient {
 public:
  explicit StoreClient(const Options& options);  // targets resolved

  absl::StatusOr<RegisteredCache> RegisterCache(const CacheSpec& spec);
  absl::StatusOr<AttachedSession> AttachWorker(CacheId cache);
  absl::Status DetachWorker(SessionId session);
  absl::StatusOr<LeasedBlocks> LookupAndLease(SessionId session, absl::Span<const BlockKey> keys);
  // Has the store fetch what it lacks of the chain from another one, then as LookupAndLease.
  absl::StatusOr<LeasedBlocks> PullBlocks(SessionId session, const std::string& peer,
                                          absl::Span<const BlockKey> keys, PullOrder order);
  // `waits`: for room, as the options say.
  absl::StatusOr<std::vector<int32_t>> ReserveBlocks(SessionId session, int32_t block_count,
                                                     bool waits = true);
  // The staging slots are free afterwards, whatever the outcome; while the store has no room they
  // are kept and the call is made again.
  // `on_device`: the originals are in the session's staging memory on the store's GPU.
  absl::StatusOr<LeasedBlocks> SealBlocks(SessionId session, absl::Span<const SealItem> items,
                                          bool on_device = false);
  // ttl_ms 0: until it is unpinned.
  absl::Status PinBlocks(SessionId session, absl::Span<const BlockKey> keys, bool pinned,
                         int64_t ttl_ms);
  // Drops blocks and all that come after them; how many there were.
  absl::StatusOr<int32_t> DropBlocks(SessionId session, absl::Span<const BlockKey> keys);
  absl::Status AbortBlocks(SessionId session, absl::Span<const int32_t> staging_slots);
  // New deadline, Unix epoch in milliseconds.
  absl::StatusOr<int64_t> RenewLease(SessionId session, LeaseId lease);
  absl::Status ReleaseLease(SessionId session, LeaseId lease);
  // Has the store check leased blocks against their checksums and repair what it can. Errors:
  // DataLoss [ORIGINAL_LOST].
  absl::Status FetchOriginals(SessionId session, LeaseId lease, absl::Span<const BlockKey> keys);
  absl::StatusOr<certkv::kvstore::v1::Stats> GetStats();
  absl::StatusOr<certkv::kvstore::v1::ListBlocksResponse> ListBlocks(CacheId cache,
                                                                     int32_t page_size,
                                                                     const std::string& page_token);

 private:
  Options options_;
  std::unique_ptr<certkv::kvstore::v1::KvStore::Stub> stub_;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_STORE_CLIENT_H_
