#include "services/common/http_target.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace certkv {

bool PercentDecode(absl::string_view text, bool plus_is_space, std::string* decoded) {
  decoded->clear();
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '+' && plus_is_space) {
      decoded->push_back(' ');
    } else if (text[i] != '%') {
      decoded->push_back(text[i]);
    } else {
      uint32_t byte = 0;
      if (i + 2 >= text.size() || !absl::ascii_isxdigit(text[i + 1]) ||
          !absl::ascii_isxdigit(text[i + 2]) ||
          !absl::SimpleHexAtoi(text.substr(i + 1, 2), &byte)) {
        return false;
      }
      decoded->push_back(static_cast<char>(byte));
      i += 2;
    }
  }
  return true;
}

bool ParseHttpTarget(absl::string_view target, HttpRequest* request) {
  if (!absl::StartsWith(target, "/")) return false;
  const size_t question = target.find('?');
  if (!PercentDecode(target.substr(0, question), false, &request->path)) return false;
  if (question == absl::string_view::npos) return true;
  for (const absl::string_view part : absl::StrSplit(target.substr(question + 1), '&')) {
    const size_t equals = part.find('=');
    std::string name;
    std::string value;
    if (!PercentDecode(part.substr(0, equals), true, &name)) return false;
    if (equals != absl::string_view::npos &&
        !PercentDecode(part.substr(equals + 1), true, &value)) {
      return false;
    }
    if (!name.empty()) request->query[name] = value;
  }
  return true;
}

}  // namespace certkv
