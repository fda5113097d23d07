#include "services/certifier/service.h"

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "kernels/core/status.h"
#include "services/certifier/convert.h"
#include "services/certifier/metrics.h"
#include "services/certifier/read_batch.h"
#include "services/certifier/service_attend.h"
#include "services/certifier/store_client.h"
#include "services/certifier/view_table.h"
#include "services/common/call_trace.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/common/random_id.h"

namespace certkv {

namespace v1 = certifier::v1;

// Everything of the server. Kept alive by its timer and by calls that wait for the store.
class CertifierServer::Core final : public v1::Certifier::CallbackService,
                                    public std::enable_shared_from_this<CertifierServer::Core> {
 public:
  Core(const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context,
       std::unique_ptr<certifier::CacheProvider> provider, certifier::ReadKernels kernels,
       const AccessControl* access);

  void StartTimer();
  void Stop();
  void Drain();
  void LogCounters();
  // Says once of each reason that the host runs what a GPU was to. Called by the timer, and in the
  // end.
  void LogDeviceFallbacks() ABSL_LOCKS_EXCLUDED(said_mutex_);
  const certifier::CertifierCounters& counters() const { return counters_; }
  void CollectMetrics(MetricSink* sink) const {
    certifier::CollectCertifierMetrics(counters_, views_.size(), budgets_.size(), sink);
  }

  grpc::ServerUnaryReactor* OpenView(grpc::CallbackServerContext* context,
                                     const v1::OpenViewRequest* request,
                                     v1::OpenViewResponse* response) override;
  grpc::ServerUnaryReactor* UpdateView(grpc::CallbackServerContext* context,
                                       const v1::UpdateViewRequest* request,
                                       v1::UpdateViewResponse* response) override;
  grpc::ServerUnaryReactor* CloseView(grpc::CallbackServerContext* context,
                                      const v1::CloseViewRequest* request,
                                      v1::CloseViewResponse* response) override;
  grpc::ServerUnaryReactor* Certify(grpc::CallbackServerContext* context,
                                    const v1::CertifyRequest* request,
                                    v1::CertifyResponse* response) override;
  grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse>* Attend(
      grpc::CallbackServerContext* context) override;

 private:
  using Acquired = absl::StatusOr<certifier::AcquiredCache>;

  // Before anything else of a unary call.
  absl::StatusOr<IdentityPtr> CheckCall(const grpc::CallbackServerContext& context) const;
  // A view that the caller may not use is as one that is not there.
  absl::StatusOr<std::shared_ptr<certifier::View>> FindView(ViewId id,
                                                            const Identity& caller) const;
  grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor, const absl::Status& status);

  absl::Status CreateView(const v1::OpenViewRequest& request, const std::string& tenant,
                          const PolicyLease& policy, const std::vector<BlockHandle>& blocks,
                          const Acquired& acquired, v1::OpenViewResponse* response);
  absl::Status ApplyUpdate(const v1::UpdateViewRequest& request,
                           const std::vector<BlockHandle>& blocks, certifier::View* view,
                           const Acquired& acquired);
  void ReserveFor(const certifier::View& view);

  const CertifierConfig config_;
  const AccessControl* const access_;  // null: everybody may call
  const Clock* const clock_;
  boost::asio::io_context* const io_context_;
  certifier::CertifierCounters counters_;
  const certifier::ReadEngine engine_;
  certifier::BudgetBook budgets_;
  certifier::ViewTable views_;
  certifier::WorkspacePool workspaces_;
  certifier::BatchRunner runner_;
  certifier::AttendStreamSet streams_;
  boost::asio::steady_timer timer_;
  absl::Mutex said_mutex_;
  std::set<std::string> device_fallbacks_said_ ABSL_GUARDED_BY(said_mutex_);
  std::atomic<bool> stopped_{false};
  std::atomic<bool> draining_{false};
  // Declared last: its threads may call back into everything above until it is destroyed.
  std::unique_ptr<certifier::CacheProvider> provider_;
};

namespace {

// How often idle views are looked for.
constexpr std::chrono::milliseconds kTickInterval(1000);

int32_t ReadThreads(const CertifierConfig& config) {
  if (config.read_threads > 0) return config.read_threads;
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

// Null: the host reads. Says once where the config leaves it open and there is no GPU.
absl::StatusOr<DeviceRuntime*> ChooseDevice(const CertifierConfig& config) {
  if (config.device == DeviceChoice::kHost) return nullptr;
  DeviceRuntime* const runtime = RegisteredDeviceRuntime();
  if (runtime != nullptr) return runtime;
  if (config.device == DeviceChoice::kAuto) {
    Log(LogLevel::kWarning, "reads_on_host_alone", {{"why", config.device_error.message()}});
    return nullptr;
  }
  if (!config.device_error.ok()) return config.device_error;
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                   "certifier.device is cuda, and this program has no devices; set device: host");
}

}  // namespace

