// What ListRequestRisks selects and in which order, and the tokens of its pages.
#ifndef CERTKV_SERVICES_GATE_RISK_LIST_H_
#define CERTKV_SERVICES_GATE_RISK_LIST_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv::gate {

// Largest first, whatever it is by.
enum class RiskOrder : uint8_t {
  kScore = 1,        // largest worst_case_tv of a first read
  kSum = 2,          // sum of worst_case_tv
  kRepairBytes = 3,  //
  kBudgetShare = 4,  // committed / budget
  kUpdateTime = 5,   // the latest first
};

// What a request must be to be told. Empty texts match all.
struct RiskFilter {
  bool include_closed = false;
  std::string tenant = {};
  std::string model = {};
  std::string label_part = {};
  float score_min = 0;         // [0, 1]
  bool only_troubled = false;  // reads outside tolerance or failed, or forced to read exactly
};

// A request's place in an order. Ties are broken by what the order says, then by name.
struct RiskRank {
  double first = 0;
  double second = 0;
  std::string request;
  friend bool operator<(const RiskRank& a, const RiskRank& b) {
    if (a.first != b.first) return a.first > b.first;
    if (a.second != b.second) return a.second > b.second;
    return a.request < b.request;
  }
};

// A token names the order and the rank of the last request told.
std::string EncodePageToken(RiskOrder order, const RiskRank& rank);
// Errors: InvalidArgument [PAGE_TOKEN_INVALID], not a token of this order.
absl::StatusOr<RiskRank> DecodePageToken(RiskOrder order, absl::string_view token);

// Is it "requests/{request}"? Errors: InvalidArgument [REQUEST_NAME_INVALID].
absl::Status CheckRequestName(absl::string_view name);
// 1 to 128 bytes of [a-zA-Z0-9._-].
bool IsRequestId(absl::string_view id);
// All of [a-zA-Z0-9._-] or of `further`.
bool IsWord(absl::string_view text, absl::string_view further);

inline constexpr int32_t kRequestIdBytesMax = 128;
inline constexpr char kRequestNamePrefix[] = "requests/";

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_RISK_LIST_H_
