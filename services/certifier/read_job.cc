#include "services/certifier/read_job.h"

#include <atomic>
#include <boost/asio/post.hpp>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"

namespace certkv::certifier {
namespace {

using v1::Read;
using ResultProto = v1::ReadResult;

absl::StatusOr<std::vector<float>> QueriesOf(const Read& read) {
  if (read.queries().size() % sizeof(float) != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "QUERY_SIZE",
                     absl::StrCat("queries has ", read.queries().size(),
                                  " bytes, must be query_head_count * head_dim float32 values"));
  }
  std::vector<float> queries(read.queries().size() / sizeof(float));
  std::memcpy(queries.data(), read.queries().data(), read.queries().size());
  return queries;
}

// One read, from its plan to its result. Its KV heads may run on several threads.
class OneRead {
 public:
  OneRead(const ReadContext& context, const Read& proto, const ReadJobOptions& options,
          ResultProto* result)
      : context_(context), proto_(proto), options_(options), result_(result) {}

  // Errors go into the result by Finish. Returns the number of KV heads to run (0 on error).
  int32_t Plan() {
    start_ns_ = context_.clock->MonotonicNs();
    const absl::Status status = MakePlan();
    if (status.ok()) return plan_->cache->spec().kv_head_count;
    FillError(status);
    return 0;
  }
  void RunKvHead(int32_t kv_head) {
    const WorkspacePool::Handle workspace = context_.workspaces->Take();
    int64_t reserved_units = 0;
    const absl::Status status =
        context_.engine->ReadKvHead(*plan_, kv_head, workspace.get(), output_, &reserved_units);
    absl::MutexLock lock(&mutex_);
    reserved_units_ += reserved_units;
    if (status_.ok()) status_ = status;
  }
  // After the last KV head.
  void Finish() {
    absl::MutexLock lock(&mutex_);
    const absl::Status status = context_.engine->EndRead(*plan_, status_, reserved_units_, output_);
    if (!status.ok()) return FillError(status);
    for (const ReadCertificate& certificate : certificates_) {
      *result_->add_certificates() = ReadCertificateToProto(certificate);
    }
    result_->set_outputs(reinterpret_cast<const char*>(outputs_.data()),
                         outputs_.size() * sizeof(float));
    result_->set_tile_sources(reinterpret_cast<const char*>(sources_.data()), sources_.size());
    if (options_.audit) result_->set_first_tile(plan_->first_block * plan_->tiles_per_block());
    result_->set_read_time_ns(context_.clock->MonotonicNs() - start_ns_);
  }

  std::atomic<int32_t> heads_left{0};

 private:
  absl::Status MakePlan() {
    CERTKV_ASSIGN_OR_RETURN(view_, context_.views->Find(ViewId{proto_.view_id()}));
    const int64_t now_ms = context_.clock->NowMs();
    view_->Touch(now_ms);
    CERTKV_ASSIGN_OR_RETURN(queries_, QueriesOf(proto_));
    sink_logits_.assign(proto_.sink_logits().begin(), proto_.sink_logits().end());
    ReadRequest request;
    request.layer = proto_.layer();
    request.query_position = proto_.query_position();
    request.queries = queries_;
    request.sink_logits = sink_logits_;
    request.measure_only = options_.measure_only;
    CERTKV_ASSIGN_OR_RETURN(ReadPlan plan, PlanRead(*view_, request, now_ms));
    plan_ = std::move(plan);
    const CacheSpec& spec = plan_->cache->spec();
    certificates_.resize(spec.query_head_count());
    if (options_.want_outputs) outputs_.resize(int64_t{spec.query_head_count()} * spec.value_dim);
    if (options_.audit) sources_.resize(int64_t{spec.query_head_count()} * plan_->tile_count);
    output_ = {absl::MakeSpan(certificates_), absl::MakeSpan(outputs_), absl::MakeSpan(sources_)};
    return absl::OkStatus();
  }
  void FillError(const absl::Status& status) {
    result_->Clear();
    result_->set_code(static_cast<int32_t>(status.code()));
    result_->set_message(std::string(status.message()));
    result_->set_reason(ReasonOf(status));
  }

  const ReadContext& context_;
  const Read& proto_;
  const ReadJobOptions& options_;
  ResultProto* const result_;
  int64_t start_ns_ = 0;
  std::shared_ptr<View> view_;
  std::vector<float> queries_;
  std::vector<float> sink_logits_;
  std::optional<ReadPlan> plan_;
  std::vector<ReadCertificate> certificates_;
  std::vector<float> outputs_;
  std::vector<uint8_t> sources_;
  ReadOutput output_;
  absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int64_t reserved_units_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Owns itself through the tasks that hold it; calls `done` when the last read has finished.
class ReadJob : public std::enable_shared_from_this<ReadJob> {
 public:
  ReadJob(const ReadContext& context, const ReadJobOptions& options, std::function<void()> done)
      : context_(context), options_(options), done_(std::move(done)) {}

  void Start(const google::protobuf::RepeatedPtrField<Read>& reads,
             google::protobuf::RepeatedPtrField<ResultProto>* results) {
    results->Clear();
    results->Reserve(reads.size());
    for (const Read& read : reads) {
      reads_.push_back(std::make_unique<OneRead>(context_, read, options_, results->Add()));
    }
    reads_left_ = static_cast<int32_t>(reads_.size());
    if (reads_.empty()) {
      boost::asio::post(*context_.io_context, done_);
      return;
    }
    for (const auto& read : reads_) {
      Post([this, raw = read.get()] { Begin(raw); });
    }
  }

 private:
  template <typename Task>
  void Post(Task task) {
    boost::asio::post(*context_.io_context, [self = shared_from_this(), task] { task(); });
  }
  void Begin(OneRead* read) {
    const int32_t head_count = read->Plan();
    if (head_count == 0) return EndOne();
    read->heads_left = head_count;
    for (int32_t head = 1; head < head_count; ++head) {
      Post([this, read, head] { RunHead(read, head); });
    }
    RunHead(read, 0);
  }
  void RunHead(OneRead* read, int32_t head) {
    read->RunKvHead(head);
    if (--read->heads_left > 0) return;
    read->Finish();
    EndOne();
  }
  void EndOne() {
    if (--reads_left_ == 0) done_();
  }

  const ReadContext& context_;
  const ReadJobOptions options_;
  const std::function<void()> done_;
  std::vector<std::unique_ptr<OneRead>> reads_;
  std::atomic<int32_t> reads_left_{0};
};

}  // namespace

void StartReadJob(const ReadContext& context,
                  const google::protobuf::RepeatedPtrField<v1::Read>& reads,
                  const ReadJobOptions& options,
                  google::protobuf::RepeatedPtrField<v1::ReadResult>* results,
                  std::function<void()> done) {
  std::make_shared<ReadJob>(context, options, std::move(done))->Start(reads, results);
}

}  // namespace certkv::certifier
