// What an HTTP request asks for: path and query.
#ifndef CERTKV_SERVICES_COMMON_HTTP_TARGET_H_
#define CERTKV_SERVICES_COMMON_HTTP_TARGET_H_

#include <map>
#include <string>

#include "absl/strings/string_view.h"

namespace certkv {

struct HttpRequest {
  std::string path;                          // percent-decoded
  std::map<std::string, std::string> query;  // decoded; of several of one name the last
};

// Fills the request from a target such as "/api/requests?label=a%20b"; false when it isn't
// well-formed, and what was filled in then means nothing.
bool ParseHttpTarget(absl::string_view target, HttpRequest* request);

// "a%20b+c" -> "a b c" ('+' only where `plus_is_space`); false when it isn't well-formed.
bool PercentDecode(absl::string_view text, bool plus_is_space, std::string* decoded);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_HTTP_TARGET_H_
