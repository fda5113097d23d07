#include "services/common/retry_delay.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace certkv {
namespace {

constexpr char kPayload[] = "certkv/retry-delay-ms";

}  // namespace

absl::Status WithRetryDelay(absl::Status status, int64_t delay_ms) {
  const int64_t kept = std::clamp<int64_t>(delay_ms, 1, kRetryDelayMaxMs);
  status.SetPayload(kPayload, absl::Cord(absl::StrCat(kept)));
  return status;
}

int64_t RetryDelayMsOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  int64_t delay_ms = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &delay_ms)) return 0;
  return delay_ms;
}

}  // namespace certkv
