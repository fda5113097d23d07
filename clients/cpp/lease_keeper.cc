#include "clients/cpp/lease_keeper.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

int64_t NowMs() { return absl::ToUnixMillis(absl::Now()); }

absl::Status LeaseLost(LeaseId lease, absl::string_view why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "LEASE_LOST",
                   absl::StrCat("block lease ", static_cast<int64_t>(lease), " is lost: ", why,
                                "; look the blocks up again"));
}

}  // namespace

LeaseKeeper::LeaseKeeper(int64_t lease_duration_ms, Renew renew)
    : lease_duration_ms_(lease_duration_ms), renew_(std::move(renew)), thread_([this] { Run(); }) {}

LeaseKeeper::~LeaseKeeper() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void LeaseKeeper::Add(LeaseId lease, int64_t expire_time_ms) {
  absl::MutexLock lock(&mutex_);
  leases_[lease] = State{expire_time_ms, expire_time_ms - lease_duration_ms_ * 2 / 3, {}};
}

void LeaseKeeper::Remove(LeaseId lease) {
  absl::MutexLock lock(&mutex_);
  leases_.erase(lease);
}

absl::Status LeaseKeeper::Check(LeaseId lease) const {
  absl::MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return LeaseLost(lease, "it was released");
  if (!found->second.status.ok()) return found->second.status;
  if (!(NowMs() < found->second.expire_time_ms)) return LeaseLost(lease, "its deadline has passed");
  return absl::OkStatus();
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
    const int64_t now_ms = NowMs();
    for (auto& [lease, state] : leases_) {
      if (state.status.ok() && state.expire_time_ms <= now_ms) {
        state.status = LeaseLost(lease, "its deadline passed before a renewal succeeded");
      }
      if (state.status.ok() && state.renew_time_ms <= now_ms) due.push_back(lease);
    }
  }
  for (const LeaseId lease : due) {
    const absl::StatusOr<int64_t> expire_time_ms = renew_(lease);
    absl::MutexLock lock(&mutex_);
    const auto found = leases_.find(lease);
    if (found == leases_.end() || !found->second.status.ok()) continue;
    State& state = found->second;
    if (expire_time_ms.ok()) {
      state.expire_time_ms = *expire_time_ms;
      state.renew_time_ms = *expire_time_ms - lease_duration_ms_ * 2 / 3;
    } else if (absl::IsNotFound(expire_time_ms.status())) {
      state.status = LeaseLost(lease, expire_time_ms.status().message());
    } else {  // the store may come back before the deadline
      state.renew_time_ms = NowMs() + lease_duration_ms_ / 10;
    }
  }
}

}  // namespace certkv::client
