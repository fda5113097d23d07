// Scrubber: has the engine check its blocks in the background, at a limited rate.
#ifndef CERTKV_SERVICES_KVSTORE_SCRUBBER_H_
#define CERTKV_SERVICES_KVSTORE_SCRUBBER_H_

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Threads: the caller serializes (a PeriodicJob).
class Scrubber {
 public:
  static constexpr std::chrono::milliseconds kInterval{100};

  // The engine outlives it. `bytes_per_second` > 0.
  Scrubber(StoreEngine* engine, int64_t bytes_per_second)
      : engine_(engine), bytes_per_second_(bytes_per_second) {}

  // One turn, to be called every kInterval: an interval's share of the rate, and no block when the
  // last ones were larger than their share. A turn that was left out is not caught up with.
  void Run() {
    const int64_t share = std::max<int64_t>(1, bytes_per_second_ * kInterval.count() / 1000);
    budget_bytes_ = std::min(budget_bytes_ + share, share);
    while (budget_bytes_ > 0) {
      const int64_t bytes = engine_->Scrub(budget_bytes_);
      if (bytes == 0) break;  // the end of a round, or nothing to check
      budget_bytes_ -= bytes;
    }
  }

 private:
  StoreEngine* const engine_;
  const int64_t bytes_per_second_;
  int64_t budget_bytes_ = 0;  // below zero after a block that was larger than what there was
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SCRUBBER_H_
