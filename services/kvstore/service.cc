#include "services/kvstore/service.h"

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <thread>

#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/kvstore/bulk_plane.h"
#include "services/kvstore/cluster_link.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/device_place.h"
#include "services/kvstore/fd_server.h"
#include "services/kvstore/metrics.h"
#include "services/kvstore/nccl_plane.h"
#include "services/kvstore/periodic_job.h"
#include "services/kvstore/scrubber.h"
#include "services/kvstore/service_calls.h"
#include "services/kvstore/service_links.h"
#include "services/kvstore/service_rendezvous.h"
#include "services/kvstore/spill_open.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/ticker.h"

namespace certkv {
namespace kvstore {
namespace {

// Connections to the descriptor socket beside those of attached sessions.
constexpr int32_t kSpareConnections = 64;

int32_t SealThreads(const KvStoreConfig& config) {
  if (config.seal_threads > 0) return config.seal_threads;
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

// Once, where the config leaves it open or asks for it.
void LogDevice(const KvStoreConfig& config, const DevicePlace& device) {
  if (config.device == DeviceChoice::kHost) return;
  if (device.runtime == nullptr) {
    Log(LogLevel::kWarning, "device_tier_on_host_alone", {{"why", config.device_error.message()}});
  } else {
    Log(LogLevel::kInfo, "device_tier_copied",
        {{"device", device.device.device}, {"name", device.device.name}});
  }
}

}  // namespace
}  // namespace kvstore

class KvStoreServer::Impl {
 public:
  Impl(const KvStoreConfig& config, const Clock* clock, boost::asio::io_context* io_context,
       std::unique_ptr<kvstore::SpillTier> spill_tier, const AccessControl* access,
       const kvstore::DevicePlace& device)
      : fd_socket(config.fd_socket.empty() ? DefaultFdSocket() : config.fd_socket),
        pool(kvstore::SealThreads(config), config.seal_queue_limit),
        spill(std::move(spill_tier)),
        engine(config, clock, &pool, spill.get(), device),
        calls(kvstore::MakeStoreCalls(&engine, &pool, access, fd_socket)),
        ticker(std::make_shared<kvstore::Ticker>(&engine, io_context)),
        scrubber(&engine, config.scrub_bytes_per_second) {
    if (spill != nullptr) loader.emplace(spill.get(), config.spill_directory, clock);
    StartJob(io_context, kWatermarkInterval, [this] { engine.KeepWatermarks(); });
    if (device.runtime != nullptr) {
      StartJob(io_context, kDeviceInterval, [this] { LogDeviceErrors(); });
    }
    if (config.scrub_bytes_per_second > 0) {
      StartJob(io_context, kvstore::Scrubber::kInterval, [this] { scrubber.Run(); });
    }
    if (spill == nullptr) return;
    StartJob(io_context, kPrefetchInterval, [this] {
      for (int i = 0; i < kPrefetchesPerJob && engine.Prefetch(); ++i) {
      }
    });
    StartJob(io_context, kSpillInterval, [this] {
      engine.SpillAhead();
      spill->Expire();
      LogSpillState();
    });
  }

  ~Impl() {
    loader.reset();
    if (nccl != nullptr) nccl->Stop();  // pulls of the bulk plane wait for it
    bulk.reset();
    nccl.reset();
    link.reset();
    ticker->Stop();
    for (const auto& job : jobs) job->Stop();
    fd_server.reset();
    engine.SpillAll();
    pool.Join();
    LogDeviceErrors();  // what came after the last job
  }

  void StartJob(boost::asio::io_context* io_context, std::chrono::milliseconds interval,
                std::function<void()> run) {
    jobs.push_back(
        std::make_shared<kvstore::PeriodicJob>(&pool, io_context, interval, std::move(run)));
    jobs.back()->Start();
  }

