// NcclServer: gives sealed blocks to other stores by NCCL.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_SERVER_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_SERVER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/common/clock.h"
#include "services/kvstore/nccl_channel.h"
#include "services/kvstore/nccl_config.h"
#include "services/kvstore/nccl_counters.h"
#include "services/kvstore/nccl_link.h"
#include "services/kvstore/nccl_rendezvous.h"
#include "services/kvstore/peer_session.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Each link is a reader's session of the engine, of one cache and tenant, as a connection of the
// bulk plane is: what a lookup finds for that tenant is sent, leased while it is. The link ends
// when something fails, or nobody asks.
//
// Invariants:
//  1. At most config.link_limit links.
// Lock order: mutex_, then a link's.
class NcclServer {
 public:
  struct Dependencies {
    StoreEngine* engine = nullptr;
    PairCommunicatorLibrary* library = nullptr;
    DevicePlace place;
    const Clock* clock = nullptr;
    NcclCounters* counters = nullptr;
    int64_t lease_ms = 0;  // of blocks while they are sent; longer than config.timeout_ms
  };
  NcclServer(const NcclConfig& config, const Dependencies& with);
  // As Stop, and waits for the links' threads.
  ~NcclServer();

  // Begins to join; whether the other end comes, the link's thread finds out. `caller`, for people.
  // Errors: FailedPrecondition [NCCL_VERSION], of another version; [NCCL_SAME_DEVICE];
  // [BULK_PEER_MISMATCH], its blocks have other sizes; InvalidArgument [NCCL_OFFER_INVALID];
  // ResourceExhausted [NCCL_LINK_LIMIT]; Unavailable [STORE_STOPPING]; those of PeerSession::Open.
  absl::StatusOr<NcclJoined> Join(const NcclOffer& offer, const std::string& caller)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the caller may use the tenant that a link is for. Errors: NotFound
  // [NCCL_LINK_NOT_FOUND], also where it may not: whose links there are is nobody else's business.
  absl::Status CheckTenant(int64_t link_id, const StoreEngine::MayUse& may_use)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // `done` is called once, on the link's thread or on this one, with what is about to be sent: the
  // longest prefix of the keys that is here, maybe none. Errors: NotFound [NCCL_LINK_NOT_FOUND];
  // what ended the link.
  using Done = std::function<void(const absl::StatusOr<std::vector<BulkBlock>>&)>;
  void Send(NcclAsk ask, Done done) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all links, soon; takes no new ones. Doesn't block.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct LinkState {
    std::unique_ptr<PeerSession> session;  // the link's thread's, once it runs
    bool was_made = false;
    std::atomic<int64_t> used_ns{0};
  };
  struct Entry {
    std::string tenant;
    std::shared_ptr<LinkState> state;
    std::shared_ptr<NcclLink> link;
  };

  absl::Status CheckOffer(const NcclOffer& offer) const;
  absl::StatusOr<std::unique_ptr<PeerSession>> OpenSession(const NcclOffer& offer,
                                                           const std::string& caller) const;
  // Forgets links that are over, and, where there is no room for one more, ends the one that is
  // idle for longest. Errors: ResourceExhausted [NCCL_LINK_LIMIT].
  absl::Status MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLink(int64_t link_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<NcclLink> MakeLink(const NcclOffer& offer, int64_t movement_bytes,
                                     const std::shared_ptr<LinkState>& state,
                                     const std::string& caller);
  // On a link's thread. Answers once, before it sends.
  absl::Status SendBlocks(NcclChannel* channel, LinkState* state, const NcclAsk& ask,
                          const Done& done);
  void GiveUp(const std::string& caller, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  const NcclConfig config_;
  const Dependencies with_;
  absl::Mutex mutex_;
  std::map<int64_t, Entry> links_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<NcclLink>> ended_ ABSL_GUARDED_BY(mutex_);  // and not over yet
  std::set<std::string> said_ ABSL_GUARDED_BY(mutex_);                    // reasons
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_SERVER_H_
