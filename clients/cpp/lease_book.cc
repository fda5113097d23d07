#include "clients/cpp/lease_book.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

absl::Status LeaseLost(LeaseId lease, absl::string_view why) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "LEASE_LOST",
                   absl::StrCat("block lease ", static_cast<int64_t>(lease), " is lost: ", why,
                                "; look the blocks up again"));
}

}  // namespace

int64_t LeaseExpireTime(int64_t asked_ms, int64_t answered_ms, int64_t duration_ms,
                        int64_t store_expire_ms) {
  if (duration_ms == 0) return store_expire_ms;
  const int64_t made_ms = store_expire_ms - duration_ms;
  const bool is_one_clock = asked_ms <= made_ms && made_ms <= answered_ms;
  return is_one_clock ? store_expire_ms : asked_ms + duration_ms;
}

void LeaseBook::Add(LeaseId lease, int64_t expire_time_ms) {
  leases_[lease] = State{expire_time_ms, expire_time_ms - lease_duration_ms_ * 2 / 3, {}};
}

absl::Status LeaseBook::Check(LeaseId lease, int64_t now_ms) const {
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return LeaseLost(lease, "it was released");
  if (!found->second.status.ok()) return found->second.status;
  if (!(now_ms < found->second.expire_time_ms)) return LeaseLost(lease, "its deadline has passed");
  return absl::OkStatus();
}

std::vector<LeaseId> LeaseBook::Due(int64_t now_ms) {
  std::vector<LeaseId> due;
  for (auto& [lease, state] : leases_) {
    if (state.status.ok() && state.expire_time_ms <= now_ms) {
      state.status = LeaseLost(lease, "its deadline passed before a renewal succeeded");
    }
    if (state.status.ok() && state.renew_time_ms <= now_ms) due.push_back(lease);
  }
  return due;
}

void LeaseBook::NoteRenewal(LeaseId lease, const absl::StatusOr<int64_t>& expire_time_ms,
                            int64_t now_ms) {
  const auto found = leases_.find(lease);
  if (found == leases_.end() || !found->second.status.ok()) return;
  State& state = found->second;
  if (expire_time_ms.ok()) {
    state.expire_time_ms = *expire_time_ms;
    state.renew_time_ms = *expire_time_ms - lease_duration_ms_ * 2 / 3;
  } else if (absl::IsNotFound(expire_time_ms.status())) {
    state.status = LeaseLost(lease, expire_time_ms.status().message());
  } else {  // the store may come back before the deadline
    state.renew_time_ms = now_ms + lease_duration_ms_ / 10;
  }
}

}  // namespace certkv::client
