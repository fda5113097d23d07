#include "services/kvstore/bulk_server.h"

#include <algorithm>
#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <limits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/peer_session.h"

namespace certkv::kvstore {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

// A peer that asks for nothing keeps its session and connection for so long.
// Longer than kvstore.bulk_idle_time may be, so that mostly the peer ends it.
constexpr int64_t kIdleMs = 60'000;
constexpr std::chrono::milliseconds kAcceptRetry{100};

}  // namespace

class BulkServer::Impl : public std::enable_shared_from_this<BulkServer::Impl> {
 public:
  Impl(const BulkConfig& config, Dependencies dependencies, asio::io_context* io_context)
      : config_(config),
        with_(std::move(dependencies)),
        io_context_(io_context),
        strand_(asio::make_strand(*io_context)),
        acceptor_(strand_) {}

  absl::Status Listen() {
    CERTKV_ASSIGN_OR_RETURN(last_tls_, MakeBulkServerTls(config_.access, with_.clock->NowMs()));
    const size_t colon = config_.address.rfind(':');
    std::string host = config_.address.substr(0, colon);
    if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    error_code error;
    tcp::resolver resolver(strand_);
    const auto found = resolver.resolve(host, config_.address.substr(colon + 1), error);
    if (!error && found.empty()) error = asio::error::host_not_found;
    if (!error) {
      const tcp::endpoint endpoint = found.begin()->endpoint();
      acceptor_.open(endpoint.protocol(), error);
      if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
      if (!error) acceptor_.bind(endpoint, error);
      if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
      if (!error) port_ = acceptor_.local_endpoint(error).port();
    }
    if (error) {
      return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                       absl::StrCat("can't listen on kvstore.bulk_address ", config_.address, ": ",
                                    error.message()));
    }
    asio::co_spawn(strand_, Accept(shared_from_this()), asio::detached);
    return absl::OkStatus();
  }

  int32_t port() const { return port_; }

  void Stop() {
    asio::post(strand_, [self = shared_from_this()] {
      error_code ignored;
      self->acceptor_.close(ignored);
    });
    absl::MutexLock lock(&mutex_);
    is_stopped_ = true;
    for (const auto& weak : connections_) {
      if (const auto connection = weak.lock()) connection->socket->Close();
    }
  }

 private:
  template <typename T>
  using Awaitable = BulkSocket::Awaitable<T>;
  using SocketPtr = std::shared_ptr<BulkSocket>;
  struct Connection {
    SocketPtr socket;
    std::atomic<int64_t> idle_since_ns{0};  // it waits for a GET; 0: it does not
  };
  using ConnectionPtr = std::shared_ptr<Connection>;

  // Coroutines are static functions whose first argument keeps the server: GCC 12 destroys
  // temporaries of lambdas twice.
  static Awaitable<void> Accept(std::shared_ptr<Impl> self) {
    while (self->acceptor_.is_open()) {
      const auto strand = asio::make_strand(*self->io_context_);
      tcp::socket accepted(strand);
      error_code error;
      co_await self->acceptor_.async_accept(accepted,
                                            asio::redirect_error(asio::use_awaitable, error));
      if (error == asio::error::operation_aborted) break;
      if (error) {  // no descriptor is free, say; it would fail again at once
        asio::steady_timer wait(self->strand_);
        wait.expires_after(kAcceptRetry);
        co_await wait.async_wait(asio::redirect_error(asio::use_awaitable, error));
        continue;
      }
      const auto connection = std::make_shared<Connection>();
      connection->socket =
          std::make_shared<BulkSocket>(strand, self->CurrentTls(), std::move(accepted));
      if (!self->Add(connection)) continue;
      asio::co_spawn(strand, Serve(self, connection), asio::detached);
    }
  }

  // Made for each connection, so that renewed certificates are used. On the acceptor's strand.
  BulkSocket::Tls CurrentTls() {
    auto tls = MakeBulkServerTls(config_.access, with_.clock->NowMs());
    if (tls.ok()) {
      last_tls_ = *tls;
    } else {
      Log(LogLevel::kError, "bulk_certificate_refused",
          {{"reason", ReasonOf(tls.status())}, {"message", tls.status().message()}});
    }
    return last_tls_;
  }

  // False: there are too many already, of which none rests, and the socket closes.
  bool Add(const ConnectionPtr& connection) {
    absl::MutexLock lock(&mutex_);
    connections_.erase(std::remove_if(connections_.begin(), connections_.end(),
                                      [](const auto& weak) { return weak.expired(); }),
                       connections_.end());
    const bool is_full = static_cast<int32_t>(connections_.size()) >= config_.connection_limit;
    if (is_stopped_ || (is_full && !CloseLongestIdle())) {
      with_.counters->peers_refused.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    connections_.push_back(connection);
    return true;
  }

  // Peers keep connections for their next pull, and make new ones when these are gone.
  bool CloseLongestIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    size_t longest = connections_.size();
    int64_t since_ns = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i < connections_.size(); ++i) {
      const ConnectionPtr connection = connections_[i].lock();
      const int64_t idle_ns = connection == nullptr ? 0 : connection->idle_since_ns.load();
      if (idle_ns == 0 || idle_ns >= since_ns) continue;
      longest = i;
      since_ns = idle_ns;
    }
    if (longest == connections_.size()) return false;
    if (const ConnectionPtr connection = connections_[longest].lock()) connection->socket->Close();
    connections_.erase(connections_.begin() + static_cast<std::ptrdiff_t>(longest));
    with_.counters->connections_displaced.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  static Awaitable<void> Serve(std::shared_ptr<Impl> self, ConnectionPtr connection) {
    const SocketPtr socket = connection->socket;
    self->with_.counters->connections.fetch_add(1, std::memory_order_relaxed);
    socket->ExpireAfter(self->config_.timeout_ms);
    absl::Status status = co_await socket->AcceptTls();
    if (status.ok()) status = co_await Converse(self, connection);
    connection->idle_since_ns = 0;
    const bool is_cut = ReasonOf(status) == "BULK_DISCONNECTED";
    if (!is_cut) {
      self->with_.counters->peers_refused.fetch_add(1, std::memory_order_relaxed);
      Log(LogLevel::kWarning, "bulk_peer_refused",
          {{"reason", ReasonOf(status)}, {"message", status.message()}});
      socket->ExpireAfter(self->config_.timeout_ms);
      co_await socket->Write(EncodeBulkError(0, status));
    }
    socket->Close();
    self->with_.counters->connections.fetch_sub(1, std::memory_order_relaxed);
  }

  // Until the peer goes, or breaks the rules. Never OK.
  static Awaitable<absl::Status> Converse(std::shared_ptr<Impl> self, ConnectionPtr connection) {
    const SocketPtr socket = connection->socket;
    absl::StatusOr<BulkFrame> frame = co_await socket->ReadFrame();
    if (!frame.ok()) co_return frame.status();
    const absl::StatusOr<BulkHello> hello = self->CheckHello(*frame);
    if (!hello.ok()) co_return hello.status();
    CallOrigin origin = socket->Origin();
    origin.token = hello->token;
    const absl::StatusOr<std::string> tenant = self->Admit(origin, hello->tenant);
    if (!tenant.ok()) co_return tenant.status();
    error_code ignored;
    const std::string name = socket->tcp().remote_endpoint(ignored).address().to_string();
    PeerSession session(self->with_.engine);
    const absl::Status opened = session.Open(hello->spec, *tenant, name);
    if (!opened.ok()) co_return opened;
    const auto cache = self->with_.engine->CacheOf(session.id());
    if (!cache.ok()) co_return cache.status();
    absl::Status status = co_await socket->Write(EncodeBulkWelcome(
        {*ChooseBulkVersion(*hello), PlaneBytesOf(**cache), OriginalBytesOf(**cache)}));
    while (status.ok()) {
      socket->ExpireAfter(kIdleMs);
      connection->idle_since_ns = self->with_.clock->MonotonicNs();
      frame = co_await socket->ReadFrame();
      connection->idle_since_ns = 0;
      if (!frame.ok()) co_return frame.status();
      if (frame->header.type != BulkFrameType::kGet) co_return Unexpected(frame->header);
      const absl::StatusOr<BulkGet> get = ParseBulkGet(frame->body);
      if (!get.ok()) co_return get.status();
      // Asked for every block: a token may be withdrawn, a certificate may expire.
      const absl::StatusOr<std::string> again = self->Admit(origin, *tenant);
      if (!again.ok()) co_return again.status();
      socket->ExpireAfter(self->config_.timeout_ms);
      status = co_await Answer(self, socket, session.id(), frame->header.request_id, *get);
    }
    co_return status;
  }

  absl::StatusOr<BulkHello> CheckHello(const BulkFrame& frame) const {
    CERTKV_RETURN_IF_ERROR(with_.check_serving());
    if (frame.header.type != BulkFrameType::kHello) return Unexpected(frame.header);
    CERTKV_ASSIGN_OR_RETURN(BulkHello hello, ParseBulkHello(frame.body));
    CERTKV_RETURN_IF_ERROR(ChooseBulkVersion(hello).status());
    return hello;
  }

  // The tenant that the caller may read for.
  absl::StatusOr<std::string> Admit(const CallOrigin& origin, const std::string& tenant) const {
    CERTKV_RETURN_IF_ERROR(with_.check_serving());
    if (with_.access == nullptr) return tenant;
    CERTKV_ASSIGN_OR_RETURN(const IdentityPtr caller, with_.access->Identify(origin));
    CERTKV_RETURN_IF_ERROR(caller->CheckScope(Scope::kRead));
    return caller->ResolveTenant(tenant);
  }

  static absl::Status Unexpected(const BulkHeader& header) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BULK_FRAME_INVALID",
                     absl::StrCat("a frame of type ", static_cast<int>(header.type),
                                  " came out of turn; a client says HELLO once, then GET"));
  }

  // A block, or why not; an error of its own only when the connection is over, as it is when its
  // session is: a cache that no worker uses makes room for another.
  static Awaitable<absl::Status> Answer(std::shared_ptr<Impl> self, SocketPtr socket,
                                        SessionId session, uint32_t request_id, BulkGet get) {
    StoreEngine* const engine = self->with_.engine;
    LeaseId lease{};
    SharedBlocks shared;
    const absl::Status found = self->Find(session, get.key, &lease, &shared);
    absl::Status status;
    if (found.ok()) {
      const SharedBlock& block = shared.blocks[0];
      const auto spans = PayloadSpans(*shared.cache, block.slots, (get.parts & kBulkPlanes) != 0,
                                      (get.parts & kBulkOriginals) != 0);
      BulkBlock answer{block.key,          block.parent, block.originals_digest,
                       block.seal_time_ms, get.parts,    0,
                       get.offset};
      for (const auto& span : spans) answer.total_bytes += static_cast<int64_t>(span.size());
      if (get.offset <= answer.total_bytes) {
        const int64_t sent = answer.total_bytes - get.offset;
        status = co_await socket->Write(EncodeBulkBlock(request_id, answer), spans, get.offset);
        if (status.ok()) {
          self->with_.counters->blocks_sent.fetch_add(1, std::memory_order_relaxed);
          self->with_.counters->bytes_sent.fetch_add(sent, std::memory_order_relaxed);
        }
      } else {
        status = MakeError(absl::StatusCode::kInvalidArgument, "BULK_FRAME_INVALID",
                           absl::StrCat("a GET from byte ", get.offset, " on, of a block of ",
                                        answer.total_bytes, " bytes"));
      }
    } else if (ReasonOf(found) == "SESSION_NOT_FOUND") {
      status = found;
    } else {
      status = co_await socket->Write(EncodeBulkError(request_id, found));
    }
    if (lease != LeaseId{}) engine->ReleaseLease(session, lease).IgnoreError();
    co_return status;
  }

  absl::Status Find(SessionId session, const BlockKey& key, LeaseId* lease, SharedBlocks* shared) {
    CERTKV_ASSIGN_OR_RETURN(const LeasedBlocks leased,
                            with_.engine->LookupAndLease(session, {key}, with_.lease_ms));
    if (leased.blocks.empty()) {
      return MakeError(absl::StatusCode::kNotFound, "BLOCK_NOT_FOUND",
                       absl::StrCat("block ", ToHex(key.view(), 8), " is not in that store"));
    }
    *lease = leased.lease;
    CERTKV_ASSIGN_OR_RETURN(*shared, with_.engine->ShareLeased(session, leased.lease));
    return absl::OkStatus();
  }

  const BulkConfig config_;
  const Dependencies with_;
  asio::io_context* const io_context_;
  const BulkSocket::Strand strand_;
  tcp::acceptor acceptor_;
  BulkSocket::Tls last_tls_;  // the last that could be made; null only where there is to be none
  int32_t port_ = 0;
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

absl::StatusOr<std::unique_ptr<BulkServer>> BulkServer::Create(const BulkConfig& config,
                                                               Dependencies dependencies,
                                                               asio::io_context* io_context) {
  auto impl = std::make_shared<Impl>(config, std::move(dependencies), io_context);
  CERTKV_RETURN_IF_ERROR(impl->Listen());
  return std::unique_ptr<BulkServer>(new BulkServer(std::move(impl)));
}

BulkServer::BulkServer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

BulkServer::~BulkServer() { Stop(); }

int32_t BulkServer::port() const { return impl_->port(); }

void BulkServer::Stop() { impl_->Stop(); }

}  // namespace certkv::kvstore
