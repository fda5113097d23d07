#include "services/gate/service.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "kernels/core/status.h"
#include "services/common/access_control.h"
#include "services/common/call_trace.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/common/runtime_directory.h"
#include "services/gate/convert.h"
#include "services/gate/dashboard.h"
#include "services/gate/ledger.h"
#include "services/gate/metrics.h"
#include "services/gate/request_registry.h"
#include "services/gate/service_ledger.h"
#include "services/gate/service_policy.h"
#include "services/gate/service_store.h"
#include "services/gate/service_streams.h"

namespace certkv {
namespace {

namespace v1 = gate::v1;
using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

constexpr std::chrono::milliseconds kTick{100};
constexpr int kTicksPerSweep = 10;

}  // namespace

// The service object and its timer. Handlers of the timer hold it only while they run, so that the
// last of {GateServer, handler} destroys it.
class GateServer::Core final : public v1::Gate::CallbackService,
                               public std::enable_shared_from_this<GateServer::Core> {
 public:
  Core(const GateConfig& config, const Clock* clock, boost::asio::io_context* io_context,
       const AccessControl* access, std::unique_ptr<gate::LedgerRunner> ledger)
      : config_(config),
        clock_(clock),
        access_(access),
        io_context_(io_context),
        ledger_(std::move(ledger)),
        registry_(config, clock, ledger_->ledger()),
        policy_share_(&registry_, ledger_->ledger()),
        store_(config.store_socket.empty() ? absl::StrCat(RuntimeDirectory(), "/kvstore.sock")
                                           : config.store_socket,
               config.store_token_file, clock),
        timer_(*io_context) {}

  void ScheduleTick() {
    absl::MutexLock lock(&timer_mutex_);
    if (stopped_) return;
    timer_.expires_after(kTick);
    timer_.async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
      const std::shared_ptr<Core> core = weak.lock();
      if (error || core == nullptr) return;
      core->Tick();
      core->ScheduleTick();
    });
  }
  void Stop() {
    absl::MutexLock lock(&timer_mutex_);
    stopped_ = true;
    timer_.cancel();
    timer_mutex_.Await(absl::Condition(
        +[](int* count) { return *count == 0; }, &background_count_));
  }
  void Drain() { streams_.DrainAll(); }
  std::vector<HttpRoute> HttpRoutes() {
    return gate::DashboardRoutes(&registry_, clock_, [this] { return store_.Latest(); });
  }
  void CollectMetrics(MetricSink* sink) const { gate::CollectGateMetrics(registry_, sink); }

  ServerUnaryReactor* OpenRequest(CallbackServerContext* context,
                                  const v1::OpenRequestRequest* request,
                                  v1::OpenRequestResponse* response) override {
    return AtLedger(context, Scope::kRead, [=, this](const Identity& caller) -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(gate::RequestTerms terms, gate::TermsFromProto(*request));
      CERTKV_ASSIGN_OR_RETURN(terms.tenant, caller.ResolveTenant(terms.tenant));
      CERTKV_ASSIGN_OR_RETURN(
          const PolicyLease lease,
          registry_.OpenRequest(request->request_id(), request->label(), terms));
      *response->mutable_lease() = PolicyLeaseToProto(lease, clock_->NowMs());
      Log(LogLevel::kDebug, "request_opened",
          {{"request", lease.request}, {"traceparent", TraceparentOf(*context)}});
      return absl::OkStatus();
    });
  }

  grpc::ServerBidiReactor<v1::ReportRequest, v1::ReportResponse>* Report(
      CallbackServerContext* context) override {
    // Asked for every batch: a token may be withdrawn while a stream lasts.
    const auto admit = [this, context](absl::string_view request) -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(const IdentityPtr caller, Admit(access_, *context, Scope::kRead));
      if (request.empty()) return absl::OkStatus();
      CERTKV_RETURN_IF_ERROR(registry_.Adopt(request));
      return CheckRequest(*caller, request);
    };
    return new gate::ReportStream(&registry_, &streams_, io_context_, ledger_.get(),
                                  TraceparentOf(*context), admit);
  }

  ServerUnaryReactor* Decide(CallbackServerContext* context, const v1::DecideRequest* request,
                             v1::DecideResponse* response) override {
    return AtLedger(context, Scope::kRead, [=, this](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(registry_.Adopt(request->request()));
      CERTKV_RETURN_IF_ERROR(CheckRequest(caller, request->request()));
      CERTKV_ASSIGN_OR_RETURN(const ReadCertificate certificate,
                              ReadCertificateFromProto(request->certificate()));
      CERTKV_ASSIGN_OR_RETURN(const gate::Decision decision,
                              registry_.Decide(request->request(), certificate));
      gate::DecisionToProto(decision, response);
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* CloseRequest(CallbackServerContext* context,
                                   const v1::CloseRequestRequest* request,
                                   v1::RequestRisk* response) override {
    return AtLedger(context, Scope::kRead, [=, this](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(registry_.Adopt(request->request()));
      CERTKV_RETURN_IF_ERROR(CheckRequest(caller, request->request()));
      CERTKV_ASSIGN_OR_RETURN(const gate::RequestRisk risk,
                              registry_.CloseRequest(request->request()));
      gate::RequestRiskToProto(risk, response);
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* GetRequestRisk(CallbackServerContext* context,
                                     const v1::GetRequestRiskRequest* request,
                                     v1::RequestRisk* response) override {
    return AtLedger(context, Scope::kRisk, [=, this](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(registry_.Refresh(request->request()));
      CERTKV_RETURN_IF_ERROR(CheckRequest(caller, request->request()));
      CERTKV_ASSIGN_OR_RETURN(const gate::RequestRisk risk,
                              registry_.GetRisk(request->request(), request->all_heads()));
      gate::RequestRiskToProto(risk, response);
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* ListRequestRisks(CallbackServerContext* context,
                                       const v1::ListRequestRisksRequest* request,
                                       v1::ListRequestRisksResponse* response) override {
    return Unary(context, Scope::kRisk, [&](const Identity& caller) -> absl::Status {
      CERTKV_ASSIGN_OR_RETURN(gate::RiskQuery query, gate::RiskQueryFromProto(*request));
      if (!caller.any_tenant) {
        CERTKV_ASSIGN_OR_RETURN(query.filter.tenant, caller.ResolveTenant(query.filter.tenant));
      }
      CERTKV_ASSIGN_OR_RETURN(const gate::RiskPage page, registry_.ListRisks(query));
      for (const gate::RequestRisk& risk : page.risks) {
        gate::RequestRiskToProto(risk, response->add_risks());
      }
      response->set_next_page_token(page.next_page_token);
      response->set_request_count(page.request_count);
      return absl::OkStatus();
    });
  }

  grpc::ServerWriteReactor<v1::RequestRisk>* WatchRequestRisk(
      CallbackServerContext* context, const v1::WatchRequestRiskRequest* request) override {
    const absl::StatusOr<IdentityPtr> caller = Admit(access_, *context, Scope::kRisk);
    const absl::Status admitted =
        caller.ok() ? CheckRequest(**caller, request->request()) : caller.status();
    return new gate::WatchStream(&registry_, &streams_, request->request(), config_.watcher_limit,
                                 admitted);
  }

  ServerUnaryReactor* GetPolicy(CallbackServerContext* context, const v1::GetPolicyRequest*,
                                v1::Policy* response) override {
    return Unary(context, Scope::kRisk, [&](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(caller.CheckAllTenants("the policy"));
      *response = gate::PolicyToProto(registry_.policy());
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* UpdatePolicy(CallbackServerContext* context,
                                   const v1::UpdatePolicyRequest* request,
                                   v1::Policy* response) override {
    return AtLedger(context, Scope::kAdmin, [=, this](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(caller.CheckAllTenants("the policy"));
      CERTKV_ASSIGN_OR_RETURN(const gate::Policy asked, gate::PolicyFromProto(request->policy()));
      CERTKV_ASSIGN_OR_RETURN(const gate::Policy policy,
                              policy_share_.Update(asked, context->peer()));
      LogPolicy(policy, context->peer());
      *response = gate::PolicyToProto(policy);
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* TryPolicy(CallbackServerContext* context, const v1::TryPolicyRequest* request,
                                v1::TryPolicyResponse* response) override {
    return Unary(context, Scope::kRisk, [&](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(caller.CheckAllTenants("the policy"));
      CERTKV_ASSIGN_OR_RETURN(const gate::Policy asked, gate::PolicyFromProto(request->policy()));
      CERTKV_ASSIGN_OR_RETURN(const gate::PolicyTrial trial, registry_.TryPolicy(asked));
      gate::PolicyTrialToProto(trial, response);
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* ListPolicyChanges(CallbackServerContext* context,
                                        const v1::ListPolicyChangesRequest*,
                                        v1::ListPolicyChangesResponse* response) override {
    return Unary(context, Scope::kRisk, [&](const Identity& caller) -> absl::Status {
      CERTKV_RETURN_IF_ERROR(caller.CheckAllTenants("the policy"));
      for (const gate::PolicyChange& change : registry_.PolicyChanges()) {
        gate::PolicyChangeToProto(change, response->add_changes());
      }
      return absl::OkStatus();
    });
  }

  ServerUnaryReactor* ListRiskEvents(CallbackServerContext* context,
                                     const v1::ListRiskEventsRequest* request,
                                     v1::ListRiskEventsResponse* response) override {
    return Unary(context, Scope::kRisk, [&](const Identity& caller) -> absl::Status {
      const int32_t size = request->page_size();
      if (size < 0 || size > gate::kEventsPerListMax) {
        return MakeError(absl::StatusCode::kInvalidArgument, "PAGE_SIZE_INVALID",
                         absl::StrCat("page_size is ", size, ", must be in [1, ",
                                      gate::kEventsPerListMax, "], or 0 for 100"));
      }
      const int32_t wanted = size == 0 ? 100 : size;
      // Those of others are left out here, so more are asked for.
      const int32_t asked = caller.any_tenant ? wanted : gate::kEventsPerListMax;
      for (const auto& event : registry_.ListEvents(request->since_ms(), asked)) {
        if (response->events_size() == wanted) break;
        if (!CheckRequest(caller, event.request).ok()) continue;
        gate::NamedEventToProto(event, response->add_events());
      }
      return absl::OkStatus();
    });
  }

  // Takes what the other replicas have done to the policy and to tenants' budgets. Blocks as the
  // ledger does.
  void SyncWithLedger() {
    absl::StatusOr<bool> changed = policy_share_.Sync();
    if (changed.ok() && *changed) {
      LogPolicy(registry_.policy(), registry_.LatestPolicyChange().source);
    }
    if (const absl::Status told = registry_.RefreshTenants(); changed.ok() && !told.ok()) {
      changed = told;
    }
    const bool had_failed = sync_failed_.exchange(!changed.ok());
    if (changed.ok()) return;
    registry_.mutable_counters()->ledger_failures.fetch_add(1, std::memory_order_relaxed);
    if (had_failed) return;
    Log(LogLevel::kWarning, "ledger_not_synced", {{"message", changed.status().message()}});
  }

  // The policy of a config file that was read again.
  void Reload(const GateConfig& config) {
    RunInBackground([this, asked = config.policy] { ReloadPolicy(asked); });
  }

 private:
  // Runs `answer`, which fills the response, unless the call has no deadline or the caller not the
  // scope.
  template <typename Answer>
  ServerUnaryReactor* Unary(CallbackServerContext* context, Scope scope, const Answer& answer) {
    ServerUnaryReactor* reactor = context->DefaultReactor();
    grpc::Status status = RequireDeadline(*context, gate::kErrorDomain);
    if (status.ok()) {
      const absl::StatusOr<IdentityPtr> caller = Admit(access_, *context, scope);
      status = ToGrpcStatus(caller.ok() ? answer(**caller) : caller.status(), gate::kErrorDomain);
    }
    reactor->Finish(status);
    return reactor;
  }

  // The same for what may have to wait for the ledger. `answer` may hold the call's messages, which
  // live until it is finished, but nothing of the method's own frame.
  template <typename Answer>
  ServerUnaryReactor* AtLedger(CallbackServerContext* context, Scope scope, Answer answer) {
    ServerUnaryReactor* reactor = context->DefaultReactor();
    ledger_->Run([this, context, scope, reactor, answer = std::move(answer)] {
      grpc::Status status = RequireDeadline(*context, gate::kErrorDomain);
      if (status.ok()) {
        const absl::StatusOr<IdentityPtr> caller = Admit(access_, *context, scope);
        status = ToGrpcStatus(caller.ok() ? answer(**caller) : caller.status(), gate::kErrorDomain);
      }
      reactor->Finish(status);
    });
    return reactor;
  }

  // A request of a tenant that the caller may not act for is as one that is not there.
  absl::Status CheckRequest(const Identity& caller, absl::string_view request) const {
    if (caller.any_tenant) return absl::OkStatus();
    return registry_.CheckTenant(
        request, [&caller](absl::string_view tenant) { return caller.MayUse(tenant); });
  }

  // Runs `task` where it may wait for the ledger; Stop waits for it.
  void RunInBackground(std::function<void()> task) {
    {
      absl::MutexLock lock(&timer_mutex_);
      if (stopped_) return;
      ++background_count_;
    }
    ledger_->Run([this, task = std::move(task)] {
      task();
      absl::MutexLock lock(&timer_mutex_);
      --background_count_;
    });
  }

  void ReloadPolicy(gate::Policy asked) {
    // Another replica may have read the same file a moment ago.
    const absl::Status synced = policy_share_.Sync().status();
    const gate::Policy before = registry_.policy();
    asked.version = before.version;
    if (synced.ok() && gate::SamePolicy(asked, before)) return;
    asked.version = 0;
    const absl::StatusOr<gate::Policy> policy =
        synced.ok() ? policy_share_.Update(asked, "config file") : synced;
    if (policy.ok()) {
      LogPolicy(*policy, "config file");
    } else {
      Log(LogLevel::kError, "policy_refused",
          {{"source", "config file"}, {"message", policy.status().message()}});
    }
  }

  static void LogPolicy(const gate::Policy& policy, absl::string_view source) {
    Log(LogLevel::kInfo, "policy_updated",
        {{"version", policy.version},
         {"source", source},
         {"policy", gate::DescribePolicy(policy)}});
  }

  void Tick() {
    streams_.TickAll();
    if (++tick_count_ % kTicksPerSweep != 0) return;
    if (ledger_->ledger() != nullptr && !syncs_.exchange(true)) {
      RunInBackground([this] {
        SyncWithLedger();
        syncs_ = false;
      });
    }
    const int32_t idle_count = registry_.Sweep();
    if (idle_count > 0) Log(LogLevel::kInfo, "idle_requests_closed", {{"requests", idle_count}});
  }

  const GateConfig config_;
  const Clock* const clock_;
  const AccessControl* const access_;  // null: everybody may call
  boost::asio::io_context* const io_context_;
  const std::unique_ptr<gate::LedgerRunner> ledger_;
  gate::RequestRegistry registry_;
  gate::PolicyShare policy_share_;
  gate::StoreWatcher store_;
  gate::StreamSet streams_;
  std::atomic<int64_t> tick_count_ = 0;
  std::atomic<bool> syncs_ = false;
  std::atomic<bool> sync_failed_ = false;
  absl::Mutex timer_mutex_;
  bool stopped_ ABSL_GUARDED_BY(timer_mutex_) = false;
  int background_count_ ABSL_GUARDED_BY(timer_mutex_) = 0;
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(timer_mutex_);
};

GateServer::GateServer(std::shared_ptr<Core> core) : core_(std::move(core)) {}

GateServer::~GateServer() { core_->Stop(); }

absl::StatusOr<std::unique_ptr<GateServer>> GateServer::Create(const GateConfig& config,
                                                               const Clock* clock,
                                                               boost::asio::io_context* io_context,
                                                               const AccessControl* access) {
  CERTKV_RETURN_IF_ERROR(gate::ValidatePolicy(config.policy));
  CERTKV_ASSIGN_OR_RETURN(std::unique_ptr<gate::LedgerRunner> ledger,
                          gate::LedgerRunner::Create(config));
  const bool is_shared = ledger->ledger() != nullptr;
  auto core = std::make_shared<Core>(config, clock, io_context, access, std::move(ledger));
  if (is_shared) {
    const gate::LedgerDeadline limit(std::chrono::steady_clock::now() +
                                     std::chrono::milliseconds(config.ledger_timeout_ms));
    core->SyncWithLedger();
  }
  core->ScheduleTick();
  return std::unique_ptr<GateServer>(new GateServer(std::move(core)));
}

std::vector<grpc::Service*> GateServer::grpc_services() { return {core_.get()}; }

absl::Span<const MetricInfo> GateServer::MetricInfos() { return gate::GateMetricInfos(); }

void GateServer::CollectMetrics(MetricSink* sink) const { core_->CollectMetrics(sink); }

std::vector<HttpRoute> GateServer::HttpRoutes() { return core_->HttpRoutes(); }

void GateServer::Drain() { core_->Drain(); }

void GateServer::Reload(const GateConfig& config) { core_->Reload(config); }

}  // namespace certkv
