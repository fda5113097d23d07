// Blocking HTTP calls for tests.
#ifndef CERTKV_TESTS_SUPPORT_HTTP_CLIENT_H_
#define CERTKV_TESTS_SUPPORT_HTTP_CLIENT_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <cstdint>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace certkv {

struct HttpAnswer {
  int status = 0;  // 0: nobody answered
  std::string head;
  std::string body;
};

// From 127.0.0.1. HTTP/1.0, so that the answer is not chunked and ends with the connection.
inline HttpAnswer HttpCall(uint16_t port, const std::string& method, const std::string& target,
                           const std::string& headers, const std::string& body) {
  boost::asio::io_context io;
  boost::asio::ip::tcp::socket socket(io);
  boost::system::error_code error;
  socket.connect({boost::asio::ip::address_v4::loopback(), port}, error);
  if (error) return {};
  const std::string request = absl::StrCat(
      method, " ", target, " HTTP/1.0\r\nHost: 127.0.0.1:", port, "\r\n", headers, "\r\n", body);
  boost::asio::write(socket, boost::asio::buffer(request), error);
  std::string text;
  boost::asio::read(socket, boost::asio::dynamic_buffer(text), error);
  HttpAnswer answer;
  const size_t end = text.find("\r\n\r\n");
  if (text.size() < 12 || end == std::string::npos) return answer;
  answer.status = std::atoi(text.substr(9, 3).c_str());
  answer.head = text.substr(0, end);
  answer.body = text.substr(end + 4);
  return answer;
}

inline HttpAnswer HttpGet(uint16_t port, const std::string& target,
                          const std::string& headers = "") {
  return HttpCall(port, "GET", target, headers, "");
}
inline HttpAnswer HttpPost(uint16_t port, const std::string& target, const std::string& body) {
  return HttpCall(port, "POST", target, absl::StrCat("Content-Length: ", body.size(), "\r\n"),
                  body);
}

// For a value of a query.
inline std::string PercentEncode(const std::string& text) {
  std::string encoded;
  for (const char c : text) {
    if (absl::ascii_isalnum(c)) {
      encoded += c;
    } else {
      absl::StrAppendFormat(&encoded, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

// A port of 127.0.0.1 that was free a moment ago.
inline uint16_t FreePort() {
  boost::asio::io_context io;
  return boost::asio::ip::tcp::acceptor(io, {boost::asio::ip::address_v4::loopback(), 0})
      .local_endpoint()
      .port();
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_HTTP_CLIENT_H_
