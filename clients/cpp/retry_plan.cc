#include "clients/cpp/retry_plan.h"

#include <algorithm>
#include <utility>

#include "services/common/retry_delay.h"

namespace certkv::client {

std::optional<int64_t> RetryPlan::NextDelayMs(const absl::Status& status, int64_t left_ms) {
  const int64_t asked_ms = RetryDelayMsOf(status);
  if (asked_ms > 0 && absl::IsResourceExhausted(status)) {
    double delay_ms = static_cast<double>(std::min(asked_ms, kPressureDelayMaxMs));
    for (int i = 0; i < refusals_ && delay_ms < kPressureDelayMaxMs; ++i) delay_ms *= 1.5;
    ++refusals_;
    delay_ms = std::min<double>(delay_ms, kPressureDelayMaxMs);
    // From half of it to half more.
    const double jitter = std::uniform_real_distribution<double>(0.5, 1.5)(random_);
    const auto wait_ms = std::max<int64_t>(1, static_cast<int64_t>(delay_ms * jitter));
    if (wait_ms >= left_ms || wait_ms > pressure_left_ms_) return std::nullopt;
    pressure_left_ms_ -= wait_ms;
    return wait_ms;
  }
  refusals_ = 0;
  if (!absl::IsUnavailable(status) || retry_ == Retry::kNever || attempt_ == kAttemptsMax ||
      backoff_ms_ >= left_ms) {
    return std::nullopt;
  }
  ++attempt_;
  return std::exchange(backoff_ms_, 2 * backoff_ms_);
}

}  // namespace certkv::client
