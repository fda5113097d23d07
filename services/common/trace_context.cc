#include "services/common/trace_context.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "services/common/random_id.h"

namespace certkv {
namespace {

// "vv-tttttttttttttttttttttttttttttttt-pppppppppppppppp-ff"
constexpr size_t kTraceparentBytes = 55;
constexpr size_t kTraceparentBytesMax = 128;

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c == '0'; });
}

}  // namespace

bool IsTraceparent(absl::string_view text) {
  if (text.size() < kTraceparentBytes || text.size() > kTraceparentBytesMax) return false;
  const absl::string_view version = text.substr(0, 2);
  const absl::string_view trace = text.substr(3, 32);
  const absl::string_view parent = text.substr(36, 16);
  const absl::string_view flags = text.substr(53, 2);
  if (text[2] != '-' || text[35] != '-' || text[52] != '-') return false;
  if (!IsHex(version) || !IsHex(trace) || !IsHex(parent) || !IsHex(flags)) return false;
  if (version == "ff" || IsZero(trace) || IsZero(parent)) return false;
  if (text.size() == kTraceparentBytes) return true;
  // What later versions append is nobody's to read here, but it must not break a log line.
  return version != "00" && text[kTraceparentBytes] == '-' &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < 127; });
}

std::string TraceparentOrNone(absl::string_view text) {
  return IsTraceparent(text) ? std::string(text) : std::string();
}

std::string MakeTraceparent() {
  return absl::StrFormat("00-%016x%016x-%016x-00", RandomId(), RandomId(), RandomId());
}

}  // namespace certkv
