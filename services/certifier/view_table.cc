#include "services/certifier/view_table.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::certifier {

absl::Status ViewTable::CheckRoomLocked() const {
  if (static_cast<int64_t>(views_.size()) < view_limit_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "VIEW_LIMIT",
                   absl::StrCat(views_.size(), " views are open, view_limit is ", view_limit_,
                                "; close views that are done or raise view_limit"));
}

absl::Status ViewTable::CheckRoom() const {
  absl::ReaderMutexLock lock(&mutex_);
  return CheckRoomLocked();
}

absl::Status ViewTable::Insert(ViewId id, std::shared_ptr<View> view) {
  absl::MutexLock lock(&mutex_);
  CERTKV_RETURN_IF_ERROR(CheckRoomLocked());
  if (views_.try_emplace(static_cast<int64_t>(id), std::move(view)).second) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kInternal, "VIEW_ID_TAKEN",
                   absl::StrCat("view id ", static_cast<int64_t>(id), " is in use; try again"));
}

absl::StatusOr<std::shared_ptr<View>> ViewTable::Find(ViewId id) const {
  {
    absl::ReaderMutexLock lock(&mutex_);
    const auto found = views_.find(static_cast<int64_t>(id));
    if (found != views_.end()) return found->second;
  }
  return NotFound(id);
}

absl::Status ViewTable::NotFound(ViewId id) {
  return MakeError(absl::StatusCode::kNotFound, "VIEW_NOT_FOUND",
                   absl::StrCat("view ", static_cast<int64_t>(id),
                                " is not open here: never opened, closed, idle for too long, or "
                                "the certifier restarted; open it again"));
}

bool ViewTable::Erase(ViewId id) {
  absl::MutexLock lock(&mutex_);
  return views_.erase(static_cast<int64_t>(id)) > 0;
}

int32_t ViewTable::EraseIdle(int64_t use_time_ms) {
  std::vector<std::shared_ptr<View>> erased;  // freed after the lock: it may unmap memory
  absl::MutexLock lock(&mutex_);
  absl::erase_if(views_, [&](const auto& entry) {
    const View& view = *entry.second;
    if (view.cache()->alive() && view.last_use_ms() >= use_time_ms) return false;
    erased.push_back(entry.second);
    return true;
  });
  return static_cast<int32_t>(erased.size());
}

int32_t ViewTable::size() const {
  absl::ReaderMutexLock lock(&mutex_);
  return static_cast<int32_t>(views_.size());
}

}  // namespace certkv::certifier