CertifierServer::Core::Core(const CertifierConfig& config, const Clock* clock,
                            boost::asio::io_context* io_context,
                            std::unique_ptr<certifier::CacheProvider> provider,
                            certifier::ReadKernels kernels, const AccessControl* access)
    : config_(config),
      access_(access),
      clock_(clock),
      io_context_(io_context),
      engine_(std::move(kernels), &counters_),
      budgets_(config.budget_limit),
      views_(config.view_limit),
      workspaces_(ReadThreads(config)),
      runner_(&engine_, &views_, &workspaces_, &counters_, clock, io_context, ReadThreads(config)),
      streams_(config.stream_limit),
      timer_(*io_context),
      provider_(std::move(provider)) {}

void CertifierServer::Core::StartTimer() {
  timer_.expires_after(kTickInterval);
  timer_.async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
    const auto core = weak.lock();
    if (error || core == nullptr || core->stopped_) return;
    const int32_t closed =
        core->views_.EraseIdle(core->clock_->NowMs() - core->config_.view_idle_ms);
    if (closed > 0) {
      Log(LogLevel::kInfo, "views_closed", {{"views", closed}, {"why", "idle or store lost"}});
    }
    core->LogDeviceFallbacks();
    core->StartTimer();
  });
}

void CertifierServer::Core::LogDeviceFallbacks() {
  absl::MutexLock lock(&said_mutex_);
  for (const auto& [reason, count] : counters_.DeviceFallbacksByReason()) {
    if (!device_fallbacks_said_.insert(reason).second) continue;
    Log(LogLevel::kWarning, "device_pass_run_by_host", {{"reason", reason}, {"passes", count}});
  }
}

void CertifierServer::Core::Stop() {
  stopped_ = true;
  provider_.reset();
}

void CertifierServer::Core::Drain() {
  draining_ = true;
  streams_.DrainAll();
}

void CertifierServer::Core::LogCounters() {
  const auto by_rung = [this](Rung rung) {
    return counters_.heads_by_rung[static_cast<int>(rung)].load();
  };
  std::string errors;
  for (const auto& [reason, count] : counters_.ErrorsByReason()) {
    absl::StrAppend(&errors, errors.empty() ? "" : ",", reason, ":", count);
  }
  Log(LogLevel::kInfo, "certifier_counters",
      {{"reads", counters_.reads.load()},
       {"failed_reads", counters_.failed_reads.load()},
       {"heads_certified_first", by_rung(Rung::kNone)},
       {"heads_values", by_rung(Rung::kValues)},
       {"heads_keys", by_rung(Rung::kKeys)},
       {"heads_head", by_rung(Rung::kHead)},
       {"heads_layer", by_rung(Rung::kLayer)},
       {"repair_bytes", counters_.repair_bytes.load()},
       {"attend_passes", counters_.attend_passes.load()},
       {"device_passes", counters_.device_passes.load()},
       {"slow_finishes", counters_.slow_finishes.load()},
       {"skipping_heads", counters_.skipping_heads.load()},
       {"skip_misses", counters_.skip_misses.load()},
       {"unskippable_heads", counters_.unskippable_heads.load()},
       {"read_tokens", counters_.read_tokens.load()},
       {"skipped_tokens", counters_.skipped_tokens.load()},
       {"read_bytes", counters_.read_bytes.load()},
       {"errors", errors}});
}

absl::StatusOr<IdentityPtr> CertifierServer::Core::CheckCall(
    const grpc::CallbackServerContext& context) const {
  CERTKV_RETURN_IF_ERROR(FromGrpcStatus(RequireDeadline(context, certifier::kErrorDomain)));
  return Admit(access_, context, Scope::kRead);
}

absl::StatusOr<std::shared_ptr<certifier::View>> CertifierServer::Core::FindView(
    ViewId id, const Identity& caller) const {
  CERTKV_ASSIGN_OR_RETURN(std::shared_ptr<certifier::View> view, views_.Find(id));
  if (!caller.MayUse(view->tenant())) return certifier::ViewTable::NotFound(id);
  return view;
}

grpc::ServerUnaryReactor* CertifierServer::Core::Finish(grpc::ServerUnaryReactor* reactor,
                                                        const absl::Status& status) {
  reactor->Finish(ToGrpcStatus(status, certifier::kErrorDomain));
  return reactor;
}

