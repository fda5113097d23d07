#include "services/certifier/read_batch.h"

#include <algorithm>
#include <boost/asio/post.hpp>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

// Upper bound of a certificate on the wire: 18 fields, at most 12 bytes each.
constexpr int64_t kCertificateBytes = 216;
// Upper bound of the other fields of a result without an error.
constexpr int64_t kResultBytes = 128;
// Room for the errors of all reads of a message.
constexpr int64_t kAnswerBytesMax = kMessageBytesMax - int64_t{kReadsPerAttendMax} * 2560;

}  // namespace

// One message's reads while they run. Shared by the threads that work on it; the last one ends it.
class BatchRunner::Batch : public std::enable_shared_from_this<BatchRunner::Batch> {
 public:
  Batch(const BatchRunner* runner, std::vector<BatchRead>* reads, const BatchOptions& options,
        std::function<void()> done)
      : runner_(runner),
        reads_(reads),
        options_(options),
        done_(std::move(done)),
        arrival_ns_(runner->clock_->MonotonicNs()),
        states_(reads->size()) {}

  // Plans all reads, then works on them here and on other threads.
  void Start() {
    runner_->counters_->queue_seconds.Observe(runner_->clock_->MonotonicNs() - arrival_ns_);
    const int64_t now_ms = runner_->clock_->NowMs();
    int64_t answer_bytes = 0;
    for (size_t i = 0; i < reads_->size(); ++i) {
      BatchRead& read = (*reads_)[i];
      if (read.status.ok()) read.status = Plan(&read, &states_[i], now_ms, &answer_bytes);
      if (!read.status.ok()) {
        runner_->counters_->failed_reads.fetch_add(1, std::memory_order_relaxed);
        runner_->counters_->CountError(read.status);
        continue;
      }
      const int32_t kv_heads = states_[i].plan->cache->spec().kv_head_count;
      states_[i].heads_left.store(kv_heads, std::memory_order_relaxed);
      for (int32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
        tasks_.push_back({static_cast<int32_t>(i), kv_head});
      }
    }
    tasks_left_.store(static_cast<int64_t>(tasks_.size()), std::memory_order_relaxed);
    if (tasks_.empty()) return done_();
    const auto helpers =
        std::min<int64_t>(runner_->thread_count_, static_cast<int64_t>(tasks_.size()));
    for (int64_t i = 1; i < helpers; ++i) {
      boost::asio::post(*runner_->io_context_, [self = shared_from_this()] { self->Work(); });
    }
    Work();
  }

 private:
  struct Task {
    int32_t read;
    int32_t kv_head;
  };
  struct ReadState {
    std::optional<ReadPlan> plan;
    std::atomic<int64_t> start_ns{0};
    std::atomic<int32_t> heads_left{0};
    std::atomic<int64_t> reserved_units{0};
    std::atomic<bool> failed{false};
    absl::Mutex mutex;
    absl::Status first_error ABSL_GUARDED_BY(mutex);
  };

