// HttpServer: the small HTTP server of a process, for metrics and the dashboard. HTTP/1.1, GET and
// HEAD, answers from memory.
//
// Who may ask: where a token is set, whoever sends "Authorization: Bearer <token>"; else only what
// asks for this very host by a loopback name, so that a page of another site that a browser on this
// machine shows can't read the answers (DNS rebinding). Open routes are answered to anybody: they
// carry no data.
//
// Every answer forbids what a page doesn't need: other hosts, inline scripts and styles, frames,
// guessing of content types, caches.
//
// Limits: kConnectionsMax at a time (more are closed at once), kHeaderBytesMax for a request, no
// body, kIdleTime between a connection's requests.
#ifndef CERTKV_SERVICES_COMMON_HTTP_SERVER_H_
#define CERTKV_SERVICES_COMMON_HTTP_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/common/http_target.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace certkv {

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// A path that ends in '/' answers everything below it that no other route names, except "/" itself.
struct HttpRoute {
  std::string path;
  bool is_open = false;  // no token needed: carries no data
  // Called on any thread of the io_context, also concurrently; takes milliseconds at most.
  std::function<HttpResponse(const HttpRequest&)> handler;
};

struct HttpOptions {
  std::string address;          // host:port; port 0 = any free one
  std::string token_file = {};  // "" = none, for loopback addresses alone
};

class HttpServer {
 public:
  // Listens. `io_context` outlives the server.
  // Errors: Unavailable [HTTP_LISTEN_FAILED]; FailedPrecondition [HTTP_TOKEN_INVALID], the token
  // file can't be read, is readable by others, or holds less than 16 or more than 512 bytes;
  // InvalidArgument [HTTP_TOKEN_REQUIRED], an address that isn't loopback without a token.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HttpOptions& options,
                                                           std::vector<HttpRoute> routes,
                                                           boost::asio::io_context* io_context);
  // Closes all connections. No handler runs afterwards, nor while the io_context is stopped.
  ~HttpServer();

  uint16_t port() const;

  static constexpr int kConnectionsMax = 64;
  static constexpr int kHeaderBytesMax = 8192;
  static constexpr int kIdleSeconds = 30;

 private:
  class Core;
  explicit HttpServer(std::shared_ptr<Core> core);
  const std::shared_ptr<Core> core_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_HTTP_SERVER_H_
