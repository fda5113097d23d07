#include "services/kvstore/nccl_link.h"

#include <utility>

#include "absl/time/time.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

// What is refused when nothing went wrong.
absl::Status Ended() {
  return MakeError(absl::StatusCode::kUnavailable, "NCCL_LINK_ENDED",
                   "the link was idle or was stopped; make another one");
}

}  // namespace

NcclLink::NcclLink(Begin begin, int64_t idle_ms, std::function<void(const absl::Status&)> over)
    : begin_(std::move(begin)),
      idle_ms_(idle_ms),
      over_(std::move(over)),
      thread_([this] { Run(); }) {}

NcclLink::~NcclLink() {
  Stop();
  thread_.join();
}

void NcclLink::Do(Work work) {
  absl::Status why;
  {
    absl::MutexLock lock(&mutex_);
    if (!is_over_ && !is_stopped_) {
      works_.push_back(std::move(work));
      return;
    }
    why = why_.ok() ? Ended() : why_;
  }
  work.refuse(why);
}

void NcclLink::Stop() {
  stop_.Set();
  absl::MutexLock lock(&mutex_);
  is_stopped_ = true;
}

bool NcclLink::IsOver() const {
  absl::MutexLock lock(&mutex_);
  return is_over_;
}

bool NcclLink::IsIdle() const {
  absl::MutexLock lock(&mutex_);
  return works_.empty();
}

void NcclLink::Run() {
  const absl::Status why = RunUntilOver();
  over_(why);
  std::deque<Work> refused;
  {
    absl::MutexLock lock(&mutex_);
    is_over_ = true;
    why_ = why;
    refused.swap(works_);
  }
  for (const Work& work : refused) work.refuse(why.ok() ? Ended() : why);
}

absl::Status NcclLink::RunUntilOver() {
  const auto unless_stopped = [this](absl::Status status) {
    absl::MutexLock lock(&mutex_);
    return is_stopped_ ? absl::OkStatus() : status;
  };
  absl::StatusOr<std::unique_ptr<NcclChannel>> channel = begin_(&stop_);
  if (!channel.ok()) return unless_stopped(channel.status());
  while (true) {
    std::function<absl::Status(NcclChannel*)> run;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(this, &NcclLink::HasWork),
                              absl::Milliseconds(idle_ms_));
      if (is_stopped_) return absl::OkStatus();
      if (works_.empty()) {
        // Nothing is added from now on: what comes is refused.
        is_over_ = true;
        return absl::OkStatus();
      }
      run = works_.front().run;
    }
    const absl::Status status = run(channel->get());
    // One that failed is refused with those after it.
    if (!status.ok()) return unless_stopped(status);
    absl::MutexLock lock(&mutex_);
    works_.pop_front();
  }
}

}  // namespace certkv::kvstore
