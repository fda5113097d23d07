#include "clients/cpp/lease_keeper.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "clients/cpp/now.h"

namespace certkv::client {

LeaseKeeper::LeaseKeeper(int64_t lease_duration_ms, Renew renew)
    : lease_duration_ms_(lease_duration_ms),
      renew_(std::move(renew)),
      book_(lease_duration_ms),
      thread_([this] { Run(); }) {}

LeaseKeeper::~LeaseKeeper() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void LeaseKeeper::Add(LeaseId lease, int64_t expire_time_ms) {
  absl::MutexLock lock(&mutex_);
  book_.Add(lease, expire_time_ms);
}

void LeaseKeeper::Remove(LeaseId lease) {
  absl::MutexLock lock(&mutex_);
  book_.Remove(lease);
}

absl::Status LeaseKeeper::Check(LeaseId lease) const {
  absl::MutexLock lock(&mutex_);
  return book_.Check(lease, NowMs());
}

void LeaseKeeper::Run() {
  const absl::Duration tick = absl::Milliseconds(std::max<int64_t>(lease_duration_ms_ / 20, 5));
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&stopping_), tick);
      if (stopping_) return;
    }
    RenewDue();
  }
}

void LeaseKeeper::RenewDue() {
  std::vector<LeaseId> due;
  {
    absl::MutexLock lock(&mutex_);
    due = book_.Due(NowMs());
  }
  for (const LeaseId lease : due) {
    const absl::StatusOr<int64_t> expire_time_ms = renew_(lease);
    absl::MutexLock lock(&mutex_);
    book_.NoteRenewal(lease, expire_time_ms, NowMs());
  }
}

}  // namespace certkv::client
