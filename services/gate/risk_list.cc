#include "services/gate/risk_list.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/core/status.h"

namespace certkv::gate {

bool IsWord(absl::string_view text, absl::string_view further) {
  return std::all_of(text.begin(), text.end(), [further](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-' ||
           further.find(c) != absl::string_view::npos;
  });
}

bool IsRequestId(absl::string_view id) {
  return !id.empty() && id.size() <= kRequestIdBytesMax && IsWord(id, "");
}

absl::Status CheckRequestName(absl::string_view name) {
  if (absl::ConsumePrefix(&name, kRequestNamePrefix) && IsRequestId(name)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "REQUEST_NAME_INVALID",
                   "a request's name is requests/ and 1 to 128 bytes of [a-zA-Z0-9._-]; use the "
                   "name in its policy lease");
}

std::string EncodePageToken(RiskOrder order, const RiskRank& rank) {
  return absl::StrFormat("%d.%016x.%016x.%s", static_cast<int>(order),
                         std::bit_cast<uint64_t>(rank.first), std::bit_cast<uint64_t>(rank.second),
                         rank.request);
}

absl::StatusOr<RiskRank> DecodePageToken(RiskOrder order, absl::string_view token) {
  const std::vector<std::string> parts = absl::StrSplit(token, absl::MaxSplits('.', 3));
  uint64_t first = 0;
  uint64_t second = 0;
  if (parts.size() == 4 && parts[0] == absl::StrFormat("%d", static_cast<int>(order)) &&
      parts[1].size() == 16 && parts[2].size() == 16 && absl::SimpleHexAtoi(parts[1], &first) &&
      absl::SimpleHexAtoi(parts[2], &second) && CheckRequestName(parts[3]).ok()) {
    const RiskRank rank{std::bit_cast<double>(first), std::bit_cast<double>(second), parts[3]};
    // A NaN has no place in the order.
    if (rank.first >= 0 && rank.second >= 0) return rank;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "PAGE_TOKEN_INVALID",
                   "page_token is not one that ListRequestRisks gave in this order; start without "
                   "one");
}

}  // namespace certkv::gate
