// StoreWatcher: what the store says of its capacity, for the dashboard.
#ifndef CERTKV_SERVICES_GATE_SERVICE_STORE_H_
#define CERTKV_SERVICES_GATE_SERVICE_STORE_H_

#include <memory>
#include <string>

#include "services/common/clock.h"
#include "services/gate/dashboard.h"

namespace certkv::gate {

// Asks when it is asked, at most once a second and one call at a time; nobody waits for the store.
// Threads: all methods are safe.
class StoreWatcher {
 public:
  // `socket` and `token_file` are paths; the file is read for each call, "" = no token is shown.
  // `clock` outlives the watcher.
  StoreWatcher(const std::string& socket, const std::string& token_file, const Clock* clock);
  // Waits for the call that runs, which is cancelled.
  ~StoreWatcher();

  // The last answer, which may be a moment old; begins another call.
  StoreSummary Latest();

 private:
  class Core;
  const std::shared_ptr<Core> core_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_SERVICE_STORE_H_
