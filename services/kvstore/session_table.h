// SessionTable: the workers and readers that are attached now.
#ifndef CERTKV_SERVICES_KVSTORE_SESSION_TABLE_H_
#define CERTKV_SERVICES_KVSTORE_SESSION_TABLE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/core/ids.h"
#include "services/kvstore/cache.h"
#include "services/kvstore/staging_area.h"

namespace certkv::kvstore {

enum class SessionRole : uint8_t { kWorker = 1, kReader = 2 };

struct Session {
  SessionId id{};
  SessionRole role = SessionRole::kReader;
  std::string worker_name;
  TenantIndex tenant{};
  std::string fd_token;  // 16 bytes
  std::shared_ptr<Cache> cache;
  std::shared_ptr<StagingArea> staging;  // workers only
  int64_t staging_id = 0;                // workers only
  int64_t device_staging_bytes = 0;      // workers only
  bool connected = false;                // to the descriptor socket
  // Ends that connection, saying why; may be empty.
  std::function<void(absl::string_view why)> on_end;
  int64_t connect_deadline_ns = 0;  // monotonic; while not connected
  absl::flat_hash_set<LeaseId> leases;
};

// Invariants:
//  1. A session is found by its id, its token and, when it has staging memory, its staging id, or
//     by none of them.
// Threads: the caller serializes. Pointers live until the session is taken out.
class SessionTable {
 public:
  int32_t size() const { return static_cast<int32_t>(sessions_.size()); }
  // Staging memory of all sessions.
  int64_t staging_bytes() const { return staging_bytes_; }
  // Of that on GPUs.
  int64_t device_staging_bytes() const { return device_staging_bytes_; }

  // Its id, token and staging id are new.
  void Add(std::unique_ptr<Session> session);
  // Errors: NotFound [SESSION_NOT_FOUND], with why the session ended where that is remembered.
  absl::StatusOr<Session*> Find(SessionId id) const;
  // That error, without a word about why.
  static absl::Status NotFound(SessionId id);
  Session* FindByToken(absl::string_view fd_token) const;  // null when there is none
  Session* FindByStagingId(int64_t staging_id) const;      // null when there is none
  // What the session takes of that now; nothing happens where it has ended.
  void SetDeviceStaging(SessionId id, int64_t size_bytes);
  // `why` follows "it ended because" in later errors. The session is in the table.
  std::unique_ptr<Session> TakeOut(SessionId id, absl::string_view why);
  std::vector<SessionId> Of(const Cache& cache) const;
  // Sessions that are not connected and whose deadline is at or before `now_ns`.
  std::vector<SessionId> NeverConnected(int64_t now_ns) const;

 private:
  struct Ended {
    SessionId id;
    std::string text;
  };

  absl::flat_hash_map<SessionId, std::unique_ptr<Session>> sessions_;
  absl::flat_hash_map<std::string, Session*> by_token_;
  absl::flat_hash_map<int64_t, Session*> by_staging_id_;
  int64_t staging_bytes_ = 0;
  int64_t device_staging_bytes_ = 0;
  std::deque<Ended> ended_;  // the last few, newest first
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SESSION_TABLE_H_
