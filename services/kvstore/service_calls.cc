#include "services/kvstore/service_calls.h"

#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/convert.h"
#include "services/kvstore/remote_lookup.h"
#include "services/kvstore/service_watch.h"

namespace certkv::kvstore {
namespace {

constexpr absl::string_view kDomain = "kvstore.certkv";
constexpr int64_t kOpeningRetryMs = 1000;

absl::Status Stopping() {
  return MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                   "the store is stopping; retry when it is back");
}

absl::Status Opening(const SpillProgress& progress) {
  return WithRetryDelay(
      MakeError(absl::StatusCode::kUnavailable, "STORE_OPENING",
                absl::StrCat("the store is opening and reads the index of its blocks on disk, ",
                             progress.blocks, " blocks of ", progress.bytes,
                             " bytes so far; retry when health says SERVING")),
      kOpeningRetryMs);
}

void FillLeased(const LeasedBlocks& leased,
                google::protobuf::RepeatedPtrField<type::BlockHandle>* to) {
  to->Reserve(static_cast<int>(leased.blocks.size()));
  for (const BlockHandle& handle : leased.blocks) *to->Add() = BlockHandleToProto(handle);
}

absl::Status LookupToProto(const absl::StatusOr<LeasedBlocks>& leased,
                           v1::LookupAndLeaseResponse* response) {
  CERTKV_RETURN_IF_ERROR(leased.status());
  FillLeased(*leased, response->mutable_blocks());
  response->set_lease_id(static_cast<int64_t>(leased->lease));
  response->set_expire_time_ms(leased->expire_time_ms);
  return absl::OkStatus();
}

// The RPCs. Every call ends on gRPC's thread, or, where it computes, on one of the pool.
class CheckedCalls final : public StoreCalls {
 public:
  CheckedCalls(StoreEngine* engine, ComputePool* pool, const AccessControl* access,
               std::string fd_socket)
      : engine_(engine), pool_(pool), access_(access), fd_socket_(std::move(fd_socket)) {}

  void Drain() override { is_draining_.store(true); }
  void Open() override { is_open_.store(true); }
  void SetBulkPlane(BulkPlane* bulk) override { bulk_ = bulk; }
  void SetCluster(ClusterLink* link, boost::asio::io_context* io_context) override {
    remote_ = {engine_, bulk_, link, io_context};
  }
  absl::Status CheckServing() const override {
    return is_draining_.load() ? Stopping() : CheckOpen();
  }

