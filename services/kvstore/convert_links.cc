#include "services/kvstore/convert_links.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/kvstore/convert.h"

namespace certkv::kvstore {
namespace {

template <typename Array>
absl::Status CopyBytes(const std::string& from, absl::string_view field, Array* to) {
  if (from.size() != to->size()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NCCL_OFFER_INVALID",
                     absl::StrCat(field, " has ", from.size(), " bytes, must be ", to->size()));
  }
  std::copy(from.begin(), from.end(), to->begin());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<NcclOffer> NcclOfferFromProto(const v1::JoinLinkRequest& request) {
  NcclOffer offer;
  CERTKV_RETURN_IF_ERROR(CopyBytes(request.communicator_id(), "communicator_id", &offer.id));
  CERTKV_RETURN_IF_ERROR(CopyBytes(request.boot_id(), "boot_id", &offer.boot));
  CERTKV_RETURN_IF_ERROR(CopyBytes(request.device_uuid(), "device_uuid", &offer.device_uuid));
  CERTKV_ASSIGN_OR_RETURN(offer.spec, SpecDigestFromBytes(request.spec_digest()));
  offer.version = request.nccl_version();
  offer.plane_bytes = request.plane_bytes();
  offer.original_bytes = request.original_bytes();
  offer.movement_bytes = request.movement_bytes();
  return offer;
}

v1::JoinLinkRequest NcclOfferToProto(const NcclOffer& offer) {
  v1::JoinLinkRequest request;
  request.set_communicator_id(std::string(offer.id.begin(), offer.id.end()));
  request.set_nccl_version(offer.version);
  request.set_boot_id(std::string(offer.boot.begin(), offer.boot.end()));
  request.set_device_uuid(std::string(offer.device_uuid.begin(), offer.device_uuid.end()));
  request.set_spec_digest(std::string(offer.spec.view()));
  request.set_tenant(offer.tenant);
  request.set_plane_bytes(offer.plane_bytes);
  request.set_original_bytes(offer.original_bytes);
  request.set_movement_bytes(offer.movement_bytes);
  return request;
}

absl::StatusOr<NcclAsk> NcclAskFromProto(const v1::SendBlocksRequest& request) {
  NcclAsk ask;
  ask.link_id = request.link_id();
  ask.parts = request.parts();
  if (ask.parts < 1 || ask.parts > kBulkAllParts) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "NCCL_ASK_INVALID",
        absl::StrCat("parts is ", ask.parts, ", must be 1 (planes), 2 (originals) or 3 (both)"));
  }
  CERTKV_ASSIGN_OR_RETURN(ask.keys, BlockKeysFromProto(request.block_keys()));
  return ask;
}

v1::SendBlocksRequest NcclAskToProto(const NcclAsk& ask) {
  v1::SendBlocksRequest request;
  request.set_link_id(ask.link_id);
  request.set_parts(ask.parts);
  for (const BlockKey& key : ask.keys) request.add_block_keys(std::string(key.view()));
  return request;
}

void SentBlocksToProto(const std::vector<BulkBlock>& blocks, v1::SendBlocksResponse* response) {
  for (const BulkBlock& block : blocks) {
    v1::SentBlock* const sent = response->add_blocks();
    sent->set_block_key(std::string(block.key.view()));
    sent->set_parent_key(std::string(block.parent.view()));
    sent->set_originals_digest(block.originals_digest);
    sent->set_seal_time_ms(block.seal_time_ms);
    sent->set_size_bytes(block.total_bytes);
  }
}

absl::StatusOr<std::vector<BulkBlock>> SentBlocksFromProto(const v1::SendBlocksResponse& response,
                                                           uint32_t parts) {
  std::vector<BulkBlock> blocks;
  for (const v1::SentBlock& sent : response.blocks()) {
    BulkBlock& block = blocks.emplace_back();
    CERTKV_ASSIGN_OR_RETURN(block.key, BlockKeyFromBytes(sent.block_key()));
    CERTKV_ASSIGN_OR_RETURN(block.parent, BlockKeyFromBytes(sent.parent_key()));
    block.originals_digest = sent.originals_digest();
    block.seal_time_ms = sent.seal_time_ms();
    block.total_bytes = sent.size_bytes();
    block.parts = parts;
  }
  return blocks;
}

}  // namespace certkv::kvstore
