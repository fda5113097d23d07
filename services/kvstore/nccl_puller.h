// NcclPuller: blocks of other stores by NCCL, for pulls of the bulk plane.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_PULLER_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_PULLER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "services/common/clock.h"
#include "services/kvstore/bulk_detour.h"
#include "services/kvstore/nccl_channel.h"
#include "services/kvstore/nccl_config.h"
#include "services/kvstore/nccl_counters.h"
#include "services/kvstore/nccl_link.h"
#include "services/kvstore/nccl_rendezvous.h"

namespace certkv::kvstore {

// One link for each peer, cache and tenant, made by the first pull, kept for those after it. A link
// that fails is given up, whatever the reason, and the peer is asked by TCP alone for retry_ms.
//
// Invariants:
//  1. At most config.link_limit links.
//  2. Each Fetch calls `done` once, also when everything hangs that can: after its deadlines.
// Lock order: mutex_, then a link's.
class NcclPuller final : public BulkDetour {
 public:
  struct Dependencies {
    PairCommunicatorLibrary* library = nullptr;
    DevicePlace place;
    const Clock* clock = nullptr;
    NcclRendezvous* rendezvous = nullptr;
    NcclCounters* counters = nullptr;
  };
  // `addresses`: as NcclConfig::PeerAddresses.
  NcclPuller(const NcclConfig& config, const std::map<std::string, std::string>& addresses,
             const Dependencies& with);
  // As Stop, and waits for the links' threads.
  ~NcclPuller() override;

  bool LeadsTo(const BulkPeer& peer) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Fetch(const BulkPeer& peer, std::vector<BulkTarget*> targets,
             std::function<void()> done) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Distrust(const BulkPeer& peer) override ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends what runs, soon; nothing more leads anywhere. Doesn't block.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Peer {
    std::string address;              // for the rendezvous
    int64_t retry_ns = 0;             // not before
    std::set<std::string> said = {};  // reasons for which it was given up since it worked
  };
  // Shared with the link's thread.
  struct LinkState {
    int64_t link_id = 0;
    bool was_made = false;
  };
  struct Entry {
    std::string peer;  // bulk address
    SpecDigest spec;
    std::string tenant;
    std::shared_ptr<LinkState> state;
    std::shared_ptr<NcclLink> link;
  };

  bool LeadsToLocked(const std::string& peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The link to the peer, if need be a new one. Null: there are too many.
  Entry* FindLink(const BulkPeer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry MakeLink(const BulkPeer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets links that are over.
  void Bury() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLink(size_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // On a link's thread.
  absl::StatusOr<std::unique_ptr<NcclChannel>> Join(const std::string& address, NcclOffer offer,
                                                    LinkState* state, StopSignal* stop);
  absl::Status Bring(NcclChannel* channel, const std::string& address, int64_t link_id,
                     const std::vector<BulkTarget*>& targets);
  // The peer is asked by TCP alone for a while.
  void GiveUp(const std::string& peer, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Counts it, and says it once for each cause since NCCL worked.
  void Say(const std::string& peer, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  void SayLimit(const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void SayAgain(const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);

  const NcclConfig config_;
  const Dependencies with_;
  absl::Mutex mutex_;
  std::map<std::string, Peer> peers_ ABSL_GUARDED_BY(mutex_);  // by bulk address
  std::vector<Entry> links_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<NcclLink>> ended_ ABSL_GUARDED_BY(mutex_);  // and not over yet
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_PULLER_H_
