#include "services/kvstore/periodic_job.h"

#include <boost/asio/io_context.hpp>

namespace certkv::kvstore {

PeriodicJob::PeriodicJob(ComputePool* pool, boost::asio::io_context* io_context,
                         std::chrono::milliseconds interval, std::function<void()> job)
    : pool_(pool), interval_(interval), job_(std::move(job)), timer_(*io_context) {}

void PeriodicJob::Start() {
  absl::MutexLock lock(&mutex_);
  Wait();
}

void PeriodicJob::Stop() {
  absl::MutexLock lock(&mutex_);
  is_stopped_ = true;
  timer_.cancel();
}

void PeriodicJob::Wait() {
  timer_.expires_after(interval_);
  timer_.async_wait(
      [self = shared_from_this()](const boost::system::error_code& /*error*/) { self->OnTimer(); });
}

void PeriodicJob::OnTimer() {
  absl::MutexLock lock(&mutex_);
  if (is_stopped_) return;
  if (!is_running_) {
    is_running_ = pool_->TryPost([self = shared_from_this()] {
      self->job_();
      absl::MutexLock done(&self->mutex_);
      self->is_running_ = false;
    });
  }
  Wait();
}

}  // namespace certkv::kvstore