  absl::Status Plan(BatchRead* read, ReadState* state, int64_t now_ms, int64_t* answer_bytes) {
    CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<View> view, runner_->views_->Find(read->view_id));
    if (options_.caller != nullptr && !options_.caller->MayUse(view->tenant())) {
      return ViewTable::NotFound(read->view_id);
    }
    view->Touch(now_ms);
    ReadRequest request;
    request.layer = read->layer;
    request.query_position = read->query_position;
    request.queries = read->queries;
    request.sink_logits = read->sink_logits;
    request.measure_only = options_.measure_only;
    CERTKV_ASSIGN_OR_RETURN(state->plan, PlanRead(*view, request, now_ms));
    const ReadPlan& plan = *state->plan;
    const CacheSpec& spec = plan.cache->spec();
    const int64_t heads = spec.query_head_count();
    const int64_t output_bytes =
        options_.want_outputs ? heads * spec.value_dim * int64_t{sizeof(float)} : 0;
    const int64_t source_bytes = options_.want_tile_sources ? heads * plan.tile_count : 0;
    const int64_t bytes = kResultBytes + heads * kCertificateBytes + output_bytes + source_bytes;
    if (*answer_bytes + bytes > kAnswerBytesMax) {
      return MakeError(absl::StatusCode::kInvalidArgument, "ANSWER_TOO_LARGE",
                       absl::StrCat("the answers of the message's reads up to this one have ",
                                    *answer_bytes + bytes, " bytes, at most ", kAnswerBytesMax,
                                    " fit into one message; send fewer reads in each"));
    }
    *answer_bytes += bytes;
    read->certificates.resize(heads);
    read->outputs.resize(output_bytes / sizeof(float));
    read->tile_sources.resize(source_bytes);
    read->first_tile = plan.first_block * plan.tiles_per_block();
    return absl::OkStatus();
  }

  bool IsCancelled() const {
    return options_.is_cancelled != nullptr &&
           options_.is_cancelled->load(std::memory_order_relaxed);
  }

  static void Fail(ReadState* state, const absl::Status& status) {
    absl::MutexLock lock(&state->mutex);
    if (!state->failed.exchange(true)) state->first_error = status;
  }

  // Takes tasks until none is left.
  void Work() {
    const auto workspace = runner_->workspaces_->Take();
    while (true) {
      const size_t index = next_task_.fetch_add(1, std::memory_order_relaxed);
      if (index >= tasks_.size()) return;
      RunTask(tasks_[index], workspace.get());
      if (tasks_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_();
    }
  }

  void RunTask(const Task& task, ReadWorkspace* workspace) {
    BatchRead& read = (*reads_)[task.read];
    ReadState& state = states_[task.read];
    const ReadOutput output = {absl::MakeSpan(read.certificates), absl::MakeSpan(read.outputs),
                               absl::MakeSpan(read.tile_sources)};
    const int64_t begin_ns = runner_->clock_->MonotonicNs();
    int64_t not_started = 0;
    state.start_ns.compare_exchange_strong(not_started, begin_ns, std::memory_order_relaxed);
    if (IsCancelled()) {
      Fail(&state, absl::CancelledError("the caller went away"));
    } else if (!state.failed.load(std::memory_order_relaxed)) {
      int64_t reserved_units = 0;
      const absl::Status status = runner_->engine_->ReadKvHead(*state.plan, task.kv_head, workspace,
                                                               output, &reserved_units);
      state.reserved_units.fetch_add(reserved_units, std::memory_order_relaxed);
      if (!status.ok()) Fail(&state, status);
      runner_->counters_->busy_ns.fetch_add(runner_->clock_->MonotonicNs() - begin_ns,
                                            std::memory_order_relaxed);
    }
    // The last head sees what all others wrote.
    if (state.heads_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    {
      absl::MutexLock lock(&state.mutex);
      read.status = state.first_error;
    }
    read.status = runner_->engine_->EndRead(
        *state.plan, read.status, state.reserved_units.load(std::memory_order_relaxed), output);
    read.read_time_ns =
        runner_->clock_->MonotonicNs() - state.start_ns.load(std::memory_order_relaxed);
    runner_->counters_->read_seconds.Observe(read.read_time_ns);
    state.plan.reset();
    if (read.status.ok()) return;
    read.certificates.clear();
    read.outputs.clear();
    read.tile_sources.clear();
  }

  const BatchRunner* const runner_;
  std::vector<BatchRead>* const reads_;
  const BatchOptions options_;
  const std::function<void()> done_;
  const int64_t arrival_ns_;
  std::vector<ReadState> states_;  // one per read
  std::vector<Task> tasks_;
  std::atomic<size_t> next_task_{0};
  std::atomic<int64_t> tasks_left_{0};
};

BatchRunner::BatchRunner(const ReadEngine* engine, ViewTable* views, WorkspacePool* workspaces,
                         CertifierCounters* counters, const Clock* clock,
                         boost::asio::io_context* io_context, int32_t thread_count)
    : engine_(engine),
      views_(views),
      workspaces_(workspaces),
      counters_(counters),
      clock_(clock),
      io_context_(io_context),
      thread_count_(thread_count) {}

void BatchRunner::Run(std::vector<BatchRead>* reads, const BatchOptions& options,
                      std::function<void()> done) {
  auto batch = std::make_shared<Batch>(this, reads, options, std::move(done));
  boost::asio::post(*io_context_, [batch] { batch->Start(); });
}

}  // namespace certkv::certifier
