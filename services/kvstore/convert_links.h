// Between messages about NCCL and their types.
#ifndef CERTKV_SERVICES_KVSTORE_CONVERT_LINKS_H_
#define CERTKV_SERVICES_KVSTORE_CONVERT_LINKS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "certkv/kvstore/v1/links.pb.h"
#include "services/kvstore/nccl_rendezvous.h"

namespace certkv::kvstore {

// Errors: InvalidArgument [NCCL_OFFER_INVALID], a field of another size; [DIGEST_SIZE]. The tenant
// is the caller's business.
absl::StatusOr<NcclOffer> NcclOfferFromProto(const v1::JoinLinkRequest& request);
v1::JoinLinkRequest NcclOfferToProto(const NcclOffer& offer);
// Errors: InvalidArgument [NCCL_ASK_INVALID]; as BlockKeysFromProto.
absl::StatusOr<NcclAsk> NcclAskFromProto(const v1::SendBlocksRequest& request);
v1::SendBlocksRequest NcclAskToProto(const NcclAsk& ask);
void SentBlocksToProto(const std::vector<BulkBlock>& blocks, v1::SendBlocksResponse* response);
// `parts`: as asked for. Errors: as BlockKeysFromProto.
absl::StatusOr<std::vector<BulkBlock>> SentBlocksFromProto(const v1::SendBlocksResponse& response,
                                                           uint32_t parts);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_CONVERT_LINKS_H_
