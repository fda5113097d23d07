#include "clients/cpp/store_client.h"

#include "clients/cpp/lease_book.h"
#include "clients/cpp/now.h"
#include "clients/cpp/rpc.h"
#include "kernels/core/status.h"
#include "services/common/call_trace.h"
#include "services/common/convert.h"
#include "services/common/retry_delay.h"

namespace certkv::client {
namespace {

namespace v1 = certkv::kvstore::v1;

// `asked_ms` is from before the call, which asked for leases of `duration_ms`.
template <typename Response>
absl::StatusOr<LeasedBlocks> LeasedBlocksFrom(const Response& response, int64_t asked_ms,
                                              int64_t duration_ms) {
  LeasedBlocks result;
  for (const auto& block : response.blocks()) {
    CERTKV_ASSIGN_OR_RETURN(BlockHandle handle, BlockHandleFromProto(block));
    result.blocks.push_back(handle);
  }
  result.lease = LeaseId{response.lease_id()};
  result.expire_time_ms =
      LeaseExpireTime(asked_ms, NowMs(), duration_ms, response.expire_time_ms());
  return result;
}

void AddKeys(absl::Span<const BlockKey> keys,
             google::protobuf::RepeatedPtrField<std::string>* field) {
  for (const BlockKey& key : keys) *field->Add() = std::string(key.view());
}

}  // namespace

StoreClient::StoreClient(const Options& options)
    : options_(options),
      stub_(v1::KvStore::NewStub(MakeChannel(options.kvstore_target, options))) {}

absl::StatusOr<RegisteredCache> StoreClient::RegisterCache(const CacheSpec& spec) {
  v1::RegisterCacheRequest request;
  *request.mutable_spec() = CacheSpecToProto(spec);
  request.set_tenant(options_.tenant);
  v1::RegisterCacheResponse response;
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->RegisterCache(&context, request, &response);
      }));
  CERTKV_ASSIGN_OR_RETURN(SpecDigest digest, SpecDigestFromBytes(response.spec_digest()));
  return RegisteredCache{CacheId{response.cache_id()}, digest, response.device_slot_count(),
                         response.backing_slot_count(), response.tenant_salt()};
}

absl::StatusOr<AttachedSession> StoreClient::AttachWorker(CacheId cache) {
  v1::AttachWorkerRequest request;
  request.set_cache_id(static_cast<int64_t>(cache));
  request.set_worker_name(options_.worker_name);
  request.set_role(v1::SESSION_ROLE_WORKER);
  request.set_staging_slot_count(options_.staging_slot_count);
  request.set_tenant(options_.tenant);
  request.set_wants_device_staging(options_.device_staging);
  v1::AttachWorkerResponse response;
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kNever, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->AttachWorker(&context, request, &response);
      }));
  return AttachedSession{SessionId{response.session_id()}, response.fd_token(),
                         response.fd_socket(), response.staging_slot_count(),
                         response.staging_id()};
}

absl::Status StoreClient::DetachWorker(SessionId session) {
  v1::DetachWorkerRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  v1::DetachWorkerResponse response;
  return CallUnary(options_.rpc_timeout_ms, Retry::kNever, [&](grpc::ClientContext& context) {
    SetTraceparent(options_.traceparent, &context);
    return stub_->DetachWorker(&context, request, &response);
  });
}

absl::StatusOr<LeasedBlocks> StoreClient::LookupAndLease(SessionId session,
                                                         absl::Span<const BlockKey> keys) {
  v1::LookupAndLeaseRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  AddKeys(keys, request.mutable_block_keys());
  request.set_lease_duration_ms(options_.lease_duration_ms);
  v1::LookupAndLeaseResponse response;
  const int64_t asked_ms = NowMs();
  // Not retried: an answer that was lost would leave a second lease until its deadline.
  CERTKV_RETURN_IF_ERROR(CallUnary(
      options_.seal_timeout_ms, Retry::kNever,
      [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->LookupAndLease(&context, request, &response);
      },
      options_.pressure_wait_ms));
  return LeasedBlocksFrom(response, asked_ms, options_.lease_duration_ms);
}

absl::StatusOr<LeasedBlocks> StoreClient::PullBlocks(SessionId session, const std::string& peer,
                                                     absl::Span<const BlockKey> keys,
                                                     PullOrder order) {
  v1::PullBlocksRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  request.set_peer(peer);
  AddKeys(keys, request.mutable_block_keys());
  request.set_order(static_cast<v1::PullOrder>(order));
  request.set_lease_duration_ms(options_.lease_duration_ms);
  v1::PullBlocksResponse response;
  const int64_t asked_ms = NowMs();
  CERTKV_RETURN_IF_ERROR(CallUnary(
      options_.seal_timeout_ms, Retry::kIdempotent,
      [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->PullBlocks(&context, request, &response);
      },
      options_.pressure_wait_ms));
  CERTKV_ASSIGN_OR_RETURN(LeasedBlocks blocks,
                          LeasedBlocksFrom(response, asked_ms, options_.lease_duration_ms));
  blocks.pulled_count = response.pulled_count();
  return blocks;
}

absl::StatusOr<std::vector<int32_t>> StoreClient::ReserveBlocks(SessionId session,
                                                                int32_t block_count, bool waits) {
  v1::ReserveBlocksRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  request.set_block_count(block_count);
  v1::ReserveBlocksResponse response;
  CERTKV_RETURN_IF_ERROR(CallUnary(
      options_.rpc_timeout_ms, Retry::kNever,
      [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->ReserveBlocks(&context, request, &response);
      },
      waits ? options_.pressure_wait_ms : 0));
  return std::vector<int32_t>(response.staging_slots().begin(), response.staging_slots().end());
}

