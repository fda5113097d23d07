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

  // Would a connection to one do for the other? Contexts of TLS are compared by identity: BulkPool
  // has one for as long as the files are the same.
  bool IsSame(const BulkPeer& other) const {
    return address == other.address && tls == other.tls && hello.spec == other.hello.spec &&
           hello.tenant == other.hello.tenant && hello.token == other.hello.token;
  }
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

// Invariants:
//  1. The bytes of a target that were received are all of one answer, or of answers with the same
//     digest, sizes and parent.
//  2. A connection that rested between two pulls and ends before it has answered is replaced by a
//     new one, once, and asked again: whoever ended it meant nothing by it.
// Threads: all is done on the strand, but for Close(), and for Rest() and IsConnected(), which are
// called while no Fetch runs.
class BulkClient : public std::enable_shared_from_this<BulkClient> {
 public:
  // `begun_ns`: now, of the monotonic clock.
  BulkClient(BulkSocket::Strand strand, BulkPeer peer, BulkCounters* counters, int64_t begun_ns)
      : strand_(std::move(strand)),
        peer_(std::move(peer)),
        counters_(counters),
        begun_ns_(begun_ns) {}

  const BulkSocket::Strand& strand() const { return strand_; }
  const BulkPeer& peer() const { return peer_; }
  int64_t begun_ns() const { return begun_ns_; }
  // Is there a connection that owes nothing?
  bool IsConnected() const { return socket_ != nullptr; }
  // The next Fetch is of another pull.
  void Rest() { has_rested_ = true; }

  // Asks for all targets that are not done, and receives them. Connects where it must.
  // On an error the targets say how far they are, and the next call goes on from there.
  // Errors: those of the peer about the connection; as BulkSocket; InvalidArgument
  // [BULK_FRAME_INVALID], what the peer says contradicts what was asked for or said before;
  // FailedPrecondition [BULK_PEER_MISMATCH], its blocks have other sizes.
  BulkSocket::Awaitable<absl::Status> Fetch(std::vector<BulkTarget*> targets);
  // Ends what runs, or the connection that rests. On any thread.
  void Close();

  // How long a connection that rested may take to begin its first answer. The other host may be
  // gone without a word, and a new connection tells that soon.
  static constexpr int64_t kRestedAnswerMs = 1000;

 private:
  BulkSocket::Awaitable<absl::Status> Connect();
  // One attempt of Fetch.
  BulkSocket::Awaitable<absl::Status> Ask(const std::vector<BulkTarget*>& targets,
                                          int64_t first_answer_ms);
  BulkSocket::Awaitable<absl::Status> Receive(uint32_t request_id, BulkTarget* target);
  static absl::Status CheckHead(const BulkBlock& head, BulkTarget* target);

  const BulkSocket::Strand strand_;
  const BulkPeer peer_;
  BulkCounters* const counters_;
  const int64_t begun_ns_;
  std::shared_ptr<BulkSocket> socket_;  // null: not connected
  uint32_t last_request_ = 0;
  int64_t answer_count_ = 0;  // frames that came after WELCOME, over all connections
  bool was_connected_ = false;
  bool has_rested_ = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_CLIENT_H_
