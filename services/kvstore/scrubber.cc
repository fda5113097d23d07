#include "services/kvstore/scrubber.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <chrono>

namespace certkv::kvstore {
namespace {

constexpr std::chrono::milliseconds kInterval(100);

}  // namespace

Scrubber::Scrubber(StoreEngine* engine, ComputePool* pool, boost::asio::io_context* io_context,
                   int64_t bytes_per_second)
    : engine_(engine), pool_(pool), bytes_per_second_(bytes_per_second), timer_(*io_context) {}

void Scrubber::Start() {
  if (bytes_per_second_ == 0) return;
  absl::MutexLock lock(&mutex_);
  Wait();
}

void Scrubber::Stop() {
  absl::MutexLock lock(&mutex_);
  is_stopped_ = true;
  timer_.cancel();
}

void Scrubber::Wait() {
  timer_.expires_after(kInterval);
  timer_.async_wait(
      [self = shared_from_this()](const boost::system::error_code& /*error*/) { self->OnTimer(); });
}

void Scrubber::OnTimer() {
  absl::MutexLock lock(&mutex_);
  if (is_stopped_) return;
  // What was not used up, because the pool was busy, is not caught up with later.
  const int64_t share = std::max<int64_t>(1, bytes_per_second_ * kInterval.count() / 1000);
  budget_bytes_ = std::min(budget_bytes_ + share, share);
  if (!is_running_ && budget_bytes_ > 0) {
    is_running_ =
        pool_->TryPost([self = shared_from_this(), budget = budget_bytes_] { self->Run(budget); });
  }
  Wait();
}

void Scrubber::Run(int64_t budget_bytes) {
  int64_t used = 0;
  while (used < budget_bytes) {
    const int64_t bytes = engine_->Scrub(budget_bytes - used);
    if (bytes == 0) break;  // the end of a round, or nothing to check
    used += bytes;
    absl::MutexLock lock(&mutex_);
    if (is_stopped_) break;
  }
  absl::MutexLock lock(&mutex_);
  budget_bytes_ -= used;
  is_running_ = false;
}

}  // namespace certkv::kvstore
