#include "services/common/http_server.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using asio::ip::tcp;

constexpr size_t kTokenBytesMin = 16;
constexpr size_t kTokenBytesMax = 512;

absl::StatusOr<std::string> ReadToken(const std::string& path) {
  const auto refuse = [&path](absl::string_view why) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "HTTP_TOKEN_INVALID",
                     absl::StrCat("token file ", path, " ", why));
  };
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) return refuse("can't be read");
  // As CheckPrivateFile: what a Secret of Kubernetes is mounted with, root's and the group's, is
  // fine.
  if ((info.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return refuse("can be read or changed by others; chmod 600");
  }
  std::string text(kTokenBytesMax + 2, '\0');
  const ssize_t got = read(file.get(), text.data(), text.size());
  if (got < 0) return refuse("can't be read");
  text.resize(static_cast<size_t>(got));
  const std::string token(absl::StripAsciiWhitespace(text));
  if (token.size() < kTokenBytesMin || token.size() > kTokenBytesMax) {
    return refuse(absl::StrCat("holds a token of ", token.size(), " bytes, must be ",
                               kTokenBytesMin, " to ", kTokenBytesMax));
  }
  return token;
}

// Does the Host header name this machine's loopback?
bool IsLoopbackHost(absl::string_view host) {
  if (absl::StartsWith(host, "[")) {
    return host.substr(0, host.find(']') + 1) == "[::1]";
  }
  host = host.substr(0, host.find(':'));
  return host == "localhost" || host == "127.0.0.1";
}

void AddHeaders(http::response<http::string_body>* response) {
  response->set("Content-Security-Policy",
                "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
                "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
  response->set("X-Content-Type-Options", "nosniff");
  response->set("X-Frame-Options", "DENY");
  response->set("Referrer-Policy", "no-referrer");
  response->set("Cross-Origin-Resource-Policy", "same-origin");
  response->set("Cross-Origin-Opener-Policy", "same-origin");
  response->set(http::field::cache_control, "no-store");
}

}  // namespace

// Listener and routes; its connections keep it alive.
class HttpServer::Core : public std::enable_shared_from_this<HttpServer::Core> {
 public:
  Core(std::string token, std::vector<HttpRoute> routes, asio::io_context* io_context)
      : token_(std::move(token)),
        routes_(std::move(routes)),
        io_context_(io_context),
        acceptor_(*io_context) {}

  absl::Status Listen(const tcp::endpoint& endpoint) {
    boost::system::error_code error;
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      return MakeError(absl::StatusCode::kUnavailable, "HTTP_LISTEN_FAILED",
                       absl::StrCat("can't listen on ", endpoint.address().to_string(), ":",
                                    endpoint.port(), ": ", error.message(),
                                    "; is the port taken? choose another in server.http_address"));
    }
    port_ = acceptor_.local_endpoint().port();
    return absl::OkStatus();
  }
  void Accept();
  void Stop();
  uint16_t port() const { return port_; }

  // What to answer. Doesn't throw; handlers don't either.
  HttpResponse Answer(const http::request<http::empty_body>& request) const;

 private:
  class Connection;
  bool IsAllowed(const http::request<http::empty_body>& request) const;
  const HttpRoute* RouteOf(const std::string& path) const;
  void Remove(Connection* connection) {
    absl::MutexLock lock(&mutex_);
    connections_.erase(connection);
  }

  const std::string token_;  // "" = loopback hosts only
  const std::vector<HttpRoute> routes_;
  asio::io_context* const io_context_;
  uint16_t port_ = 0;
  absl::Mutex mutex_;
  tcp::acceptor acceptor_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<Connection*> connections_ ABSL_GUARDED_BY(mutex_);
};

// One request after the other. Each handler runs on the connection's strand.
class HttpServer::Core::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<Core> core, tcp::socket socket)
      : core_(std::move(core)), stream_(std::move(socket)) {}
  ~Connection() { core_->Remove(this); }

  void Read() {
    parser_.emplace();
    parser_->header_limit(kHeaderBytesMax);
    parser_->body_limit(0);
    stream_.expires_after(std::chrono::seconds(kIdleSeconds));
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](beast::error_code error, size_t /*bytes*/) {
                       if (!error) self->Write();
                     });
  }
  // From any thread.
  void Close() {
    asio::post(stream_.get_executor(), [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->stream_.close();
    });
  }

 private:
  void Write() {
    const http::request<http::empty_body>& request = parser_->get();
    HttpResponse answer = core_->Answer(request);
    response_ = {};
    response_.version(request.version());
    response_.result(static_cast<http::status>(answer.status));
    response_.set(http::field::content_type, answer.content_type);
    if (answer.status == 401) response_.set(http::field::www_authenticate, "Bearer");
    if (answer.status == 405) response_.set(http::field::allow, "GET, HEAD");
    AddHeaders(&response_);
    response_.keep_alive(request.keep_alive());
    // HEAD tells the length of a body that isn't sent.
    response_.content_length(answer.body.size());
    if (request.method() != http::verb::head) response_.body() = std::move(answer.body);
    http::async_write(stream_, response_,
                      [self = shared_from_this()](beast::error_code error, size_t /*bytes*/) {
                        if (error) return;
                        if (self->response_.keep_alive()) return self->Read();
                        beast::error_code ignored;
                        self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
                      });
  }

  const std::shared_ptr<Core> core_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_{kHeaderBytesMax};
  std::optional<http::request_parser<http::empty_body>> parser_;
  http::response<http::string_body> response_;
};