grpc::ServerUnaryReactor* CertifierServer::Core::OpenView(grpc::CallbackServerContext* context,
                                                          const v1::OpenViewRequest* request,
                                                          v1::OpenViewResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<IdentityPtr> caller = CheckCall(*context);
  if (!caller.ok()) return Finish(reactor, caller.status());
  if (draining_) return Finish(reactor, certifier::DrainingError());
  const absl::StatusOr<std::string> tenant = (*caller)->ResolveTenant(request->tenant());
  if (!tenant.ok()) return Finish(reactor, tenant.status());
  const absl::StatusOr<SpecDigest> digest = SpecDigestFromBytes(request->spec_digest());
  if (!digest.ok()) return Finish(reactor, digest.status());
  absl::StatusOr<PolicyLease> policy = PolicyLeaseFromProto(request->policy(), clock_->NowMs());
  if (!policy.ok()) return Finish(reactor, policy.status());
  absl::StatusOr<std::vector<BlockHandle>> blocks =
      certifier::BlockHandlesFromProto(request->blocks());
  if (!blocks.ok()) return Finish(reactor, blocks.status());
  const absl::Status status = views_.CheckRoom();
  if (!status.ok()) return Finish(reactor, status);
  certifier::CacheOwner owner{*digest, *tenant};
  provider_->Acquire(
      owner, request->tail().staging_id(),
      [this, reactor, request, response, tenant = *tenant, policy = *std::move(policy),
       blocks = *std::move(blocks)](const Acquired& acquired) {
        Finish(reactor, CreateView(*request, tenant, policy, blocks, acquired, response));
      },
      TraceparentOf(*context));
  return reactor;
}

absl::Status CertifierServer::Core::CreateView(const v1::OpenViewRequest& request,
                                               const std::string& tenant, const PolicyLease& policy,
                                               const std::vector<BlockHandle>& blocks,
                                               const Acquired& acquired,
                                               v1::OpenViewResponse* response) {
  CERTKV_RETURN_IF_ERROR(acquired.status());
  CERTKV_ASSIGN_OR_RETURN(
      certifier::ViewTail tail,
      certifier::MakeTail(*acquired->cache, acquired->staging, request.tail().staging_slot(),
                          request.tail().token_count()));
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<certifier::View> view,
                          certifier::View::Create(acquired->cache, blocks, std::move(tail), policy,
                                                  &budgets_, clock_->NowMs()));
  view->SetTenant(tenant);
  ReserveFor(*view);
  const ViewId id{RandomId()};
  CERTKV_RETURN_IF_ERROR(views_.Insert(id, view));
  response->set_view_id(static_cast<int64_t>(id));
  return absl::OkStatus();
}

void CertifierServer::Core::ReserveFor(const certifier::View& view) {
  const CacheSpec& spec = view.cache()->spec();
  // With the tail's block, whose tokens come without another reservation.
  workspaces_.Reserve(spec, view.Snapshot().token_count + spec.block_tokens);
}

grpc::ServerUnaryReactor* CertifierServer::Core::UpdateView(grpc::CallbackServerContext* context,
                                                            const v1::UpdateViewRequest* request,
                                                            v1::UpdateViewResponse* /*response*/) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<IdentityPtr> caller = CheckCall(*context);
  if (!caller.ok()) return Finish(reactor, caller.status());
  const absl::StatusOr<std::shared_ptr<certifier::View>> view =
      FindView(ViewId{request->view_id()}, **caller);
  if (!view.ok()) return Finish(reactor, view.status());
  absl::StatusOr<std::vector<BlockHandle>> blocks =
      certifier::BlockHandlesFromProto(request->appended_blocks());
  if (!blocks.ok()) return Finish(reactor, blocks.status());
  const int64_t staging_id = request->tail().staging_id();
  const std::shared_ptr<const certifier::StagingMap> known = (*view)->staging();
  // The usual step of decoding moves the tail inside memory that is mapped already.
  const bool is_mapped = staging_id == 0 || (known != nullptr && known->staging_id == staging_id);
  if (is_mapped) {
    const certifier::AcquiredCache acquired = {(*view)->cache(), staging_id == 0 ? nullptr : known};
    return Finish(reactor, ApplyUpdate(*request, *blocks, view->get(), acquired));
  }
  const certifier::CacheOwner owner{(*view)->cache()->spec_digest(), (*view)->tenant()};
  provider_->Acquire(
      owner, staging_id,
      [this, reactor, request, blocks = *std::move(blocks),
       view = *view](const Acquired& acquired) {
        Finish(reactor, ApplyUpdate(*request, blocks, view.get(), acquired));
      },
      TraceparentOf(*context));
  return reactor;
}

