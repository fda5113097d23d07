// RetryPlan: whether and when a call that failed is made again. It neither waits nor reads a clock.
//
// Two reasons to come back: the server was not there (UNAVAILABLE; idempotent calls alone, a few
// times), or it has no room now and says when to ask again (an error with a retry delay; any call,
// because nothing was done). The delay is that of the server, growing by half with each refusal in
// a row, capped, and jittered, so that callers that were refused together do not come back
// together. It never reaches beyond the call's deadline, nor the waits together beyond what the
// caller allows.
#ifndef CERTKV_CLIENTS_CPP_RETRY_PLAN_H_
#define CERTKV_CLIENTS_CPP_RETRY_PLAN_H_

#include <cstdint>
#include <optional>
#include <random>

#include "absl/status/status.h"

namespace certkv::client {

// May a call be made again when the first answer is UNAVAILABLE?
enum class Retry : uint8_t { kNever, kIdempotent };

inline constexpr int kAttemptsMax = 4;                // of an unreachable server
inline constexpr int64_t kFirstBackoffMs = 20;        // doubled each time
inline constexpr int64_t kPressureDelayMaxMs = 2000;  // one wait for room, before jitter

// Invariants (retry_plan_test breaks each):
//  1. No wait is negative or reaches the deadline, and waits for room sum to at most
//     pressure_wait_ms.
//  2. A call that is not idempotent is made again only after an error with a retry delay.
// Threads: the caller serializes; one plan per call.
class RetryPlan {
 public:
  RetryPlan(Retry retry, int64_t pressure_wait_ms, uint64_t seed)
      : retry_(retry), pressure_left_ms_(pressure_wait_ms), random_(seed) {}

  // How long to wait before the next attempt, or nullopt to give up with `status`, an error.
  // `left_ms` is the time until the call's deadline.
  std::optional<int64_t> NextDelayMs(const absl::Status& status, int64_t left_ms);

 private:
  const Retry retry_;
  int64_t pressure_left_ms_;
  std::mt19937_64 random_;
  int attempt_ = 1;
  int64_t backoff_ms_ = kFirstBackoffMs;
  int refusals_ = 0;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_RETRY_PLAN_H_
