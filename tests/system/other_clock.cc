// Linked into a server, it makes that one of a machine whose clock is wrong by so many milliseconds
// as its environment says. Time that is measured, not told, is right.
//
// The linker takes this definition and leaves clock.cc in its archive.
#include <chrono>
#include <cstdlib>

#include "services/common/clock.h"
#include "tests/system/cluster.h"

namespace certkv {
namespace {

class WrongClock final : public Clock {
 public:
  int64_t NowMs() const override {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(now).count() + skew_ms_;
  }
  int64_t MonotonicNs() const override {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }

 private:
  static int64_t SkewFromEnvironment() {
    const char* const text = std::getenv(kOtherClockSkewMs);
    return text == nullptr ? 0 : std::atoll(text);
  }
  const int64_t skew_ms_ = SkewFromEnvironment();
};

}  // namespace

const Clock* RealClock() {
  static const auto* const kClock = new WrongClock;
  return kClock;
}

}  // namespace certkv