  // Serves as soon as the tier on disk is there; says so once.
  void Open() {
    if (!loader.has_value()) {
      calls->Open();
      return;
    }
    loader->WhenLoaded([this] { calls->Open(); });
    loader->WaitUntilLoaded(kOpenWait);
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

  // Says once of each cache that a GPU has no copy of it, or not any more, and that blocks which
  // were to be sealed there are sealed on the host. Called by one job, and after it.
  void LogDeviceErrors() {
    for (const kvstore::CacheStats& cache : engine.GetStats().caches) {
      if (!cache.device_staging_error.ok() &&
          device_staging_errors_said.insert(cache.cache).second) {
        Log(LogLevel::kWarning, "device_sealing_fell_to_host",
            {{"cache", ToHex(cache.digest.view(), 8)},
             {"why", cache.device_staging_error.ToString()}});
      }
      if (cache.device_error.ok() || !device_errors_said.insert(cache.cache).second) continue;
      Log(LogLevel::kError, "device_copy_failed",
          {{"cache", ToHex(cache.digest.view(), 8)}, {"why", cache.device_error.ToString()}});
    }
  }

  // A store that opens in less serves as soon as it listens.
  static constexpr absl::Duration kOpenWait = absl::Milliseconds(500);
  static constexpr std::chrono::milliseconds kSpillInterval{200};
  static constexpr std::chrono::milliseconds kWatermarkInterval{50};
  static constexpr std::chrono::milliseconds kDeviceInterval{500};
  static constexpr std::chrono::milliseconds kPrefetchInterval{10};
  static constexpr int kPrefetchesPerJob = 8;  // batches, so that a stop does not wait for many

  const std::string fd_socket;
  kvstore::ComputePool pool;
  const std::unique_ptr<kvstore::SpillTier> spill;  // null: none
  kvstore::StoreEngine engine;
  const std::unique_ptr<kvstore::StoreCalls> calls;
  const std::shared_ptr<kvstore::Ticker> ticker;
  kvstore::Scrubber scrubber;
  std::string spill_error_said;
  std::set<CacheId> device_errors_said;
  std::set<CacheId> device_staging_errors_said;
  std::vector<std::shared_ptr<kvstore::PeriodicJob>> jobs;
  std::unique_ptr<kvstore::FdServer> fd_server;
  std::optional<kvstore::SpillLoader> loader;
  std::unique_ptr<kvstore::NcclPlane> nccl;
  std::unique_ptr<kvstore::v1::StoreLinks::CallbackService> links;
  std::unique_ptr<kvstore::BulkPlane> bulk;
  std::unique_ptr<kvstore::ClusterLink> link;  // null: this store stands alone
};

absl::StatusOr<std::unique_ptr<KvStoreServer>> KvStoreServer::Create(
    const KvStoreConfig& config, const Clock* clock, boost::asio::io_context* io_context,
    const AccessControl* access) {
  CERTKV_ASSIGN_OR_RETURN(auto spill, kvstore::OpenSpill(config, clock));
  return CreateOn(std::move(spill), config, clock, io_context, access);
}

absl::StatusOr<std::unique_ptr<KvStoreServer>> KvStoreServer::CreateOn(
    std::unique_ptr<kvstore::SpillTier> spill, const KvStoreConfig& config, const Clock* clock,
    boost::asio::io_context* io_context, const AccessControl* access) {
  CERTKV_ASSIGN_OR_RETURN(const kvstore::DevicePlace device, kvstore::ChooseDevice(config));
  kvstore::LogDevice(config, device);
  auto impl = std::make_unique<Impl>(config, clock, io_context, std::move(spill), access, device);
  CERTKV_ASSIGN_OR_RETURN(
      impl->fd_server,
      kvstore::FdServer::Create({impl->fd_socket, config.session_limit + kvstore::kSpareConnections,
                                 access == nullptr ? OwnUserOnly() : access->unix_peers()},
                                &impl->engine, io_context));
  kvstore::NcclPlane::Dependencies nccl;
  nccl.engine = &impl->engine;
  nccl.clock = clock;
  nccl.place = device;
  nccl.no_device = config.device_error;
  nccl.lease_ms_max = config.lease_duration_max_ms;
  nccl.rendezvous = kvstore::MakeGrpcRendezvous(config.bulk);
  CERTKV_ASSIGN_OR_RETURN(impl->nccl, kvstore::NcclPlane::Create(config.nccl, std::move(nccl)));
  impl->links = kvstore::MakeLinkCalls(
      {impl->nccl.get(), access, [calls = impl->calls.get()] { return calls->CheckServing(); }});
  kvstore::BulkPlane::Dependencies bulk;
  bulk.detour = impl->nccl->detour();
  bulk.engine = &impl->engine;
  bulk.pool = &impl->pool;
  bulk.access = access;
  bulk.clock = clock;
  bulk.lease_ms_max = config.lease_duration_max_ms;
  bulk.check_serving = [calls = impl->calls.get()] { return calls->CheckServing(); };
  CERTKV_ASSIGN_OR_RETURN(impl->bulk, kvstore::BulkPlane::Create(config.bulk, bulk));
  impl->calls->SetBulkPlane(impl->bulk.get());
  if (config.cluster.is_on()) {
    CERTKV_ASSIGN_OR_RETURN(impl->link, kvstore::ClusterLink::Create(config.cluster, clock));
    impl->calls->SetCluster(impl->link.get(), io_context);
  }
  impl->ticker->Start();
  impl->Open();
  return std::unique_ptr<KvStoreServer>(new KvStoreServer(std::move(impl)));
}

KvStoreServer::KvStoreServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

KvStoreServer::~KvStoreServer() = default;

std::vector<grpc::Service*> KvStoreServer::grpc_services() {
  return {impl_->calls.get(), impl_->links.get()};
}

void KvStoreServer::WhenReady(std::function<void()> ready) {
  if (!impl_->loader.has_value()) return ready();
  impl_->loader->WhenLoaded(std::move(ready));
}

const std::string& KvStoreServer::fd_socket() const { return impl_->fd_socket; }

absl::Span<const MetricInfo> KvStoreServer::MetricInfos() { return kvstore::StoreMetricInfos(); }

void KvStoreServer::CollectMetrics(MetricSink* sink) {
  kvstore::CollectStoreMetrics(impl_->engine.GetStats(), sink);
  kvstore::CollectBulkMetrics(impl_->bulk->counters(), sink);
  if (impl_->nccl->is_on()) kvstore::CollectNcclMetrics(impl_->nccl->counters(), sink);
  if (impl_->link != nullptr) kvstore::CollectClusterMetrics(*impl_->link, sink);
}

void KvStoreServer::Drain() {
  impl_->calls->Drain();
  impl_->nccl->Stop();
  impl_->bulk->Stop();
  impl_->engine.events()->CloseAll();
}

}  // namespace certkv