absl::StatusOr<LeasedBlocks> StoreClient::SealBlocks(SessionId session,
                                                     absl::Span<const SealItem> items,
                                                     bool on_device) {
  v1::SealBlocksRequest request;
  request.set_from_device_staging(on_device);
  request.set_session_id(static_cast<int64_t>(session));
  request.set_lease_duration_ms(options_.lease_duration_ms);
  request.set_keep_slots_for_retry(options_.pressure_wait_ms > 0);
  std::vector<int32_t> slots;
  for (const SealItem& item : items) {
    v1::SealEntry* entry = request.add_entries();
    entry->set_staging_slot(item.staging_slot);
    entry->set_block_key(std::string(item.key.view()));
    entry->set_parent_key(std::string(item.parent.view()));
    slots.push_back(item.staging_slot);
  }
  v1::SealBlocksResponse response;
  const int64_t asked_ms = NowMs();
  const absl::Status status = CallUnary(
      options_.seal_timeout_ms, Retry::kNever,
      [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->SealBlocks(&context, request, &response);
      },
      options_.pressure_wait_ms);
  if (!status.ok()) {
    // The last refusal left them reserved.
    const bool was_kept = request.keep_slots_for_retry() && RetryDelayMsOf(status) > 0;
    if (was_kept) AbortBlocks(session, slots).IgnoreError();
    return status;
  }
  CERTKV_ASSIGN_OR_RETURN(LeasedBlocks blocks,
                          LeasedBlocksFrom(response, asked_ms, options_.lease_duration_ms));
  blocks.shared_count = response.shared_count();
  return blocks;
}

absl::Status StoreClient::PinBlocks(SessionId session, absl::Span<const BlockKey> keys, bool pinned,
                                    int64_t ttl_ms) {
  v1::PinBlocksRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  AddKeys(keys, request.mutable_block_keys());
  request.set_pinned(pinned);
  request.set_ttl_ms(ttl_ms);
  v1::PinBlocksResponse response;
  return CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
    SetTraceparent(options_.traceparent, &context);
    return stub_->PinBlocks(&context, request, &response);
  });
}

absl::StatusOr<int32_t> StoreClient::DropBlocks(SessionId session,
                                                absl::Span<const BlockKey> keys) {
  v1::DropBlocksRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  AddKeys(keys, request.mutable_block_keys());
  v1::DropBlocksResponse response;
  // Not retried: a lost answer would be answered with fewer.
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kNever, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->DropBlocks(&context, request, &response);
      }));
  return response.dropped_count();
}

absl::Status StoreClient::AbortBlocks(SessionId session, absl::Span<const int32_t> staging_slots) {
  v1::AbortBlocksRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  for (const int32_t slot : staging_slots) request.add_staging_slots(slot);
  v1::AbortBlocksResponse response;
  return CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
    SetTraceparent(options_.traceparent, &context);
    return stub_->AbortBlocks(&context, request, &response);
  });
}

absl::StatusOr<int64_t> StoreClient::RenewLease(SessionId session, LeaseId lease) {
  v1::RenewLeaseRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  request.set_lease_id(static_cast<int64_t>(lease));
  request.set_lease_duration_ms(options_.lease_duration_ms);
  v1::RenewLeaseResponse response;
  const int64_t asked_ms = NowMs();
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->RenewLease(&context, request, &response);
      }));
  return LeaseExpireTime(asked_ms, NowMs(), options_.lease_duration_ms, response.expire_time_ms());
}

absl::Status StoreClient::ReleaseLease(SessionId session, LeaseId lease) {
  v1::ReleaseLeaseRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  request.set_lease_id(static_cast<int64_t>(lease));
  v1::ReleaseLeaseResponse response;
  return CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
    SetTraceparent(options_.traceparent, &context);
    return stub_->ReleaseLease(&context, request, &response);
  });
}

absl::Status StoreClient::FetchOriginals(SessionId session, LeaseId lease,
                                         absl::Span<const BlockKey> keys) {
  v1::FetchOriginalsRequest request;
  request.set_session_id(static_cast<int64_t>(session));
  request.set_lease_id(static_cast<int64_t>(lease));
  AddKeys(keys, request.mutable_block_keys());
  v1::FetchOriginalsResponse response;
  return CallUnary(options_.seal_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
    SetTraceparent(options_.traceparent, &context);
    return stub_->FetchOriginals(&context, request, &response);
  });
}

absl::StatusOr<v1::Stats> StoreClient::GetStats() {
  v1::Stats response;
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->GetStats(&context, v1::GetStatsRequest(), &response);
      }));
  return response;
}

absl::StatusOr<v1::ListBlocksResponse> StoreClient::ListBlocks(CacheId cache, int32_t page_size,
                                                               const std::string& page_token) {
  v1::ListBlocksRequest request;
  request.set_cache_id(static_cast<int64_t>(cache));
  request.set_page_size(page_size);
  request.set_page_token(page_token);
  v1::ListBlocksResponse response;
  CERTKV_RETURN_IF_ERROR(
      CallUnary(options_.rpc_timeout_ms, Retry::kIdempotent, [&](grpc::ClientContext& context) {
        SetTraceparent(options_.traceparent, &context);
        return stub_->ListBlocks(&context, request, &response);
      }));
  return response;
}

}  // namespace certkv::client
