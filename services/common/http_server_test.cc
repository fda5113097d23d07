#include "services/common/http_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

namespace asio = boost::asio;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class HttpServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    thread_ = std::thread([this] { io_.run(); });
  }
  void TearDown() override {
    server_.reset();
    guard_.reset();
    io_.stop();
    thread_.join();
    if (!token_file_.empty()) unlink(token_file_.c_str());
  }
  absl::Status Start(const HttpOptions& options) {
    const auto echo = [](const HttpRequest& request) {
      const auto found = request.query.find("q");
      return HttpResponse{.body = absl::StrCat(request.path, "?",
                                               found == request.query.end() ? "" : found->second)};
    };
    auto server = HttpServer::Start(options,
                                    {{.path = "/", .is_open = true, .handler = echo},
                                     {.path = "/api/", .is_open = false, .handler = echo}},
                                    &io_);
    if (server.ok()) server_ = *std::move(server);
    return server.status();
  }
  void WriteToken(const std::string& token, mode_t mode) {
    token_file_ = absl::StrCat("/tmp/certkv-http-test-", getpid());
    std::ofstream(token_file_) << token << "\n";
    chmod(token_file_.c_str(), mode);
  }
  // Sends the bytes and returns all that comes until the server closes.
  std::string Exchange(const std::string& bytes) {
    asio::io_context io;
    asio::ip::tcp::socket socket(io);
    socket.connect({asio::ip::address_v4::loopback(), server_->port()});
    boost::system::error_code error;
    asio::write(socket, asio::buffer(bytes), error);
    std::string answer;
    asio::read(socket, asio::dynamic_buffer(answer), error);
    return answer;
  }
  std::string Get(const std::string& target, const std::string& headers = "",
                  const std::string& host = "127.0.0.1:80") {
    return Exchange(absl::StrCat("GET ", target, " HTTP/1.1\r\nHost: ", host,
                                 "\r\nConnection: close\r\n", headers, "\r\n"));
  }

  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> guard_{io_.get_executor()};
  std::thread thread_;
  std::unique_ptr<HttpServer> server_;
  std::string token_file_;
};

TEST_F(HttpServerTest, AnswersWithAStrictPolicyForPages) {
  ASSERT_TRUE(Start({.address = "127.0.0.1:0"}).ok());
  const std::string answer = Get("/api/a%20b?q=%3Cb%3E+x");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(answer, HasSubstr("/api/a b?<b> x"));
  EXPECT_THAT(answer, HasSubstr("default-src 'none'"));
  EXPECT_THAT(answer, HasSubstr("nosniff"));
  EXPECT_THAT(answer, HasSubstr("no-store"));
  EXPECT_THAT(answer, Not(HasSubstr("unsafe-inline")));
}

TEST_F(HttpServerTest, RefusesPagesOfOtherSitesWithoutAToken) {
  ASSERT_TRUE(Start({.address = "127.0.0.1:0"}).ok());
  EXPECT_THAT(Get("/api/x", "", "evil.example"), StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(Get("/api/x", "", "127.0.0.1.evil.example"), StartsWith("HTTP/1.1 403"));
  EXPECT_THAT(Get("/api/x", "", "localhost:8080"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/api/x", "", "[::1]:8080"), StartsWith("HTTP/1.1 200"));
}

TEST_F(HttpServerTest, AsksForTheTokenOfItsFile) {
  WriteToken("0123456789abcdef", 0600);
  ASSERT_TRUE(Start({.address = "127.0.0.1:0", .token_file = token_file_}).ok());
  EXPECT_THAT(Get("/api/x"), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(Get("/nothing"), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(Get("/api/x", "Authorization: Bearer 0123456789abcdeX\r\n"),
              StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(Get("/api/x", "Authorization: Bearer 0123456789abcdef\r\n", "gate.example"),
              StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(Get("/"), StartsWith("HTTP/1.1 200"));  // the page itself carries no data
}

TEST_F(HttpServerTest, ATokenFileMayBeTheGroupsToReadButNotToChange) {
  WriteToken("0123456789abcdef", 0440);
  EXPECT_TRUE(Start({.address = "127.0.0.1:0", .token_file = token_file_}).ok());
  server_.reset();
  WriteToken("0123456789abcdef", 0660);
  EXPECT_EQ(ReasonOf(Start({.address = "127.0.0.1:0", .token_file = token_file_})),
            "HTTP_TOKEN_INVALID");
}

TEST_F(HttpServerTest, RefusesAddressesAndTokensThatAreNotSafe) {
  EXPECT_EQ(ReasonOf(Start({.address = "0.0.0.0:0"})), "HTTP_TOKEN_REQUIRED");
  WriteToken("0123456789abcdef", 0644);
  EXPECT_EQ(ReasonOf(Start({.address = "127.0.0.1:0", .token_file = token_file_})),
            "HTTP_TOKEN_INVALID");
  WriteToken("short", 0600);
  EXPECT_EQ(ReasonOf(Start({.address = "127.0.0.1:0", .token_file = token_file_})),
            "HTTP_TOKEN_INVALID");
  EXPECT_EQ(ReasonOf(Start({.address = "127.0.0.1:0", .token_file = "/nowhere/token"})),
            "HTTP_TOKEN_INVALID");
  ASSERT_TRUE(Start({.address = "127.0.0.1:0"}).ok());
  const std::string taken = absl::StrCat("127.0.0.1:", server_->port());
  const auto first = std::move(server_);
  EXPECT_EQ(ReasonOf(Start({.address = taken})), "HTTP_LISTEN_FAILED");
}

TEST_F(HttpServerTest, RefusesOtherMethodsAndNonsense) {
  ASSERT_TRUE(Start({.address = "127.0.0.1:0"}).ok());
  EXPECT_THAT(Exchange("POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                       "Content-Length: 0\r\n\r\n"),
              StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Get("/api/%zz"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Get("/other"), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Exchange("HEAD /api/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
              ::testing::EndsWith("\r\n\r\n"));
  EXPECT_EQ(Exchange("nonsense\r\n\r\n"), "");
  // A header over the limit.
  EXPECT_EQ(Get("/" + std::string(HttpServer::kHeaderBytesMax, 'x')), "");
}

}  // namespace
}  // namespace certkv