  grpc::ServerUnaryReactor* RegisterCache(grpc::CallbackServerContext* context,
                                          const v1::RegisterCacheRequest* request,
                                          v1::RegisterCacheResponse* response) override {
    return Answer(context, Scope::kWrite, {}, [&](const Identity& caller) -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(const std::string tenant, caller.ResolveTenant(request->tenant()));
      CERTKV_ASSIGN_OR_RETURN(const CacheSpec spec, CacheSpecFromProto(request->spec()));
      CERTKV_ASSIGN_OR_RETURN(const RegisteredCache cache, engine_->RegisterCache(spec, tenant));
      response->set_cache_id(static_cast<int64_t>(cache.cache));
      response->set_spec_digest(std::string(cache.digest.view()));
      response->set_device_slot_count(cache.device_slot_count);
      response->set_backing_slot_count(cache.backing_slot_count);
      response->set_tenant_salt(cache.key_salt);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* AttachWorker(grpc::CallbackServerContext* context,
                                         const v1::AttachWorkerRequest* request,
                                         v1::AttachWorkerResponse* response) override {
    const bool reads_only = request->role() == v1::SESSION_ROLE_READER;
    const Scope scope = reads_only ? Scope::kRead : Scope::kWrite;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<IdentityPtr> admitted = CheckCall(*context, scope, {});
    if (!admitted.ok()) return Finish(reactor, admitted.status());
    const auto answer = [=, this, caller = *admitted]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(AttachRequest attach, AttachRequestFromProto(*request));
      CERTKV_RETURN_IF_ERROR(CheckCache(*caller, attach.cache));
      CERTKV_ASSIGN_OR_RETURN(attach.tenant, caller->ResolveTenant(request->tenant()));
      CERTKV_ASSIGN_OR_RETURN(const AttachedSession attached, engine_->AttachWorker(attach));
      response->set_session_id(static_cast<int64_t>(attached.session));
      response->set_fd_token(attached.fd_token);
      response->set_fd_socket(fd_socket_);
      response->set_staging_slot_count(attached.staging_slot_count);
      response->set_staging_id(attached.staging_id);
      return absl::OkStatus();
    };
    // Memory of a GPU takes its time.
    if (request->wants_device_staging()) return Compute(context, reactor, answer);
    return Finish(reactor, answer());
  }

  grpc::ServerUnaryReactor* DetachWorker(grpc::CallbackServerContext* context,
                                         const v1::DetachWorkerRequest* request,
                                         v1::DetachWorkerResponse* /*response*/) override {
    const SessionId session{request->session_id()};
    return Answer(context, Scope::kRead, {}, [&](const Identity& caller) {
      // Somebody else's session is as one that has ended: nothing happens.
      if (!CheckSession(caller, session).ok()) return absl::OkStatus();
      engine_->EndSession(session, "it was detached");
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* LookupAndLease(grpc::CallbackServerContext* context,
                                           const v1::LookupAndLeaseRequest* request,
                                           v1::LookupAndLeaseResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<std::vector<BlockKey>> keys = BlockKeysFromProto(request->block_keys());
    const SessionId session{request->session_id()};
    absl::Status status = CheckCall(*context, Scope::kRead, session).status();
    if (status.ok()) status = keys.status();
    if (!status.ok()) return Finish(reactor, status);
    const int64_t duration_ms = request->lease_duration_ms();
    const auto leased = engine_->TryLookupAndLease(session, *keys, duration_ms);
    if (leased.has_value()) {
      return FinishLookup(reactor, session, *std::move(keys), duration_ms, *leased, response);
    }
    return ComputeAndFinish(context, reactor, [=, this, keys = *std::move(keys)] {
      auto found = engine_->LookupAndLease(session, keys, duration_ms);
      FinishLookup(reactor, session, keys, duration_ms, found, response);
    });
  }

  grpc::ServerUnaryReactor* ReserveBlocks(grpc::CallbackServerContext* context,
                                          const v1::ReserveBlocksRequest* request,
                                          v1::ReserveBlocksResponse* response) override {
    return Answer(context, Scope::kWrite, SessionId{request->session_id()},
                  [&](const Identity&) -> absl::Status {
                    CERTKV_ASSIGN_OR_RETURN(const std::vector<int32_t> slots,
                                            engine_->ReserveBlocks(SessionId{request->session_id()},
                                                                   request->block_count()));
                    response->mutable_staging_slots()->Add(slots.begin(), slots.end());
                    return absl::OkStatus();
                  });
  }

  grpc::ServerUnaryReactor* SealBlocks(grpc::CallbackServerContext* context,
                                       const v1::SealBlocksRequest* request,
                                       v1::SealBlocksResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<std::vector<SealEntry>> entries = SealEntriesFromProto(request->entries());
    const absl::StatusOr<SealOptions> options = SealOptionsFromProto(*request);
    const absl::Status admitted =
        CheckCall(*context, Scope::kWrite, SessionId{request->session_id()}).status();
    // A stranger frees nobody's slots.
    if (!admitted.ok() && !absl::IsUnavailable(admitted)) return Finish(reactor, admitted);
    absl::Status status = admitted;
    if (status.ok()) status = entries.status();
    if (status.ok()) status = options.status();
    if (!status.ok()) {
      AbortNamedSlots(*request);
      return Finish(reactor, admitted.ok() ? entries.status() : admitted);
    }
    const auto seal = [=, this, entries = *std::move(entries),
                       options = *options]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(
          const LeasedBlocks leased,
          engine_->SealBlocks(SessionId{request->session_id()}, entries, options));
      FillLeased(leased, response->mutable_blocks());
      response->set_shared_count(leased.shared_count);
      response->set_lease_id(static_cast<int64_t>(leased.lease));
      response->set_expire_time_ms(leased.expire_time_ms);
      return absl::OkStatus();
    };
    return Compute(context, reactor, seal, [this, context, request] {
      // Whoever has gone does not come back for its slots.
      if (!request->keep_slots_for_retry() || context->IsCancelled()) {
        AbortNamedSlots(*request);
      }
    });
  }

  grpc::ServerUnaryReactor* AbortBlocks(grpc::CallbackServerContext* context,
                                        const v1::AbortBlocksRequest* request,
                                        v1::AbortBlocksResponse* /*response*/) override {
    return Answer(context, Scope::kWrite, SessionId{request->session_id()}, [&](const Identity&) {
      return engine_->AbortBlocks(SessionId{request->session_id()}, request->staging_slots());
    });
  }

  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context,
                                       const v1::RenewLeaseRequest* request,
                                       v1::RenewLeaseResponse* response) override {
    return Answer(context, Scope::kRead, SessionId{request->session_id()},
                  [&](const Identity&) -> absl::Status {
                    CERTKV_ASSIGN_OR_RETURN(const int64_t expire_time_ms,
                                            engine_->RenewLease(SessionId{request->session_id()},
                                                                LeaseId{request->lease_id()},
                                                                request->lease_duration_ms()));
                    response->set_expire_time_ms(expire_time_ms);
                    return absl::OkStatus();
                  });
  }

  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* context,
                                         const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseResponse* /*response*/) override {
    return Answer(context, Scope::kRead, SessionId{request->session_id()}, [&](const Identity&) {
      return engine_->ReleaseLease(SessionId{request->session_id()}, LeaseId{request->lease_id()});
    });
  }

  grpc::ServerUnaryReactor* PinBlocks(grpc::CallbackServerContext* context,
                                      const v1::PinBlocksRequest* request,
                                      v1::PinBlocksResponse* /*response*/) override {
    return Answer(context, Scope::kWrite, SessionId{request->session_id()},
                  [&](const Identity&) -> absl::Status {
                    CERTKV_ASSIGN_OR_RETURN(const auto keys,
                                            BlockKeysFromProto(request->block_keys()));
                    return engine_->PinBlocks(SessionId{request->session_id()}, keys,
                                              request->pinned(), request->ttl_ms());
                  });
  }

  grpc::ServerUnaryReactor* DropBlocks(grpc::CallbackServerContext* context,
                                       const v1::DropBlocksRequest* request,
                                       v1::DropBlocksResponse* response) override {
    return Answer(
        context, Scope::kWrite, SessionId{request->session_id()},
        [&](const Identity&) -> absl::Status {
          CERTKV_ASSIGN_OR_RETURN(const auto keys, BlockKeysFromProto(request->block_keys()));
          CERTKV_ASSIGN_OR_RETURN(const int32_t dropped_count,
                                  engine_->DropBlocks(SessionId{request->session_id()}, keys));
          response->set_dropped_count(dropped_count);
          return absl::OkStatus();
        });
  }

  grpc::ServerUnaryReactor* FetchOriginals(grpc::CallbackServerContext* context,
                                           const v1::FetchOriginalsRequest* request,
                                           v1::FetchOriginalsResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<std::vector<BlockKey>> keys = BlockKeysFromProto(request->block_keys());
    absl::Status status =
        CheckCall(*context, Scope::kRead, SessionId{request->session_id()}).status();
    if (status.ok()) status = keys.status();
    if (!status.ok()) return Finish(reactor, status);
    return Compute(context, reactor, [=, this, keys = *std::move(keys)]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(const std::vector<BlockHandle> handles,
                              engine_->FetchOriginals(SessionId{request->session_id()},
                                                      LeaseId{request->lease_id()}, keys));
      for (const BlockHandle& handle : handles) {
        *response->add_blocks() = BlockHandleToProto(handle);
      }
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* PullBlocks(grpc::CallbackServerContext* context,
                                       const v1::PullBlocksRequest* request,
                                       v1::PullBlocksResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<PullRequest> pull = PullRequestFromProto(*request);
    absl::Status status =
        CheckCall(*context, Scope::kWrite, SessionId{request->session_id()}).status();
    if (status.ok()) status = pull.status();
    if (!status.ok()) return Finish(reactor, status);
    pull->is_cancelled = [context] { return context->IsCancelled(); };
    bulk_->Pull(*std::move(pull), [=, this](const absl::StatusOr<PullResult>& pulled) {
      Finish(reactor, pulled.ok() ? LeasePulled(*pulled, *request, response) : pulled.status());
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetBlock(grpc::CallbackServerContext* context,
                                     const v1::GetBlockRequest* request,
                                     v1::Block* response) override {
    return Answer(context, Scope::kRead, {}, [&](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(CheckCache(caller, CacheId{request->cache_id()}));
      CERTKV_ASSIGN_OR_RETURN(const BlockKey key, BlockKeyFromBytes(request->block_key()));
      CERTKV_ASSIGN_OR_RETURN(const BlockInfo info,
                              engine_->GetBlock(CacheId{request->cache_id()}, key));
      BlockInfoToProto(info, response);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ListBlocks(grpc::CallbackServerContext* context,
                                       const v1::ListBlocksRequest* request,
                                       v1::ListBlocksResponse* response) override {
    return Answer(context, Scope::kRead, {}, [&](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(CheckCache(caller, CacheId{request->cache_id()}));
      CERTKV_ASSIGN_OR_RETURN(const BlockPage page,
                              engine_->ListBlocks(CacheId{request->cache_id()},
                                                  request->page_size(), request->page_token()));
      for (const BlockInfo& info : page.blocks) BlockInfoToProto(info, response->add_blocks());
      response->set_next_page_token(page.next_page_token);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetStatsRequest* /*request*/,
                                     v1::Stats* response) override {
    const absl::StatusOr<IdentityPtr> caller = CheckCaller(*context, Scope::kRead);
    if (caller.ok()) StatsToProto(VisibleStats(engine_->GetStats(), **caller), response);
    return Finish(context->DefaultReactor(), caller.status());
  }

  grpc::ServerWriteReactor<v1::BlockEvent>* WatchBlockEvents(
      grpc::CallbackServerContext* context, const v1::WatchBlockEventsRequest* request) override {
    const CacheId cache{request->cache_id()};
    const EventCursor cursor{request->store_id(), request->after_sequence()};
    return StartWatch(CheckWatch(*context, cache), engine_->events(), cache, cursor, kDomain);
  }

 private:
  // Who calls, if it may: with that scope, and for the tenant of the session unless that is 0.
  absl::StatusOr<IdentityPtr> CheckCall(const grpc::CallbackServerContext& context, Scope scope,
                                        SessionId session) const {
    CERTKV_ASSIGN_OR_RETURN(IdentityPtr caller, CheckCaller(context, scope));
    CERTKV_RETURN_IF_ERROR(CheckOpen());
    if (session != SessionId{}) CERTKV_RETURN_IF_ERROR(CheckSession(*caller, session));
    return caller;
  }
  // The same for a call that is answered while the store opens.
  absl::StatusOr<IdentityPtr> CheckCaller(const grpc::CallbackServerContext& context,
                                          Scope scope) const {
    const grpc::Status deadline = RequireDeadline(context, kDomain);
    if (!deadline.ok()) return FromGrpcStatus(deadline);
    CERTKV_ASSIGN_OR_RETURN(IdentityPtr caller, Admit(access_, context, scope));
    if (is_draining_.load()) return Stopping();
    return caller;
  }
  absl::Status CheckOpen() const {
    return is_open_.load() ? absl::OkStatus() : Opening(engine_->GetSpillStats().progress);
  }
  absl::Status CheckSession(const Identity& caller, SessionId session) const {
    if (caller.any_tenant) return absl::OkStatus();
    return engine_->CheckSessionTenant(
        session, [&caller](absl::string_view tenant) { return caller.MayUse(tenant); });
  }
  // Cache 0 is all.
  absl::Status CheckCache(const Identity& caller, CacheId cache) const {
    if (caller.any_tenant) return absl::OkStatus();
    if (cache == CacheId{}) return caller.CheckAllTenants("a call about every cache");
    return engine_->CheckCacheTenant(
        cache, [&caller](absl::string_view tenant) { return caller.MayUse(tenant); });
  }
  absl::Status CheckWatch(const grpc::CallbackServerContext& context, CacheId cache) const {
    CERTKV_ASSIGN_OR_RETURN(const IdentityPtr caller, Admit(access_, context, Scope::kRead));
    if (is_draining_.load()) return Stopping();
    CERTKV_RETURN_IF_ERROR(CheckOpen());
    CERTKV_RETURN_IF_ERROR(CheckCache(*caller, cache));
    return cache == CacheId{} ? absl::OkStatus() : engine_->CheckCache(cache);
  }

  static grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor,
                                          const absl::Status& status) {
    reactor->Finish(ToGrpcStatus(status, kDomain));
    return reactor;
  }

  // For calls that end at once.
  template <typename Call>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, Scope scope,
                                   SessionId session, const Call& call) {
    const absl::StatusOr<IdentityPtr> caller = CheckCall(*context, scope, session);
    const absl::Status status = caller.ok() ? call(**caller) : caller.status();
    return Finish(context->DefaultReactor(), status);
  }

  // Answers a lookup; first goes on at other nodes, where there are some and blocks are missing.
  grpc::ServerUnaryReactor* FinishLookup(grpc::ServerUnaryReactor* reactor, SessionId session,
                                         std::vector<BlockKey> keys, int64_t duration_ms,
                                         const absl::StatusOr<LeasedBlocks>& leased,
                                         v1::LookupAndLeaseResponse* response) {
    if (remote_.link == nullptr || !leased.ok() || leased->blocks.size() == keys.size()) {
      return Finish(reactor, LookupToProto(leased, response));
    }
    RemoteLookup::Start(remote_, session, std::move(keys), duration_ms, *leased,
                        [reactor, response](const absl::StatusOr<LeasedBlocks>& found) {
                          Finish(reactor, LookupToProto(found, response));
                        });
    return reactor;
  }

  // For calls that compute. `undo` runs instead where nobody waits for the answer any more, or the
  // pool is full.
  grpc::ServerUnaryReactor* Compute(
      grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor,
      std::function<absl::Status()> call, const std::function<void()>& undo = [] {}) {
    return ComputeAndFinish(
        context, reactor, [reactor, call = std::move(call)] { Finish(reactor, call()); }, undo);
  }
  // The same for a call that finishes the reactor itself.
  grpc::ServerUnaryReactor* ComputeAndFinish(
      grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor,
      std::function<void()> call, const std::function<void()>& undo = [] {}) {
    const bool is_posted = pool_->TryPost([context, reactor, call = std::move(call), undo] {
      if (!context->IsCancelled()) {
        call();
        return;
      }
      undo();
      reactor->Finish(grpc::Status::CANCELLED);
    });
    if (is_posted) return reactor;
    undo();
    return Finish(
        reactor,
        WithRetryDelay(MakeError(absl::StatusCode::kResourceExhausted, "SEAL_QUEUE_FULL",
                                 "too many calls wait to seal, promote or check blocks; retry "
                                 "after some have ended, or raise seal_threads or "
                                 "seal_queue_limit"),
                       pool_->WaitEstimateMs()));
  }

  absl::Status LeasePulled(const PullResult& pulled, const v1::PullBlocksRequest& request,
                           v1::PullBlocksResponse* response) {
    CERTKV_ASSIGN_OR_RETURN(const std::vector<BlockKey> keys,
                            BlockKeysFromProto(request.block_keys()));
    CERTKV_ASSIGN_OR_RETURN(const LeasedBlocks leased,
                            engine_->LookupAndLease(SessionId{request.session_id()}, keys,
                                                    request.lease_duration_ms()));
    FillLeased(leased, response->mutable_blocks());
    response->set_lease_id(static_cast<int64_t>(leased.lease));
    response->set_expire_time_ms(leased.expire_time_ms);
    response->set_pulled_count(pulled.pulled_count);
    response->set_pulled_bytes(pulled.pulled_bytes);
    return absl::OkStatus();
  }

  // The slots of a seal that is refused before it reaches the engine are freed all the same.
  void AbortNamedSlots(const v1::SealBlocksRequest& request) {
    std::vector<int32_t> slots;
    for (const v1::SealEntry& entry : request.entries()) slots.push_back(entry.staging_slot());
    engine_->AbortBlocks(SessionId{request.session_id()}, slots).IgnoreError();
  }

  StoreEngine* const engine_;
  ComputePool* const pool_;
  const AccessControl* const access_;  // null: everybody may call
  const std::string fd_socket_;
  BulkPlane* bulk_ = nullptr;
  RemoteLookup::Dependencies remote_;  // without a link: this store stands alone
  std::atomic<bool> is_draining_{false};
  std::atomic<bool> is_open_{false};
};

}  // namespace

std::unique_ptr<StoreCalls> MakeStoreCalls(StoreEngine* engine, ComputePool* pool,
                                           const AccessControl* access, std::string fd_socket) {
  return std::make_unique<CheckedCalls>(engine, pool, access, std::move(fd_socket));
}

}  // namespace certkv::kvstore
