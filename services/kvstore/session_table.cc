#include "services/kvstore/session_table.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kEndedSessionsRemembered = 256;

}  // namespace

void SessionTable::Add(std::unique_ptr<Session> session) {
  Session* raw = session.get();
  CERTKV_CHECK(by_token_.emplace(raw->fd_token, raw).second, "tokens are never used twice");
  if (raw->staging != nullptr) {
    CERTKV_CHECK(by_staging_id_.emplace(raw->staging_id, raw).second,
                 "staging ids are never used twice");
    staging_bytes_ += raw->staging->memory()->layout().slab_bytes();
  }
  CERTKV_CHECK(sessions_.emplace(raw->id, std::move(session)).second,
               "session ids are never used twice");
}

absl::StatusOr<Session*> SessionTable::Find(SessionId id) const {
  const auto it = sessions_.find(id);
  if (it != sessions_.end()) return it->second.get();
  for (const Ended& ended : ended_) {
    if (ended.id == id) {
      return MakeError(absl::StatusCode::kNotFound, "SESSION_NOT_FOUND",
                       absl::StrCat(ended.text, "; attach again"));
    }
  }
  return NotFound(id);
}

absl::Status SessionTable::NotFound(SessionId id) {
  return MakeError(absl::StatusCode::kNotFound, "SESSION_NOT_FOUND",
                   absl::StrCat("session ", static_cast<int64_t>(id),
                                " is not attached to this store process; attach again"));
}

Session* SessionTable::FindByToken(absl::string_view fd_token) const {
  const auto it = by_token_.find(fd_token);
  return it == by_token_.end() ? nullptr : it->second;
}

Session* SessionTable::FindByStagingId(int64_t staging_id) const {
  const auto it = by_staging_id_.find(staging_id);
  return it == by_staging_id_.end() ? nullptr : it->second;
}

void SessionTable::SetDeviceStaging(SessionId id, int64_t size_bytes) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return;
  device_staging_bytes_ += size_bytes - it->second->device_staging_bytes;
  it->second->device_staging_bytes = size_bytes;
}

std::unique_ptr<Session> SessionTable::TakeOut(SessionId id, absl::string_view why) {
  const auto it = sessions_.find(id);
  CERTKV_CHECK(it != sessions_.end(), "a session ends once");
  std::unique_ptr<Session> session = std::move(it->second);
  sessions_.erase(it);
  by_token_.erase(session->fd_token);
  if (session->staging != nullptr) {
    by_staging_id_.erase(session->staging_id);
    staging_bytes_ -= session->staging->memory()->layout().slab_bytes();
    device_staging_bytes_ -= session->device_staging_bytes;
  }
  ended_.push_front({id, absl::StrCat("session ", static_cast<int64_t>(id), " of ",
                                      session->worker_name, " is no longer attached: ", why)});
  if (ended_.size() > kEndedSessionsRemembered) ended_.pop_back();
  return session;
}

std::vector<SessionId> SessionTable::Of(const Cache& cache) const {
  std::vector<SessionId> ids;
  for (const auto& [id, session] : sessions_) {
    if (session->cache.get() == &cache) ids.push_back(id);
  }
  return ids;
}

std::vector<SessionId> SessionTable::NeverConnected(int64_t now_ns) const {
  std::vector<SessionId> ids;
  for (const auto& [id, session] : sessions_) {
    if (!session->connected && session->connect_deadline_ns <= now_ns) ids.push_back(id);
  }
  return ids;
}

}  // namespace certkv::kvstore
