// What other stores ask of this one about links by NCCL.
#ifndef CERTKV_SERVICES_KVSTORE_SERVICE_LINKS_H_
#define CERTKV_SERVICES_KVSTORE_SERVICE_LINKS_H_

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "certkv/kvstore/v1/links.grpc.pb.h"
#include "services/common/access_control.h"
#include "services/kvstore/nccl_plane.h"

namespace certkv::kvstore {

struct LinkCallsDependencies {
  NcclPlane* nccl = nullptr;
  const AccessControl* access = nullptr;        // null: everybody may call
  std::function<absl::Status()> check_serving;  // does the store serve now?
};

// The calls end on gRPC's threads or on those of links. What it borrows outlives it.
std::unique_ptr<v1::StoreLinks::CallbackService> MakeLinkCalls(LinkCallsDependencies with);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SERVICE_LINKS_H_
