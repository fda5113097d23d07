// Time as the services see it: a seam, so that tests decide what time it is.
#ifndef CERTKV_SERVICES_COMMON_CLOCK_H_
#define CERTKV_SERVICES_COMMON_CLOCK_H_

#include <cstdint>

namespace certkv {

// Threads: all calls are safe from several threads.
class Clock {
 public:
  virtual ~Clock() = default;
  // Milliseconds since the Unix epoch. What leases and lists carry; may be stepped by the operator.
  virtual int64_t NowMs() const = 0;
  // Nanoseconds since some fixed point. Never steps back; for measuring how long something took.
  virtual int64_t MonotonicNs() const = 0;
};

// The system's clock; lives for ever.
const Clock* RealClock();

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CLOCK_H_
