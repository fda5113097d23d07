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
           Accepted accepted)
      : path_(std::move(path)),
        peers_(std::move(peers)),
        acceptor_(boost::asio::make_strand(*io_context)),
        retry_timer_(acceptor_.get_executor()),
        accepted_(std::move(accepted)) {}

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

  void HandOver(stream_protocol::socket socket) {
    const absl::StatusOr<UnixPeer> peer = PeerOf(socket.native_handle());
    if (!peer.ok() || !peers_.Allows(*peer)) {
      Log(LogLevel::kWarning, "unix_peer_refused",
          {{"path", path_},
           {"user", peer.ok() ? static_cast<int64_t>(peer->user) : -1},
           {"process", peer.ok() ? static_cast<int64_t>(peer->process) : -1}});
      return;  // the socket closes
    }
    boost::system::error_code ignored;
    socket.native_non_blocking(true, ignored);
    absl::MutexLock lock(&mutex_);
    if (accepted_ == nullptr) return;
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
};

absl::StatusOr<std::unique_ptr<UnixListener>> UnixListener::Create(
    const std::string& path, UnixPeerList peers, boost::asio::io_context* io_context,
    Accepted accepted) {
  auto acceptor =
      std::make_shared<Acceptor>(path, std::move(peers), io_context, std::move(accepted));
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
