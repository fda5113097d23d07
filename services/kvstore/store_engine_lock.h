// The engine's lock, for the files that implement it.
#ifndef CERTKV_SERVICES_KVSTORE_STORE_ENGINE_LOCK_H_
#define CERTKV_SERVICES_KVSTORE_STORE_ENGINE_LOCK_H_

#include "absl/base/thread_annotations.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

class ABSL_SCOPED_LOCKABLE StoreEngine::Lock {
 public:
  explicit Lock(StoreEngine* engine) ABSL_EXCLUSIVE_LOCK_FUNCTION(engine->mutex_)
      : engine_(engine) {
    engine_->mutex_.Lock();
  }
  ~Lock() ABSL_UNLOCK_FUNCTION() {
    engine_->mutex_.Unlock();
    engine_->events_.Notify();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  StoreEngine* const engine_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_STORE_ENGINE_LOCK_H_
