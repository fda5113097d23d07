#ifndef CERTKV_CLIENTS_CPP_NOW_H_
#define CERTKV_CLIENTS_CPP_NOW_H_

#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace certkv::client {

// Milliseconds since the Unix epoch: the clock by which a client's leases end.
inline int64_t NowMs() { return absl::ToUnixMillis(absl::Now()); }

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_NOW_H_