absl::Status CertifierServer::Core::ApplyUpdate(const v1::UpdateViewRequest& request,
                                                const std::vector<BlockHandle>& blocks,
                                                certifier::View* view, const Acquired& acquired) {
  CERTKV_RETURN_IF_ERROR(view->cache()->CheckAlive());
  CERTKV_RETURN_IF_ERROR(acquired.status());
  if (acquired->cache != view->cache()) {
    view->cache()->MarkDead();  // the store came back as another one
    return view->cache()->CheckAlive();
  }
  certifier::ViewUpdate update;
  update.appended_blocks = blocks;
  if (request.has_tail()) {
    CERTKV_ASSIGN_OR_RETURN(update.tail, certifier::MakeTail(*view->cache(), acquired->staging,
                                                             request.tail().staging_slot(),
                                                             request.tail().token_count()));
  }
  if (request.has_policy()) {
    CERTKV_ASSIGN_OR_RETURN(update.policy, PolicyLeaseFromProto(request.policy(), clock_->NowMs()));
  }
  CERTKV_RETURN_IF_ERROR(view->Update(update, clock_->NowMs()));
  if (!blocks.empty()) ReserveFor(*view);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* CertifierServer::Core::CloseView(grpc::CallbackServerContext* context,
                                                           const v1::CloseViewRequest* request,
                                                           v1::CloseViewResponse* /*response*/) {
  const absl::StatusOr<IdentityPtr> caller = CheckCall(*context);
  const ViewId id{request->view_id()};
  if (caller.ok() && FindView(id, **caller).ok()) views_.Erase(id);
  return Finish(context->DefaultReactor(), caller.status());
}

grpc::ServerUnaryReactor* CertifierServer::Core::Certify(grpc::CallbackServerContext* context,
                                                         const v1::CertifyRequest* request,
                                                         v1::CertifyResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<IdentityPtr> caller = CheckCall(*context);
  if (!caller.ok()) return Finish(reactor, caller.status());
  auto reads = certifier::ReadsFromProto(request->reads());
  if (!reads.ok()) return Finish(reactor, reads.status());
  const auto shared = std::make_shared<std::vector<certifier::BatchRead>>(*std::move(reads));
  runner_.Run(shared.get(), {.measure_only = true, .want_outputs = false, .caller = *caller},
              [self = shared_from_this(), reactor, response, shared] {
                certifier::ReadsToProto(*shared, response->mutable_results());
                self->Finish(reactor, absl::OkStatus());
              });
  return reactor;
}

grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse>* CertifierServer::Core::Attend(
    grpc::CallbackServerContext* context) {
  // Asked for every message: a token may be withdrawn, and a certificate end, while a stream lasts.
  const auto admit = [this, context] { return Admit(access_, *context, Scope::kRead); };
  return certifier::AttendStream::Start(shared_from_this(), &runner_, &streams_,
                                        config_.messages_in_flight, admit);
}

absl::StatusOr<std::unique_ptr<CertifierServer>> CertifierServer::Create(
    const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context,
    const AccessControl* access) {
  CERTKV_ASSIGN_OR_RETURN(const CpuIsa isa, SelectedCpuIsa());
  const std::string socket =
      config.store_socket.empty() ? DefaultStoreSocket() : config.store_socket;
  Log(LogLevel::kInfo, "certifier_starts",
      {{"store", socket}, {"isa", CpuIsaName(isa)}, {"read_threads", ReadThreads(config)}});
  CERTKV_ASSIGN_OR_RETURN(DeviceRuntime* const device, ChooseDevice(config));
  auto provider = std::make_unique<certifier::StoreClient>(
      certifier::StoreClientOptions{.store_socket = socket,
                                    .timeout_ms = config.store_timeout_ms,
                                    .token_file = config.store_token_file,
                                    .device = device,
                                    .pin_originals = config.pin_originals});
  certifier::ReadKernels kernels = certifier::KernelsOf(Backend::kCpu);
  if (device != nullptr) {
    kernels.attend_on_device = certifier::KernelsOf(Backend::kCuda).attend;
  }
  kernels.verify_every_read = config.verify_every_read;
  return CreateWith(config, clock, io_context, std::move(provider), std::move(kernels), access);
}

std::unique_ptr<CertifierServer> CertifierServer::CreateWith(
    const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context,
    std::unique_ptr<certifier::CacheProvider> provider, certifier::ReadKernels kernels,
    const AccessControl* access) {
  auto core = std::make_shared<Core>(config, clock, io_context, std::move(provider),
                                     std::move(kernels), access);
  core->StartTimer();
  return std::unique_ptr<CertifierServer>(new CertifierServer(std::move(core)));
}

CertifierServer::CertifierServer(std::shared_ptr<Core> core) : core_(std::move(core)) {}

CertifierServer::~CertifierServer() {
  core_->Stop();
  core_->LogDeviceFallbacks();
  core_->LogCounters();
}

std::vector<grpc::Service*> CertifierServer::grpc_services() { return {core_.get()}; }

const certifier::CertifierCounters& CertifierServer::counters() const { return core_->counters(); }

absl::Span<const MetricInfo> CertifierServer::MetricInfos() {
  return certifier::CertifierMetricInfos();
}

void CertifierServer::CollectMetrics(MetricSink* sink) const { core_->CollectMetrics(sink); }

void CertifierServer::Drain() { core_->Drain(); }

}  // namespace certkv
