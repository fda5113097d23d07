#include "services/common/unix_listener.h"

#include <unistd.h>

#include <boost/asio/dispatch.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/status.h"
#include "services/common/log.h"

namespace certkv {
namespace {

using boost::asio::local::stream_protocol;

constexpr std::chrono::milliseconds kAcceptRetryDelay(100);

}  // namespace

class UnixListener::Acceptor : public std::enable_shared_from_this<Acceptor> {
 public:
  Acceptor(std::string path, UnixPeerList peers, boost::asio::io_context* io_context,
           Accepted accepted, Refused refused)
      : path_(std::move(path)),
        peers_(std::move(peers)),
        acceptor_(boost::asio::make_strand(*io_context)),
        retry_timer_(acceptor_.get_executor()),
        accepted_(std::move(accepted)),
        refused_(std::move(refused)) {}

  absl::Status Listen() {
    boost::system::error_code error;
    acceptor_.open(stream_protocol(), error);
    if (!error) acceptor_.bind(stream_protocol::endpoint(path_), error);
    if (!error) is_bound_ = true;
    // Before it listens nobody can connect, whatever the mode was.
    if (!error) CERTKV_RETURN_IF_ERROR(SetSocketMode(path_, peers_));
    if (!error) acceptor_.listen(stream_protocol::socket::max_listen_connections, error);
    if (error) {
      return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                       absl::StrCat("can't listen on ", path_, ": ", error.message(),
                                    "; is the directory writable?"));
    }
    AcceptNext();
    return absl::OkStatus();
  }

  void Stop() {
    {
      absl::MutexLock lock(&mutex_);
      accepted_ = nullptr;
    }
    boost::asio::dispatch(acceptor_.get_executor(), [self = shared_from_this()] {
      boost::system::error_code ignored;
      self->acceptor_.close(ignored);
      self->retry_timer_.cancel();
    });
    if (is_bound_) unlink(path_.c_str());
  }

 private:
  void AcceptNext() {
    acceptor_.async_accept([self = shared_from_this()](const boost::system::error_code& error,
                                                       stream_protocol::socket socket) {
      self->OnAccept(error, std::move(socket));
    });
  }

  void OnAccept(const boost::system::error_code& error, stream_protocol::socket socket) {
    if (error == boost::asio::error::operation_aborted) return;
    if (error) {
      // No descriptors left, most likely: the next attempt waits until some may have been freed.
      retry_timer_.expires_after(kAcceptRetryDelay);
      retry_timer_.async_wait(
          [self = shared_from_this()](const boost::system::error_code& stopped) {
            if (!stopped) self->AcceptNext();
          });
      return;
    }
    HandOver(std::move(socket));
    AcceptNext();
  }

  absl::Status CheckPeer(int socket) const {
    CERTKV_ASSIGN_OR_RETURN(const UnixPeer peer, PeerOf(socket));
    if (peers_.Allows(peer)) return absl::OkStatus();
    Log(LogLevel::kWarning, "unix_peer_refused",
        {{"path", path_},
         {"user", static_cast<int64_t>(peer.user)},
         {"process", static_cast<int64_t>(peer.process)}});
    return MakeError(absl::StatusCode::kPermissionDenied, "PEER_FORBIDDEN",
                     absl::StrCat("user ", peer.user, " may not connect to ", path_,
                                  "; add it to server.unix_users or a group of its to "
                                  "server.unix_groups"));
  }

  void HandOver(stream_protocol::socket socket) {
    boost::system::error_code ignored;
    socket.native_non_blocking(true, ignored);
    const absl::Status allowed = CheckPeer(socket.native_handle());
    absl::MutexLock lock(&mutex_);
    if (accepted_ == nullptr) return;  // the socket closes
    if (!allowed.ok()) {
      if (refused_ != nullptr) refused_(socket.native_handle(), allowed);
      return;
    }
    const int descriptor = socket.release(ignored);
    if (!ignored) accepted_(descriptor);
  }

  const std::string path_;
  const UnixPeerList peers_;
  stream_protocol::acceptor acceptor_;
  boost::asio::steady_timer retry_timer_;
  bool is_bound_ = false;
  absl::Mutex mutex_;
  Accepted accepted_ ABSL_GUARDED_BY(mutex_);  // null: stopped
  const Refused refused_;                      // may be null
};

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Create(
    const std::string& path, UnixPeerList peers, boost::asio::io_context* io_context,
    Accepted accepted, Refused refused) {
  auto acceptor = std::make_shared<Acceptor>(path, std::move(peers), io_context,
                                             std::move(accepted), std::move(refused));
  const absl::Status status = acceptor->Listen();
  if (!status.ok()) {
    acceptor->Stop();
    return status;
  }
  return std::unique_ptr<UnixListener>(new UnixListener(std::move(acceptor)));
}

UnixListener::UnixListener(std::shared_ptr<Acceptor> acceptor) : acceptor_(std::move(acceptor)) {}

UnixListener::~UnixListener() { acceptor_->Stop(); }

}  // namespace certkv