void HttpServer::Core::Accept() {
  absl::MutexLock lock(&mutex_);
  if (stopped_) return;
  acceptor_.async_accept(
      asio::make_strand(*io_context_),
      [self = shared_from_this()](boost::system::error_code error, tcp::socket socket) {
        if (error == asio::error::operation_aborted) return;
        if (!error) {
          std::shared_ptr<Connection> connection;
          {
            absl::MutexLock lock(&self->mutex_);
            if (self->stopped_) return;
            if (self->connections_.size() < kConnectionsMax) {
              connection = std::make_shared<Connection>(self, std::move(socket));
              self->connections_.insert(connection.get());
            }
          }
          if (connection != nullptr) connection->Read();
        }
        self->Accept();
      });
}

void HttpServer::Core::Stop() {
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
  boost::system::error_code ignored;
  acceptor_.close(ignored);
  for (Connection* connection : connections_) connection->Close();
}

bool HttpServer::Core::IsAllowed(const http::request<http::empty_body>& request) const {
  if (token_.empty()) {
    const auto host = request[http::field::host];
    return IsLoopbackHost({host.data(), host.size()});
  }
  const auto field = request[http::field::authorization];
  absl::string_view given(field.data(), field.size());
  return absl::ConsumePrefix(&given, "Bearer ") && given.size() == token_.size() &&
         CRYPTO_memcmp(given.data(), token_.data(), token_.size()) == 0;
}

const HttpRoute* HttpServer::Core::RouteOf(const std::string& path) const {
  const HttpRoute* best = nullptr;
  for (const HttpRoute& route : routes_) {
    if (route.path == path) return &route;
    const bool is_folder = route.path.size() > 1 && route.path.back() == '/';
    if (is_folder && absl::StartsWith(path, route.path) &&
        (best == nullptr || route.path.size() > best->path.size())) {
      best = &route;
    }
  }
  return best;
}

HttpResponse HttpServer::Core::Answer(const http::request<http::empty_body>& request) const {
  const auto plain = [](int status, absl::string_view text) {
    return HttpResponse{.status = status, .body = absl::StrCat(text, "\n")};
  };
  if (request.method() != http::verb::get && request.method() != http::verb::head) {
    return plain(405, "only GET and HEAD");
  }
  HttpRequest parsed;
  if (!ParseHttpTarget({request.target().data(), request.target().size()}, &parsed)) {
    return plain(400, "the target is no path");
  }
  const HttpRoute* route = RouteOf(parsed.path);
  if ((route == nullptr || !route->is_open) && !IsAllowed(request)) {
    return token_.empty() ? plain(403, "ask by a loopback name: 127.0.0.1, [::1] or localhost")
                          : plain(401, "send Authorization: Bearer with the token");
  }
  return route == nullptr ? plain(404, "nothing is here") : route->handler(parsed);
}

HttpServer::HttpServer(std::shared_ptr<Core> core) : core_(std::move(core)) {}

HttpServer::~HttpServer() { core_->Stop(); }

uint16_t HttpServer::port() const { return core_->port(); }

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpOptions& options,
                                                              std::vector<HttpRoute> routes,
                                                              asio::io_context* io_context) {
  const size_t colon = options.address.rfind(':');
  if (colon == std::string::npos) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NO_ADDRESS",
                     "http_address is no host:port");
  }
  std::string host = options.address.substr(0, colon);
  if (absl::StartsWith(host, "[") && absl::EndsWith(host, "]")) {
    host = host.substr(1, host.size() - 2);
  }
  boost::system::error_code error;
  tcp::resolver resolver(*io_context);
  const auto found =
      resolver.resolve(host, options.address.substr(colon + 1), tcp::resolver::passive, error);
  if (error || found.empty()) {
    return MakeError(
        absl::StatusCode::kUnavailable, "HTTP_LISTEN_FAILED",
        absl::StrCat("http_address ", options.address, " is not known: ", error.message()));
  }
  const tcp::endpoint endpoint = found.begin()->endpoint();
  std::string token;
  if (!options.token_file.empty()) {
    CERTKV_ASSIGN_OR_RETURN(token, ReadToken(options.token_file));
  } else if (!endpoint.address().is_loopback()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "HTTP_TOKEN_REQUIRED",
                     absl::StrCat("http_address ", options.address,
                                  " can be reached from other machines; set http_token_file, or "
                                  "listen on 127.0.0.1"));
  }
  auto core = std::make_shared<Core>(std::move(token), std::move(routes), io_context);
  CERTKV_RETURN_IF_ERROR(core->Listen(endpoint));
  core->Accept();
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(core)));
}

}  // namespace certkv
