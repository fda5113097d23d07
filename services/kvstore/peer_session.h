// PeerSession: another store's session of the engine, as a reader of one cache for one tenant.
#ifndef CERTKV_SERVICES_KVSTORE_PEER_SESSION_H_
#define CERTKV_SERVICES_KVSTORE_PEER_SESSION_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Ends with this object.
class PeerSession {
 public:
  explicit PeerSession(StoreEngine* engine) : engine_(engine) {}
  ~PeerSession() {
    if (id_ != SessionId{}) engine_->EndSession(id_, "the other store's connection ended");
  }
  PeerSession(const PeerSession&) = delete;
  PeerSession& operator=(const PeerSession&) = delete;

  // Errors: those of StoreEngine::FindCacheOf, AttachWorker and ConnectSession.
  absl::Status Open(const SpecDigest& spec, const std::string& tenant, const std::string& name) {
    CERTKV_ASSIGN_OR_RETURN(const CacheId cache, engine_->FindCacheOf(spec, tenant));
    CERTKV_ASSIGN_OR_RETURN(const AttachedSession attached,
                            engine_->AttachWorker({.cache = cache,
                                                   .worker_name = absl::StrCat("peer ", name),
                                                   .role = SessionRole::kReader,
                                                   .tenant = tenant}));
    id_ = attached.session;
    CERTKV_RETURN_IF_ERROR(engine_->ConnectSession(attached.fd_token).status());
    return absl::OkStatus();
  }
  SessionId id() const { return id_; }

 private:
  StoreEngine* const engine_;
  SessionId id_{};
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_PEER_SESSION_H_
