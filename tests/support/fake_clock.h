// A clock that moves only when a test says so.
#ifndef CERTKV_TESTS_SUPPORT_FAKE_CLOCK_H_
#define CERTKV_TESTS_SUPPORT_FAKE_CLOCK_H_

#include <atomic>
#include <cstdint>

#include "services/common/clock.h"

namespace certkv {

class FakeClock : public Clock {
 public:
  static constexpr int64_t kStartMs = 1'700'000'000'000;  // 14 November 2023

  int64_t NowMs() const override { return now_ms_; }
  int64_t MonotonicNs() const override { return (now_ms_ - kStartMs) * 1'000'000; }
  void AdvanceMs(int64_t milliseconds) { now_ms_ += milliseconds; }

 private:
  std::atomic<int64_t> now_ms_ = kStartMs;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_FAKE_CLOCK_H_
