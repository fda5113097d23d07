// BulkClient: one connection to another store, over which blocks come into slots of this one.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_CLIENT_H_
#define CERTKV_SERVICES_KVSTORE_BULK_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"
#include "services/kvstore/bulk_counters.h"
#include "services/kvstore/bulk_socket.h"

namespace certkv::kvstore {

// What a connection needs to begin.
struct BulkPeer {
  std::string address;  // "host:port"
  BulkSocket::Tls tls;  // null: in the clear
  BulkHello hello;
  int64_t plane_bytes = 0;  // of a block of this store, which the peer's must be like
  int64_t original_bytes = 0;
  int64_t timeout_ms = 0;
};

// One block that is fetched: where its bytes go, and how far it is.
struct BulkTarget {
  BlockKey key;
  uint32_t parts = kBulkAllParts;
  std::vector<absl::Span<uint8_t>> spans;  // of these parts, in their order
  int64_t received_bytes = 0;              // of the spans; kept when a connection is cut
  bool has_head = false;
  BulkBlock head;       // what the peer says of it, once has_head
  absl::Status status;  // an answer that is no block: the peer's error
  bool is_done = false;
};

// Invariant: the bytes of a target that were received are all of one answer, or of answers with the
// same digest, sizes and parent.
// Threads: all is done on the strand, but for Close().
class BulkClient : public std::enable_shared_from_this<BulkClient> {
 public:
  BulkClient(BulkSocket::Strand strand, BulkPeer peer, BulkCounters* counters)
      : strand_(std::move(strand)), peer_(std::move(peer)), counters_(counters) {}

  const BulkSocket::Strand& strand() const { return strand_; }

  // Asks for all targets that are not done, and receives them. Connects where it must.
  // On an error the targets say how far they are, and the next call goes on from there.
  // Errors: those of the peer about the connection; as BulkSocket; InvalidArgument
  // [BULK_FRAME_INVALID], what the peer says contradicts what was asked for or said before;
  // FailedPrecondition [BULK_PEER_MISMATCH], its blocks have other sizes.
  BulkSocket::Awaitable<absl::Status> Fetch(std::vector<BulkTarget*> targets);
  // Ends what runs. On any thread.
  void Close();

 private:
  BulkSocket::Awaitable<absl::Status> Connect();
  BulkSocket::Awaitable<absl::Status> Receive(uint32_t request_id, BulkTarget* target);
  static absl::Status CheckHead(const BulkBlock& head, BulkTarget* target);

  const BulkSocket::Strand strand_;
  const BulkPeer peer_;
  BulkCounters* const counters_;
  std::shared_ptr<BulkSocket> socket_;  // null: not connected
  uint32_t last_request_ = 0;
  bool was_connected_ = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_CLIENT_H_
