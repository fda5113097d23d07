// The stream of WatchBlockEvents.
#ifndef CERTKV_SERVICES_KVSTORE_SERVICE_WATCH_H_
#define CERTKV_SERVICES_KVSTORE_SERVICE_WATCH_H_

#include <grpcpp/support/server_callback.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "certkv/kvstore/v1/kvstore.pb.h"
#include "services/kvstore/event_hub.h"

namespace certkv::kvstore {

// Starts a stream that ends itself, at once when `status` is an error. `domain` is of its errors
// and lives for ever.
grpc::ServerWriteReactor<v1::BlockEvent>* StartWatch(const absl::Status& status, EventHub* hub,
                                                     CacheId cache, EventCursor cursor,
                                                     absl::string_view domain);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SERVICE_WATCH_H_
