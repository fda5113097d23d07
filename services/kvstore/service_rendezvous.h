// The rendezvous of stores by gRPC: JoinLink and SendBlocks of the other one.
#ifndef CERTKV_SERVICES_KVSTORE_SERVICE_RENDEZVOUS_H_
#define CERTKV_SERVICES_KVSTORE_SERVICE_RENDEZVOUS_H_

#include <memory>

#include "services/kvstore/bulk_config.h"
#include "services/kvstore/nccl_rendezvous.h"

namespace certkv::kvstore {

// With the certificates and the token that the bulk plane shows, read again when they change. In
// the clear where section server says insecure. Errors of its calls: also Unavailable
// [NCCL_PEER_UNREACHABLE], the other store did not answer; as ReadTokenFile.
std::unique_ptr<NcclRendezvous> MakeGrpcRendezvous(const BulkConfig& config);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SERVICE_RENDEZVOUS_H_
