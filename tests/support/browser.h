// A page in Debian's Chromium that a test types into: over its DevTools protocol, one command at a
// time.
#ifndef CERTKV_TESTS_SUPPORT_BROWSER_H_
#define CERTKV_TESTS_SUPPORT_BROWSER_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/websocket.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "tests/support/server_process.h"

namespace certkv {

inline constexpr char kBrowser[] = "/usr/bin/chromium-headless-shell";

class Browser {
 public:
  Browser() {
    const std::string port_file = process_.directory() + "/DevToolsActivePort";
    std::string path;
    process_.Start({kBrowser, "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                    "--user-data-dir=" + process_.directory(), "about:blank"},
                   // Its second line is long; what is cut off was not written to its end yet.
                   [&] {
                     std::ifstream file(port_file);
                     return (file >> port_ >> path) && path.size() == kPathSize;
                   });
    Connect(path);
  }

  // Returns before the page is there; what comes next waits for something of it.
  void Open(const std::string& url) { Call("Page.navigate", {{"url", url}}); }
  void Resize(int width, int height) {
    Call("Emulation.setDeviceMetricsOverride",
         {{"width", width}, {"height", height}, {"deviceScaleFactor", 1}, {"mobile", false}});
  }
  // The value of a JavaScript expression.
  nlohmann::json Evaluate(const std::string& expression) {
    return Call("Runtime.evaluate", {{"expression", expression}, {"returnByValue", true}})
        .value("result", nlohmann::json::object())
        .value("value", nlohmann::json());
  }
  // Waits until the expression is true, for 20 s at most.
  bool WaitFor(const std::string& expression) {
    for (int i = 0; i < 400; ++i) {
      if (Evaluate(expression) == true) return true;
      absl::SleepFor(absl::Milliseconds(50));
    }
    return false;
  }
  // Presses a key by its DOM name: "j", "Enter", "ArrowDown".
  void Press(const std::string& key) {
    nlohmann::json down = {{"type", "keyDown"}, {"key", key}, {"code", CodeOf(key)}};
    if (key.size() == 1) down["text"] = key;
    if (key == "Enter") down["text"] = "\r";
    if (key == "Tab") down["windowsVirtualKeyCode"] = 9;
    if (key == "Enter") down["windowsVirtualKeyCode"] = 13;
    Call("Input.dispatchKeyEvent", down);
    Call("Input.dispatchKeyEvent", {{"type", "keyUp"}, {"key", key}, {"code", CodeOf(key)}});
  }
  // Into what has the focus.
  void Type(const std::string& text) { Call("Input.insertText", {{"text", text}}); }

 private:
  static constexpr size_t kPathSize = sizeof("/devtools/browser/") - 1 + 36;  // and a UUID
  using Socket = boost::beast::websocket::stream<boost::asio::ip::tcp::socket>;

  static std::string CodeOf(const std::string& key) {
    return key.size() == 1 ? absl::StrCat("Key", std::string(1, static_cast<char>(key[0] - 32)))
                           : key;
  }

  // To the browser, and through it to a page of its own.
  void Connect(const std::string& path) {
    boost::system::error_code error;
    socket_.next_layer().connect({boost::asio::ip::address_v4::loopback(), port_}, error);
    ASSERT_FALSE(error) << error.message();
    socket_.handshake(absl::StrCat("127.0.0.1:", port_), path, error);
    ASSERT_FALSE(error) << path << ": " << error.message();
    const nlohmann::json page = Call("Target.createTarget", {{"url", "about:blank"}});
    const nlohmann::json attached = Call(
        "Target.attachToTarget", {{"targetId", page.value("targetId", "")}, {"flatten", true}});
    session_ = attached.value("sessionId", "");
    ASSERT_FALSE(session_.empty()) << attached.dump();
  }

  // The result of a command; events that come before it are passed over.
  nlohmann::json Call(const std::string& method, const nlohmann::json& parameters) {
    const int id = ++last_id_;
    boost::system::error_code error;
    nlohmann::json command = {{"id", id}, {"method", method}, {"params", parameters}};
    if (!session_.empty()) command["sessionId"] = session_;
    socket_.write(boost::asio::buffer(command.dump()), error);
    while (!error) {
      boost::beast::flat_buffer buffer;
      socket_.read(buffer, error);
      if (error) break;
      const auto* data = static_cast<const char*>(buffer.data().data());
      const auto answer = nlohmann::json::parse(data, data + buffer.size(), nullptr, false);
      if (answer.value("id", 0) != id) continue;
      EXPECT_FALSE(answer.contains("error")) << method << ": " << answer.dump();
      return answer.value("result", nlohmann::json::object());
    }
    ADD_FAILURE() << method << ": " << error.message();
    return nlohmann::json::object();
  }

  ServerProcess process_{"browser"};
  uint16_t port_ = 0;
  std::string session_;  // with the page
  int last_id_ = 0;
  boost::asio::io_context io_;
  Socket socket_{io_};
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_BROWSER_H_
