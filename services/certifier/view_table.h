// The open views of a certifier, by id.
#ifndef CERTKV_SERVICES_CERTIFIER_VIEW_TABLE_H_
#define CERTKV_SERVICES_CERTIFIER_VIEW_TABLE_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"
#include "services/certifier/view.h"

namespace certkv::certifier {

// Threads: all methods may be called concurrently. A view that is removed lives on while a read
// holds it.
class ViewTable {
 public:
  // At most `view_limit` >= 1 views at a time.
  explicit ViewTable(int32_t view_limit) : view_limit_(view_limit) {}

  // Is there room for one more? Errors: ResourceExhausted [VIEW_LIMIT].
  absl::Status CheckRoom() const ABSL_LOCKS_EXCLUDED(mutex_);
  // `id` is random and new. Errors: ResourceExhausted [VIEW_LIMIT]; Internal [VIEW_ID_TAKEN].
  absl::Status Insert(ViewId id, std::shared_ptr<View> view) ABSL_LOCKS_EXCLUDED(mutex_);
  // Errors: NotFound [VIEW_NOT_FOUND].
  absl::StatusOr<std::shared_ptr<View>> Find(ViewId id) const ABSL_LOCKS_EXCLUDED(mutex_);
  // That error.
  static absl::Status NotFound(ViewId id);
  // False when there is no such view.
  bool Erase(ViewId id) ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes the views last used before `use_time_ms`, and those whose store is gone. Returns how
  // many.
  int32_t EraseIdle(int64_t use_time_ms) ABSL_LOCKS_EXCLUDED(mutex_);
  int32_t size() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status CheckRoomLocked() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const int32_t view_limit_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<int64_t, std::shared_ptr<View>> views_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_VIEW_TABLE_H_
