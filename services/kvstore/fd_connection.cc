#include "services/kvstore/fd_connection.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/read.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/kvstore/peer_process.h"

namespace certkv::kvstore {
namespace {

constexpr std::chrono::seconds kFirstRequestTimeout(10);
constexpr absl::string_view kConnectionClosed = "its connection to the descriptor socket closed";

// Copies what fits, zero-terminated.
template <size_t size>
void CopyText(absl::string_view text, char (&to)[size]) {
  const size_t count = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), count);
  to[count] = '\0';
}

absl::Status SendErrorTo(int socket, const absl::Status& status) {
  FdReply reply{};
  reply.magic = kFdMagic;
  reply.code = static_cast<int32_t>(status.code());
  CopyText(ReasonOf(status), reply.reason);
  CopyText(status.message(), reply.message);
  return SendWithFds(socket,
                     absl::string_view(reinterpret_cast<const char*>(&reply), sizeof(reply)), {});
}

absl::Status RequestInvalid(absl::string_view text) {
  return MakeError(absl::StatusCode::kInvalidArgument, "FD_REQUEST_INVALID",
                   absl::StrCat(text, "; see kernels/core/fd_protocol.h"));
}

// Says why and shuts a connection down, whoever owns it by then; the connection notices and closes.
absl::StatusOr<std::function<void(absl::string_view)>> ShutDown(int socket) {
  const auto duplicate = std::make_shared<UniqueFd>(fcntl(socket, F_DUPFD_CLOEXEC, 0));
  if (!duplicate->valid()) {
    return MakeError(absl::StatusCode::kResourceExhausted, "DESCRIPTOR_LIMIT",
                     absl::StrCat("no descriptor is left for another session: ",
                                  std::strerror(errno), "; raise the limit of open files"));
  }
  return std::function<void(absl::string_view)>([duplicate](absl::string_view why) {
    // A peer that is gone, or does not read, is not told.
    SendErrorTo(duplicate->get(),
                MakeError(absl::StatusCode::kFailedPrecondition, kFdSessionEnded,
                          absl::StrCat("the session has ended because ", why, "; attach again")))
        .IgnoreError();
    shutdown(duplicate->get(), SHUT_RDWR);
  });
}

}  // namespace

FdConnection::FdConnection(Socket socket, std::shared_ptr<EngineGate> gate)
    : socket_(std::move(socket)),
      first_request_timer_(socket_.get_executor()),
      peer_(socket_.get_executor()),
      gate_(std::move(gate)) {}

FdConnection::~FdConnection() { End(kConnectionClosed); }

void FdConnection::Start() {
  boost::system::error_code ignored;
  // A send that would block fails instead, and the connection is cut off.
  socket_.native_non_blocking(true, ignored);
  first_request_timer_.expires_after(kFirstRequestTimeout);
  first_request_timer_.async_wait(
      [weak = weak_from_this()](const boost::system::error_code& error) {
        const auto self = weak.lock();
        if (!error && self != nullptr) self->Close();
      });
  ReadRequest();
}

void FdConnection::Close() {
  boost::asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
    boost::system::error_code ignored;
    self->socket_.shutdown(Socket::shutdown_both, ignored);  // the session has a duplicate
    self->socket_.close(ignored);
    self->first_request_timer_.cancel();
    self->peer_.close(ignored);
  });
}

void FdConnection::ReadRequest() {
  boost::asio::async_read(
      socket_, boost::asio::buffer(&request_, sizeof(request_)),
      [self = shared_from_this()](const boost::system::error_code& error, size_t /*count*/) {
        self->OnRequest(error);
      });
}

void FdConnection::OnRequest(const boost::system::error_code& error) {
  if (error) {
    Close();
    End(kConnectionClosed);  // at once, not when the last pointer goes
    return;
  }
  absl::Status status;
  {
    absl::ReaderMutexLock lock(&gate_->mutex);
    if (gate_->engine == nullptr) return;
    status = Answer(gate_->engine);
  }
  if (status.ok()) {
    ReadRequest();
  } else {
    Close();
    End(kConnectionClosed);
  }
}

