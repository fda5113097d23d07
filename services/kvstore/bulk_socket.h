// BulkSocket: one connection of the bulk plane, in the clear or under TLS, with deadlines.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_SOCKET_H_
#define CERTKV_SERVICES_KVSTORE_BULK_SOCKET_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "services/common/access_control.h"
#include "services/kvstore/bulk_config.h"
#include "services/kvstore/bulk_frame.h"

namespace certkv::kvstore {

// A frame that was read, but for its data.
struct BulkFrame {
  BulkHeader header;
  std::string body;
};

// Coroutines that take `this` keep a shared pointer to it in their caller.
// Threads: all is done on the strand, but for Close. Nothing blocks.
// Errors everywhere: Unavailable [BULK_DISCONNECTED], the connection is cut, or the deadline was
// reached; the socket is closed then.
class BulkSocket : public std::enable_shared_from_this<BulkSocket> {
 public:
  using Strand = boost::asio::strand<boost::asio::io_context::executor_type>;
  template <typename T>
  using Awaitable = boost::asio::awaitable<T>;
  using Tls = std::shared_ptr<boost::asio::ssl::context>;

  // `tls` null: in the clear. `accepted` is a connection that a server got, on the same strand.
  BulkSocket(Strand strand, Tls tls);
  BulkSocket(Strand strand, Tls tls, boost::asio::ip::tcp::socket accepted);
  BulkSocket(const BulkSocket&) = delete;
  BulkSocket& operator=(const BulkSocket&) = delete;

  const Strand& strand() const { return strand_; }
  boost::asio::ip::tcp::socket& tcp() { return stream_.next_layer(); }

  // What is not done this much later is ended. Counts anew with every call.
  void ExpireAfter(int64_t timeout_ms);
  // Nothing is ended any more until ExpireAfter: the connection rests.
  void NeverExpire();
  // Ends what runs. On any thread.
  void Close();

  // Connects to "host:port", and under TLS makes sure that it is that host.
  Awaitable<absl::Status> Connect(const std::string& address);
  // Of an accepted connection. Errors also: Unauthenticated [BULK_TLS_FAILED].
  Awaitable<absl::Status> AcceptTls();
  // Who is at the other end, after the handshake.
  CallOrigin Origin() const;

  // Reads a frame but its data. Errors also: as ParseBulkHeader and CheckBulkBody.
  Awaitable<absl::StatusOr<BulkFrame>> ReadFrame();
  // Fills the spans from byte `*done` on, counted over all of them, and counts *done on.
  Awaitable<absl::Status> ReadData(absl::Span<const absl::Span<uint8_t>> spans, int64_t* done);
  // Writes the frame, then the spans from byte `offset` on: from where they lie.
  Awaitable<absl::Status> Write(std::string frame, absl::Span<const absl::Span<uint8_t>> spans = {},
                                int64_t offset = 0);

 private:
  Awaitable<absl::Status> Handshake(boost::asio::ssl::stream_base::handshake_type type);
  absl::Status Disconnected(absl::string_view doing, const boost::system::error_code& error);

  const Strand strand_;
  const Tls tls_;
  // Where there is no TLS, its context is a dummy and the layer below is used.
  std::unique_ptr<boost::asio::ssl::context> no_tls_;
  boost::asio::ssl::stream<boost::asio::ip::tcp::socket> stream_;
  boost::asio::steady_timer timer_;
  bool expired_ = false;
};

// What a connection's buffers are set to where the system allows so many bytes; 0: they are left
// alone.
int BulkBufferBytes(int64_t limit_bytes);

// Contexts from the files of a server's access config, read now: a connection is made with the
// certificates of its time. Null where it says insecure.
// Errors: as CheckCertificateFiles.
absl::StatusOr<BulkSocket::Tls> MakeBulkServerTls(const AccessConfig& access, int64_t now_ms);
absl::StatusOr<BulkSocket::Tls> MakeBulkClientTls(const BulkConfig& config, int64_t now_ms);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_SOCKET_H_
