// Between the store's messages and its engine's types. XFromProto checks what came over the wire.
#ifndef CERTKV_SERVICES_KVSTORE_CONVERT_H_
#define CERTKV_SERVICES_KVSTORE_CONVERT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "certkv/kvstore/v1/kvstore.pb.h"
#include "services/common/identity.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Errors: InvalidArgument [DIGEST_SIZE], naming the entry.
absl::StatusOr<std::vector<BlockKey>> BlockKeysFromProto(
    const google::protobuf::RepeatedPtrField<std::string>& keys);
absl::StatusOr<std::vector<SealEntry>> SealEntriesFromProto(
    const google::protobuf::RepeatedPtrField<v1::SealEntry>& entries);
// Errors: InvalidArgument [SESSION_ROLE_INVALID].
// Errors: InvalidArgument [PRIORITY_INVALID].
absl::StatusOr<SealOptions> SealOptionsFromProto(const v1::SealBlocksRequest& request);
absl::StatusOr<AttachRequest> AttachRequestFromProto(const v1::AttachWorkerRequest& request);

// Errors: InvalidArgument [PULL_ORDER_INVALID]; as BlockKeysFromProto.
absl::StatusOr<PullRequest> PullRequestFromProto(const v1::PullBlocksRequest& request);

void BlockInfoToProto(const BlockInfo& info, v1::Block* block);
void BlockEventToProto(const BlockEvent& event, v1::BlockEvent* proto);
void StatsToProto(const StoreStats& stats, v1::Stats* proto);

// What the caller may see: caches of its tenants; of all tenants together nothing, unless it may
// act for all, as that would tell one about the others.
StoreStats VisibleStats(StoreStats stats, const Identity& caller);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_CONVERT_H_
