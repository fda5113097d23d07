#include "services/certifier/service.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/certifier/attend_stream.h"
#include "services/certifier/read_job.h"
#include "services/certifier/store_link.h"
#include "services/certifier/view_table.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/common/random_id.h"
#include "services/common/runtime_directory.h"

namespace certkv {
namespace {

namespace v1 = certifier::v1;
using certifier::BudgetBook;
using certifier::CertifierCounters;
using certifier::kErrorDomain;
using certifier::MappedCache;
using certifier::StagingMap;
using certifier::View;
using certifier::ViewTail;
using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

constexpr std::chrono::seconds kSweepInterval{1};

std::string StoreTargetOf(const CertifierConfig& config) {
  if (!config.store_target.empty()) return config.store_target;
  return absl::StrCat("unix:", RuntimeDirectory(), "/kvstore.sock");
}

absl::StatusOr<std::vector<BlockHandle>> BlocksOf(
    const google::protobuf::RepeatedPtrField<type::BlockHandle>& protos) {
  std::vector<BlockHandle> blocks;
  blocks.reserve(protos.size());
  for (const type::BlockHandle& proto : protos) {
    CERTKV_ASSIGN_OR_RETURN(blocks.emplace_back(), BlockHandleFromProto(proto));
  }
  return blocks;
}

}  // namespace

// Handlers of the timer hold it only while they run, so that the last of {CertifierServer, handler}
// destroys it.
class CertifierServer::Core final : public v1::Certifier::CallbackService,
                                    public std::enable_shared_from_this<CertifierServer::Core> {
 public:
  Core(const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context)
      : config_(config),
        clock_(clock),
        store_(StoreTargetOf(config), config.store_timeout_ms),
        views_(config.view_limit),
        budgets_(config.budget_limit),
        workspaces_(std::max(2, static_cast<int32_t>(std::thread::hardware_concurrency()))),
        engine_(certifier::KernelsOf(Backend::kCpu), &counters_),
        streams_(config.stream_limit),
        context_{&views_, &workspaces_, &engine_, clock, io_context},
        store_thread_(1),
        timer_(*io_context) {}

  void ScheduleSweep() {
    absl::MutexLock lock(&timer_mutex_);
    if (stopped_) return;
    timer_.expires_after(kSweepInterval);
    timer_.async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
      const std::shared_ptr<Core> core = weak.lock();
      if (error || core == nullptr) return;
      core->views_.EraseIdle(core->clock_->NowMs() - core->config_.view_idle_ms);
      core->ScheduleSweep();
    });
  }
  void Stop() {
    {
      absl::MutexLock lock(&timer_mutex_);
      stopped_ = true;
      timer_.cancel();
    }
    store_thread_.join();
    LogCounters();
  }
  void Drain() { streams_.DrainAll(); }

  ServerUnaryReactor* OpenView(CallbackServerContext* context, const v1::OpenViewRequest* request,
                               v1::OpenViewResponse* response) override {
    return OnStoreThread(context,
                         [this, request, response] { return OpenViewNow(*request, response); });
  }

  ServerUnaryReactor* UpdateView(CallbackServerContext* context,
                                 const v1::UpdateViewRequest* request,
                                 v1::UpdateViewResponse*) override {
    return OnStoreThread(context, [this, request] { return UpdateViewNow(*request); });
  }

  ServerUnaryReactor* CloseView(CallbackServerContext* context, const v1::CloseViewRequest* request,
                                v1::CloseViewResponse*) override {
    ServerUnaryReactor* reactor = context->DefaultReactor();
    grpc::Status status = RequireDeadline(*context, kErrorDomain);
    if (status.ok()) views_.Erase(ViewId{request->view_id()});
    reactor->Finish(status);
    return reactor;
  }

  grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendResponse>* Attend(
      CallbackServerContext*) override {
    return new certifier::AttendStream(&context_, &streams_);
  }

  ServerUnaryReactor* Certify(CallbackServerContext* context, const v1::CertifyRequest* request,
                              v1::CertifyResponse* response) override {
    ServerUnaryReactor* reactor = context->DefaultReactor();
    grpc::Status status = RequireDeadline(*context, kErrorDomain);
    if (status.ok() && request->reads_size() > kReadsPerAttendMax) {
      status = ToGrpcStatus(
          MakeError(absl::StatusCode::kInvalidArgument, "READ_LIMIT",
                    absl::StrCat("a CertifyRequest has ", request->reads_size(), " reads, at most ",
                                 kReadsPerAttendMax, "; send several")),
          kErrorDomain);
    }
    if (!status.ok()) {
      reactor->Finish(status);
      return reactor;
    }
    StartReadJob(context_, request->reads(), {.want_outputs = false, .measure_only = true},
                 response->mutable_results(), [reactor] { reactor->Finish(grpc::Status::OK); });
    return reactor;
  }

 private:
  // Work that may wait for the store runs on a thread of its own, never on gRPC's.
  template <typename Work>
  ServerUnaryReactor* OnStoreThread(CallbackServerContext* context, Work work) {
    ServerUnaryReactor* reactor = context->DefaultReactor();
    if (grpc::Status status = RequireDeadline(*context, kErrorDomain); !status.ok()) {
      reactor->Finish(status);
      return reactor;
    }
    boost::asio::post(store_thread_, [reactor, work = std::move(work)] {
      reactor->Finish(ToGrpcStatus(work(), kErrorDomain));
    });
    return reactor;
  }

  // Finds the tail's staging memory; none when there is no tail.
  absl::StatusOr<ViewTail> TailOf(const MappedCache& cache, const v1::Tail& tail) {
    if (tail.staging_id() == 0 || tail.token_count() == 0) return ViewTail{};
    CERTKV_ASSIGN_OR_RETURN(std::shared_ptr<const StagingMap> staging,
                            store_.FindStaging(cache, tail.staging_id()));
    return MakeTail(cache, std::move(staging), tail.staging_slot(), tail.token_count());
  }

  absl::Status OpenViewNow(const v1::OpenViewRequest& request, v1::OpenViewResponse* response) {
    CERTKV_RETURN_IF_ERROR(views_.CheckRoom());
    CERTKV_ASSIGN_OR_RETURN(const SpecDigest digest, SpecDigestFromBytes(request.spec_digest()));
    CERTKV_ASSIGN_OR_RETURN(const std::vector<BlockHandle> blocks, BlocksOf(request.blocks()));
    CERTKV_ASSIGN_OR_RETURN(const PolicyLease policy, PolicyLeaseFromProto(request.policy()));
    CERTKV_ASSIGN_OR_RETURN(std::shared_ptr<MappedCache> cache, store_.FindCache(digest));
    CERTKV_ASSIGN_OR_RETURN(ViewTail tail, TailOf(*cache, request.tail()));
    const int64_t now_ms = clock_->NowMs();
    CERTKV_ASSIGN_OR_RETURN(std::shared_ptr<View> view, View::Create(cache, blocks, std::move(tail),
                                                                     policy, &budgets_, now_ms));
    ReserveFor(*view);
    const int64_t id = RandomId();
    CERTKV_RETURN_IF_ERROR(views_.Insert(ViewId{id}, std::move(view)));
    response->set_view_id(id);
    return absl::OkStatus();
  }

  absl::Status UpdateViewNow(const v1::UpdateViewRequest& request) {
    CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<View> view,
                            views_.Find(ViewId{request.view_id()}));
    CERTKV_ASSIGN_OR_RETURN(const std::vector<BlockHandle> blocks,
                            BlocksOf(request.appended_blocks()));
    certifier::ViewUpdate update;
    update.appended_blocks = blocks;
    if (request.has_tail()) {
      CERTKV_ASSIGN_OR_RETURN(update.tail, TailOf(*view->cache(), request.tail()));
    }
    if (request.has_policy()) {
      CERTKV_ASSIGN_OR_RETURN(update.policy, PolicyLeaseFromProto(request.policy()));
    }
    CERTKV_RETURN_IF_ERROR(view->Update(update, clock_->NowMs()));
    ReserveFor(*view);
    return absl::OkStatus();
  }

  // So that reads allocate nothing large.
  void ReserveFor(const View& view) {
    const CacheSpec& spec = view.cache()->spec();
    // Rounded up to 4096 tokens, so that a growing sequence rarely makes them grow.
    const int64_t tokens = (view.Snapshot().token_count + 4095) / 4096 * 4096;
    workspaces_.Reserve(certifier::ShapeOfReads(spec, tokens));
  }

  void LogCounters() const {
    const auto value = [](const std::atomic<int64_t>& counter) {
      return counter.load(std::memory_order_relaxed);
    };
    Log(LogLevel::kInfo, "certifier_counters",
        {{"reads", value(counters_.reads)},
         {"failed_reads", value(counters_.failed_reads)},
         {"heads_certified_first", value(counters_.heads_by_rung[static_cast<int>(Rung::kNone)])},
         {"heads_values", value(counters_.heads_by_rung[static_cast<int>(Rung::kValues)])},
         {"heads_keys", value(counters_.heads_by_rung[static_cast<int>(Rung::kKeys)])},
         {"heads_head", value(counters_.heads_by_rung[static_cast<int>(Rung::kHead)])},
         {"heads_layer", value(counters_.heads_by_rung[static_cast<int>(Rung::kLayer)])},
         {"repair_bytes", value(counters_.repair_bytes)},
         {"attend_passes", value(counters_.attend_passes)}});
    for (const auto& [reason, count] : counters_.ErrorsByReason()) {
      Log(LogLevel::kInfo, "certifier_errors", {{"reason", reason}, {"reads", count}});
    }
  }

  const CertifierConfig config_;
  const Clock* const clock_;
  certifier::StoreLink store_;
  certifier::ViewTable views_;
  BudgetBook budgets_;
  CertifierCounters counters_;
  certifier::WorkspacePool workspaces_;
  const certifier::ReadEngine engine_;
  certifier::AttendStreamSet streams_;
  const certifier::ReadContext context_;
  boost::asio::thread_pool store_thread_;
  absl::Mutex timer_mutex_;
  bool stopped_ ABSL_GUARDED_BY(timer_mutex_) = false;
  boost::asio::steady_timer timer_ ABSL_GUARDED_BY(timer_mutex_);
};

CertifierServer::CertifierServer(std::shared_ptr<Core> core) : core_(std::move(core)) {}

CertifierServer::~CertifierServer() { core_->Stop(); }

absl::StatusOr<std::unique_ptr<CertifierServer>> CertifierServer::Create(
    const CertifierConfig& config, const Clock* clock, boost::asio::io_context* io_context) {
  // A wrong CERTKV_CPU is said now, not at the first read.
  CERTKV_ASSIGN_OR_RETURN(const CpuIsa isa, SelectedCpuIsa());
  Log(LogLevel::kInfo, "certifier_kernels", {{"isa", CpuIsaName(isa)}});
  auto core = std::make_shared<Core>(config, clock, io_context);
  core->ScheduleSweep();
  return std::unique_ptr<CertifierServer>(new CertifierServer(std::move(core)));
}

std::vector<grpc::Service*> CertifierServer::grpc_services() { return {core_.get()}; }

void CertifierServer::Drain() { core_->Drain(); }

}  // namespace certkv
