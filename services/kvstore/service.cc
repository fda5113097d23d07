#include "services/kvstore/service.h"

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/convert.h"
#include "services/kvstore/fd_server.h"
#include "services/kvstore/metrics.h"
#include "services/kvstore/periodic_job.h"
#include "services/kvstore/scrubber.h"
#include "services/kvstore/service_watch.h"
#include "services/kvstore/spill_open.h"
#include "services/kvstore/store_engine.h"

namespace certkv {
namespace kvstore {
namespace {

// Connections to the descriptor socket beside those of attached sessions.
constexpr int32_t kSpareConnections = 64;
constexpr absl::string_view kDomain = "kvstore.certkv";
// How late a lease that nobody asks about expires at most.
constexpr std::chrono::milliseconds kTickInterval(50);

int32_t SealThreads(const KvStoreConfig& config) {
  if (config.seal_threads > 0) return config.seal_threads;
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

absl::Status Stopping() {
  return MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                   "the store is stopping; retry when it is back");
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
class KvStoreService final : public v1::KvStore::CallbackService {
 public:
  KvStoreService(StoreEngine* engine, ComputePool* pool, std::string fd_socket)
      : engine_(engine), pool_(pool), fd_socket_(std::move(fd_socket)) {}

  void Drain() { is_draining_.store(true); }

  grpc::ServerUnaryReactor* RegisterCache(grpc::CallbackServerContext* context,
                                          const v1::RegisterCacheRequest* request,
                                          v1::RegisterCacheResponse* response) override {
    return Answer(context, [&]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(const CacheSpec spec, CacheSpecFromProto(request->spec()));
      CERTKV_ASSIGN_OR_RETURN(const RegisteredCache cache, engine_->RegisterCache(spec));
      response->set_cache_id(static_cast<int64_t>(cache.cache));
      response->set_spec_digest(std::string(cache.digest.view()));
      response->set_device_slot_count(cache.device_slot_count);
      response->set_backing_slot_count(cache.backing_slot_count);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* AttachWorker(grpc::CallbackServerContext* context,
                                         const v1::AttachWorkerRequest* request,
                                         v1::AttachWorkerResponse* response) override {
    return Answer(context, [&]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(const AttachRequest attach, AttachRequestFromProto(*request));
      CERTKV_ASSIGN_OR_RETURN(const AttachedSession attached, engine_->AttachWorker(attach));
      response->set_session_id(static_cast<int64_t>(attached.session));
      response->set_fd_token(attached.fd_token);
      response->set_fd_socket(fd_socket_);
      response->set_staging_slot_count(attached.staging_slot_count);
      response->set_staging_id(attached.staging_id);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* DetachWorker(grpc::CallbackServerContext* context,
                                         const v1::DetachWorkerRequest* request,
                                         v1::DetachWorkerResponse* /*response*/) override {
    return Answer(context, [&] {
      engine_->EndSession(SessionId{request->session_id()}, "it was detached");
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* LookupAndLease(grpc::CallbackServerContext* context,
                                           const v1::LookupAndLeaseRequest* request,
                                           v1::LookupAndLeaseResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<std::vector<BlockKey>> keys = BlockKeysFromProto(request->block_keys());
    absl::Status status = CheckCall(*context);
    if (status.ok()) status = keys.status();
    if (!status.ok()) return Finish(reactor, status);
    const SessionId session{request->session_id()};
    const int64_t duration_ms = request->lease_duration_ms();
    const auto leased = engine_->TryLookupAndLease(session, *keys, duration_ms);
    if (leased.has_value()) return Finish(reactor, LookupToProto(*leased, response));
    return Compute(context, reactor, [=, this, keys = *std::move(keys)] {
      return LookupToProto(engine_->LookupAndLease(session, keys, duration_ms), response);
    });
  }

  grpc::ServerUnaryReactor* ReserveBlocks(grpc::CallbackServerContext* context,
                                          const v1::ReserveBlocksRequest* request,
                                          v1::ReserveBlocksResponse* response) override {
    return Answer(context, [&]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(
          const std::vector<int32_t> slots,
          engine_->ReserveBlocks(SessionId{request->session_id()}, request->block_count()));
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
    absl::Status status = CheckCall(*context);
    if (status.ok()) status = entries.status();
    if (status.ok()) status = options.status();
    if (!status.ok()) {
      AbortNamedSlots(*request);
      return Finish(reactor, status);
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
    return Answer(context, [&] {
      return engine_->AbortBlocks(SessionId{request->session_id()}, request->staging_slots());
    });
  }

  grpc::ServerUnaryReactor* RenewLease(grpc::CallbackServerContext* context,
                                       const v1::RenewLeaseRequest* request,
                                       v1::RenewLeaseResponse* response) override {
    return Answer(context, [&]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(
          const int64_t expire_time_ms,
          engine_->RenewLease(SessionId{request->session_id()}, LeaseId{request->lease_id()},
                              request->lease_duration_ms()));
      response->set_expire_time_ms(expire_time_ms);
      return absl::OkStatus();
    });
  }

  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* context,
                                         const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseResponse* /*response*/) override {
    return Answer(context, [&] {
      return engine_->ReleaseLease(SessionId{request->session_id()}, LeaseId{request->lease_id()});
    });
  }

  grpc::ServerUnaryReactor* PinBlocks(grpc::CallbackServerContext* context,
                                      const v1::PinBlocksRequest* request,
                                      v1::PinBlocksResponse* /*response*/) override {
    return Answer(context, [&]() -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(const auto keys, BlockKeysFromProto(request->block_keys()));
      return engine_->PinBlocks(SessionId{request->session_id()}, keys, request->pinned(),
                                request->ttl_ms());
    });
  }

  grpc::ServerUnaryReactor* DropBlocks(grpc::CallbackServerContext* context,
                                       const v1::DropBlocksRequest* request,
                                       v1::DropBlocksResponse* response) override {
    return Answer(context, [&]() -> absl::Status {
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
    absl::Status status = CheckCall(*context);
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

  grpc::ServerUnaryReactor* GetBlock(grpc::CallbackServerContext* context,
                                     const v1::GetBlockRequest* request,
                                     v1::Block* response) override {
    return Answer(context, [&]() -> absl::Status {
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
    return Answer(context, [&]() -> absl::Status {
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
    return Answer(context, [&] {
      StatsToProto(engine_->GetStats(), response);
      return absl::OkStatus();
    });
  }

  grpc::ServerWriteReactor<v1::BlockEvent>* WatchBlockEvents(
      grpc::CallbackServerContext* /*context*/,
      const v1::WatchBlockEventsRequest* request) override {
    const CacheId cache{request->cache_id()};
    const absl::Status status = is_draining_.load()  ? Stopping()
                                : cache == CacheId{} ? absl::OkStatus()
                                                     : engine_->CheckCache(cache);
    return StartWatch(status, engine_->events(), cache, kDomain);
  }

 private:
  absl::Status CheckCall(const grpc::CallbackServerContext& context) const {
    const grpc::Status deadline = RequireDeadline(context, kDomain);
    if (!deadline.ok()) return FromGrpcStatus(deadline);
    return is_draining_.load() ? Stopping() : absl::OkStatus();
  }

  static grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor,
                                          const absl::Status& status) {
    reactor->Finish(ToGrpcStatus(status, kDomain));
    return reactor;
  }

  // For calls that end at once.
  template <typename Call>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const Call& call) {
    absl::Status status = CheckCall(*context);
    if (status.ok()) status = call();
    return Finish(context->DefaultReactor(), status);
  }

  // For calls that compute. `undo` runs instead where nobody waits for the answer any more, or the
  // pool is full.
  grpc::ServerUnaryReactor* Compute(
      grpc::CallbackServerContext* context, grpc::ServerUnaryReactor* reactor,
      std::function<absl::Status()> call, const std::function<void()>& undo = [] {}) {
    const bool is_posted = pool_->TryPost([context, reactor, call = std::move(call), undo] {
      if (!context->IsCancelled()) {
        Finish(reactor, call());
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

  // The slots of a seal that is refused before it reaches the engine are freed all the same.
  void AbortNamedSlots(const v1::SealBlocksRequest& request) {
    std::vector<int32_t> slots;
    for (const v1::SealEntry& entry : request.entries()) slots.push_back(entry.staging_slot());
    engine_->AbortBlocks(SessionId{request.session_id()}, slots).IgnoreError();
  }

  StoreEngine* const engine_;
  ComputePool* const pool_;
  const std::string fd_socket_;
  std::atomic<bool> is_draining_{false};
};

// Calls the engine's Tick() until it is stopped.
class Ticker : public std::enable_shared_from_this<Ticker> {
 public:
  Ticker(StoreEngine* engine, boost::asio::io_context* io_context)
      : timer_(*io_context), engine_(engine) {}

  void Start() {
    absl::MutexLock lock(&mutex_);
    Wait();
  }
  // No Tick() runs after it.
  void Stop() {
    absl::MutexLock lock(&mutex_);
    engine_ = nullptr;
    timer_.cancel();
  }

 private:
  void Wait() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    timer_.expires_after(kTickInterval);
    timer_.async_wait([self = shared_from_this()](const boost::system::error_code& /*error*/) {
      absl::MutexLock lock(&self->mutex_);
      if (self->engine_ == nullptr) return;
      self->engine_->Tick();
      self->Wait();
    });
  }

  absl::Mutex mutex_;
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(mutex_);
  StoreEngine* engine_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace
}  // namespace kvstore

class KvStoreServer::Impl {
 public:
  Impl(const KvStoreConfig& config, const Clock* clock, boost::asio::io_context* io_context,
       std::unique_ptr<kvstore::SpillTier> spill_tier)
      : fd_socket(config.fd_socket.empty() ? DefaultFdSocket() : config.fd_socket),
        pool(kvstore::SealThreads(config), config.seal_queue_limit),
        spill(std::move(spill_tier)),
        engine(config, clock, &pool, spill.get()),
        service(&engine, &pool, fd_socket),
        ticker(std::make_shared<kvstore::Ticker>(&engine, io_context)),
        scrubber(&engine, config.scrub_bytes_per_second) {
    StartJob(io_context, kWatermarkInterval, [this] { engine.KeepWatermarks(); });
    if (config.scrub_bytes_per_second > 0) {
      StartJob(io_context, kvstore::Scrubber::kInterval, [this] { scrubber.Run(); });
    }
    if (spill == nullptr) return;
    StartJob(io_context, kSpillInterval, [this] {
      engine.SpillAhead();
      spill->Expire();
      LogSpillState();
    });
  }

  ~Impl() {
    ticker->Stop();
    for (const auto& job : jobs) job->Stop();
    fd_server.reset();
    engine.SpillAll();
    pool.Join();
  }

  void StartJob(boost::asio::io_context* io_context, std::chrono::milliseconds interval,
                std::function<void()> run) {
    jobs.push_back(
        std::make_shared<kvstore::PeriodicJob>(&pool, io_context, interval, std::move(run)));
    jobs.back()->Start();
  }

  // Says when the disk begins to fail or to be slow, and when it works again. Called by one job.
  void LogSpillState() {
    const kvstore::SpillStats stats = spill->GetStats();
    const std::string error =
        stats.error.empty() && stats.degraded ? "reads or writes take over a second" : stats.error;
    if (error == spill_error_said) return;
    spill_error_said = error;
    if (error.empty()) {
      Log(LogLevel::kInfo, "spill_works");
    } else {
      Log(LogLevel::kError, "spill_failing", {{"why", error}});
    }
  }

  static constexpr std::chrono::milliseconds kSpillInterval{200};
  static constexpr std::chrono::milliseconds kWatermarkInterval{50};

  const std::string fd_socket;
  kvstore::ComputePool pool;
  const std::unique_ptr<kvstore::SpillTier> spill;  // null: none
  kvstore::StoreEngine engine;
  kvstore::KvStoreService service;
  const std::shared_ptr<kvstore::Ticker> ticker;
  kvstore::Scrubber scrubber;
  std::string spill_error_said;
  std::vector<std::shared_ptr<kvstore::PeriodicJob>> jobs;
  std::unique_ptr<kvstore::FdServer> fd_server;
};

absl::StatusOr<std::unique_ptr<KvStoreServer>> KvStoreServer::Create(
    const KvStoreConfig& config, const Clock* clock, boost::asio::io_context* io_context) {
  CERTKV_ASSIGN_OR_RETURN(auto spill, kvstore::OpenSpill(config, clock));
  auto impl = std::make_unique<Impl>(config, clock, io_context, std::move(spill));
  CERTKV_ASSIGN_OR_RETURN(impl->fd_server,
                          kvstore::FdServer::Create(
                              {impl->fd_socket, config.session_limit + kvstore::kSpareConnections},
                              &impl->engine, io_context));
  impl->ticker->Start();
  return std::unique_ptr<KvStoreServer>(new KvStoreServer(std::move(impl)));
}

KvStoreServer::KvStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

KvStoreServer::~KvStoreServer() = default;

std::vector<grpc::Service*> KvStoreServer::grpc_services() { return {&impl_->service}; }

const std::string& KvStoreServer::fd_socket() const { return impl_->fd_socket; }

absl::Span<const MetricInfo> KvStoreServer::MetricInfos() { return kvstore::StoreMetricInfos(); }

void KvStoreServer::CollectMetrics(MetricSink* sink) {
  kvstore::CollectStoreMetrics(impl_->engine.GetStats(), sink);
}

void KvStoreServer::Drain() {
  impl_->service.Drain();
  impl_->engine.events()->CloseAll();
}

}  // namespace certkv
