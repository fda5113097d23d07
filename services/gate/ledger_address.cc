#include "services/gate/ledger_address.h"

#include <arpa/inet.h>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/core/status.h"

namespace certkv::gate {
namespace {

bool IsIp(const std::string& text) {
  in_addr ip4;
  in6_addr ip6;
  return inet_pton(AF_INET, text.c_str(), &ip4) == 1 ||
         inet_pton(AF_INET6, text.c_str(), &ip6) == 1;
}

}  // namespace

absl::StatusOr<RedisAddress> ParseRedisAddress(const std::string& text) {
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:") && !rest.empty()) {
    return RedisAddress{.unix_path = std::string(rest)};
  }
  const size_t colon = text.rfind(':');
  if (colon != std::string::npos) {
    RedisAddress address{.ip = text.substr(0, colon)};
    if (IsIp(address.ip) && absl::SimpleAtoi(text.substr(colon + 1), &address.port) &&
        address.port > 0 && address.port < 65536) {
      return address;
    }
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                   absl::StrCat("ledger_redis is \"", absl::CHexEscape(text),
                                "\", must be unix:PATH or IP:PORT, such as 127.0.0.1:6379; an "
                                "address and no name"));
}

absl::Status CheckRedisAddress(const std::string& text) { return ParseRedisAddress(text).status(); }

}  // namespace certkv::gate
