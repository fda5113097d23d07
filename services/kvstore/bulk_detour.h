// BulkDetour: another way than TCP by which blocks may come from another store.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_DETOUR_H_
#define CERTKV_SERVICES_KVSTORE_BULK_DETOUR_H_

#include <functional>
#include <vector>

#include "services/kvstore/bulk_client.h"

namespace certkv::kvstore {

// Whatever it does not bring comes by TCP, so it never fails. Threads: all methods may be called
// concurrently; none blocks.
class BulkDetour {
 public:
  virtual ~BulkDetour() = default;

  // Is there a way to the peer now?
  virtual bool LeadsTo(const BulkPeer& peer) = 0;
  // Brings what it can of the targets, beginning with the first: these are done, with all bytes of
  // one answer, unchecked. The others are as they were, but for what lies in their spans. `done` is
  // called once, on a thread of the detour or on this one; peer and targets live until then.
  virtual void Fetch(const BulkPeer& peer, std::vector<BulkTarget*> targets,
                     std::function<void()> done) = 0;
  // What came this way was not what the peer had sealed.
  virtual void Distrust(const BulkPeer& peer) = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_DETOUR_H_
