// How long a caller that was refused for want of room should wait before it asks again.
//
// An error with a delay means: nothing was done, and the same call may be made again after the
// delay, whatever it does. Over the wire it is certkv.type.ErrorDetail.retry_delay_ms.
#ifndef CERTKV_SERVICES_COMMON_RETRY_DELAY_H_
#define CERTKV_SERVICES_COMMON_RETRY_DELAY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace certkv {

// A delay that a peer asks for is cut to this.
inline constexpr int64_t kRetryDelayMaxMs = 60'000;

// The error with a delay, in [1, kRetryDelayMaxMs].
absl::Status WithRetryDelay(absl::Status status, int64_t delay_ms);
// 0: the error has none.
int64_t RetryDelayMsOf(const absl::Status& status);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_RETRY_DELAY_H_