absl::Status FdConnection::Answer(StoreEngine* engine) {
  absl::Status status;
  if (request_.magic != kFdMagic || request_.reserved != 0) {
    status = RequestInvalid(absl::StrCat("request has magic ", request_.magic, " and reserved ",
                                         request_.reserved, ", expected ", kFdMagic, " and 0"));
  } else {
    status = session_ == SessionId{} ? Connect(engine) : SendStaging(engine);
  }
  if (status.ok()) return status;
  CERTKV_RETURN_IF_ERROR(SendError(status));
  // A client that is known may ask again, for other staging memory.
  const bool may_go_on = session_ != SessionId{} && absl::IsNotFound(status);
  return may_go_on ? absl::OkStatus() : status;
}

absl::Status FdConnection::Connect(StoreEngine* engine) {
  if (request_.staging_id != 0) {
    return RequestInvalid(absl::StrCat("the first request of a connection has staging_id ",
                                       request_.staging_id, ", expected 0"));
  }
  token_.assign(reinterpret_cast<const char*>(request_.token), sizeof(request_.token));
  CERTKV_ASSIGN_OR_RETURN(auto shut_down, ShutDown(socket_.native_handle()));
  CERTKV_ASSIGN_OR_RETURN(const SessionSlabs slabs,
                          engine->ConnectSession(token_, std::move(shut_down)));
  session_ = slabs.session;
  first_request_timer_.cancel();
  CERTKV_RETURN_IF_ERROR(WatchPeer());
  std::vector<int> fds = {slabs.device->export_fd(), slabs.backing->export_fd()};
  if (slabs.staging == nullptr) return SendDescriptors(fds, 0);
  fds.push_back(slabs.staging->export_fd());
  return SendDescriptors(fds, slabs.staging->layout().slot_count());
}

absl::Status FdConnection::SendStaging(StoreEngine* engine) {
  if (std::memcmp(request_.token, token_.data(), token_.size()) != 0) {
    return MakeError(absl::StatusCode::kUnauthenticated, "FD_TOKEN_INVALID",
                     "the token is not the one that opened this connection");
  }
  CERTKV_ASSIGN_OR_RETURN(const auto staging, engine->FindStaging(session_, request_.staging_id));
  CERTKV_ASSIGN_OR_RETURN(const UniqueFd fd, staging->OpenReadOnly());
  return SendDescriptors({fd.get()}, staging->layout().slot_count());
}

absl::Status FdConnection::SendDescriptors(const std::vector<int>& fds,
                                           int32_t staging_slot_count) {
  FdReply reply{};
  reply.magic = kFdMagic;
  reply.fd_count = static_cast<int32_t>(fds.size());
  reply.staging_slot_count = staging_slot_count;
  return SendWithFds(socket_.native_handle(),
                     absl::string_view(reinterpret_cast<const char*>(&reply), sizeof(reply)), fds);
}

absl::Status FdConnection::SendError(const absl::Status& status) {
  return SendErrorTo(socket_.native_handle(), status);
}

void FdConnection::Refuse(int socket, const absl::Status& why) {
  SendErrorTo(socket, why).IgnoreError();
}

absl::Status FdConnection::WatchPeer() {
  absl::StatusOr<UniqueFd> pidfd = OpenPeerPidfd(socket_.native_handle());
  if (!pidfd.ok()) {
    if (absl::IsUnavailable(pidfd.status())) return pidfd.status();
    Log(LogLevel::kWarning, "session_owner_not_watched",
        {{"session", static_cast<int64_t>(session_)}, {"why", pidfd.status().message()}});
    return absl::OkStatus();
  }
  peer_.assign(pidfd->release());
  peer_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                   [weak = weak_from_this()](const boost::system::error_code& error) {
                     const auto self = weak.lock();
                     if (error || self == nullptr) return;
                     self->End("its process ended");
                     self->Close();
                   });
  return absl::OkStatus();
}

void FdConnection::End(absl::string_view why) {
  if (session_ == SessionId{}) return;
  const SessionId session = std::exchange(session_, SessionId{});
  absl::ReaderMutexLock lock(&gate_->mutex);
  if (gate_->engine != nullptr) {
    gate_->engine->EndSession(session, why);
  }
}

}  // namespace certkv::kvstore
