#include "clients/cli/demo_run.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/worker.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "kernels/ops/attend.h"
#include "services/common/random_id.h"

namespace certkv::cli {
namespace {

using client::Attention;
using client::ReadRequest;
using client::ReadResult;
using client::Request;
using client::Sequence;
using client::Worker;

// Truth and served softmax are computed in double from float inputs: 1e-12 covers their rounding.
constexpr double kTruthSlack = 1e-12;

int HistogramBucket(double value) {
  // 6 buckets per decade from 1e-4; everything below falls into the first.
  const double position = (std::log10(std::max(value, 1e-4)) + 4) * 6;
  return std::clamp(static_cast<int>(position), 0, DemoHistogram::kBuckets - 1);
}

// One worker with its sequence, and its reads.
struct Reader {
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Sequence> sequence;
  std::unique_ptr<Attention> attention;
};

absl::StatusOr<Reader> MakeReader(const Trace& trace, const DemoRunOptions& options,
                                  const std::string& name) {
  client::Options services = options.services;
  services.worker_name = name;
  const CacheSpec spec = trace.MakeSpec(options.format);
  Reader reader;
  CERTKV_ASSIGN_OR_RETURN(reader.worker, Worker::Attach(services, spec));
  CERTKV_ASSIGN_OR_RETURN(reader.sequence,
                          reader.worker->PutSequence(trace.token_ids(), trace.Layers(),
                                                     client::DefaultKeyContext(spec)));
  return reader;
}

class DemoRun {
 public:
  DemoRun(const Trace& trace, const DemoTruth& truth, const DemoRunOptions& options)
      : trace_(trace), truth_(truth), options_(options), spec_(trace.MakeSpec(options.format)) {}

  absl::StatusOr<DemoRunResult> Run(const Progress& progress);

 private:
  absl::Status Open();
  absl::Status DecodeKeys();
  absl::Status ReadLayer(int32_t layer, const Progress& progress);
  void CheckRead(int32_t layer, int32_t query, const ReadResult& read);
  void CheckHead(int32_t layer, int32_t query, const ReadResult& read, int32_t head);
  void Account(const ReadCertificate& certificate);
  void Finish();

  const Trace& trace_;
  const DemoTruth& truth_;
  const DemoRunOptions& options_;
  const CacheSpec spec_;
  Tolerances tolerances_;
  std::unique_ptr<Request> request_;  // after the readers that use it, so declared before them
  std::vector<Reader> readers_;
  std::vector<std::vector<float>> decoded_;  // [layer * kv_head_count + kv_head]
  std::vector<double> read_times_;
  double relative_error_sum_ = 0;
  double tightness_sum_ = 0;
  int64_t tightness_count_ = 0;
  int64_t certified_first_ = 0;
  DemoRunResult result_;
};

absl::Status DemoRun::Open() {
  for (const char* name : {"demo-worker-a", "demo-worker-b"}) {
    CERTKV_ASSIGN_OR_RETURN(Reader reader, MakeReader(trace_, options_, name));
    readers_.push_back(std::move(reader));
  }
  tolerances_.tv_tolerance = options_.tv_tolerance;
  tolerances_.skip_tolerance = options_.skip_tolerance;
  client::RequestOptions request_options;
  request_options.label = absl::StrCat("demo: ", options_.format_name, " of ", trace_.model());
  request_options.tolerances = &tolerances_;
  const std::string request_id =
      absl::StrCat("demo-", options_.format_name, "-", RandomId() % 1000000);
  CERTKV_ASSIGN_OR_RETURN(request_, Request::Open(options_.services, request_id, request_options));
  for (Reader& reader : readers_) {
    CERTKV_ASSIGN_OR_RETURN(reader.attention,
                            Attention::Open(*reader.worker, *reader.sequence, *request_));
    reader.attention->SetAudit(true);
  }
  return DecodeKeys();
}

absl::Status DemoRun::DecodeKeys() {
  const std::vector<client::LayerKv> layers = trace_.Layers();
  for (int32_t layer = 0; layer < trace_.layer_count(); ++layer) {
    for (int32_t kv_head = 0; kv_head < spec_.kv_head_count; ++kv_head) {
      CERTKV_ASSIGN_OR_RETURN(std::vector<float> keys,
                              DecodeServedKeys(*readers_[0].worker, *readers_[0].sequence,
                                               layers[layer], layer, kv_head));
      decoded_.push_back(std::move(keys));
    }
  }
  return absl::OkStatus();
}

absl::Status DemoRun::ReadLayer(int32_t layer, const Progress& progress) {
  for (size_t turn = 0; turn < readers_.size(); ++turn) {
    std::vector<int32_t> mine;  // query indices of this worker
    std::vector<std::vector<float>> queries;
    for (int32_t query = static_cast<int32_t>(turn); query < trace_.query_count();
         query += static_cast<int32_t>(readers_.size())) {
      mine.push_back(query);
      queries.push_back(trace_.Queries(layer, query));
    }
    std::vector<ReadRequest> reads;
    for (size_t i = 0; i < mine.size(); ++i) {
      ReadRequest read;
      read.layer = layer;
      read.query_position = trace_.query_positions()[mine[i]];
      read.queries = queries[i].data();
      reads.push_back(read);
    }
    CERTKV_ASSIGN_OR_RETURN(std::vector<ReadResult> results,
                            readers_[turn].attention->Attend(reads));
    for (size_t i = 0; i < mine.size(); ++i) {
      CheckRead(layer, mine[i], results[i]);
      progress(result_.reads + result_.failed_reads,
               int64_t{trace_.layer_count()} * trace_.query_count() * spec_.query_head_count());
    }
  }
  return absl::OkStatus();
}

void DemoRun::CheckRead(int32_t layer, int32_t query, const ReadResult& read) {
  if (!read.status.ok()) {
    result_.failed_reads += spec_.query_head_count();
    return;
  }
  read_times_.push_back(static_cast<double>(read.read_time_ns));
  for (int32_t head = 0; head < spec_.query_head_count(); ++head) {
    CheckHead(layer, query, read, head);
  }
}

void DemoRun::CheckHead(int32_t layer, int32_t query, const ReadResult& read, int32_t head) {
  const ReadCertificate& certificate = read.certificates[head];
  const HeadTruth& truth = truth_.Of(layer, query, head);
  const std::vector<float> queries = trace_.Queries(layer, query);
  const float* q = queries.data() + int64_t{head} * spec_.head_dim;
  const std::vector<client::LayerKv> layers = trace_.Layers();
  const auto& decoded = decoded_[layer * spec_.kv_head_count + head / spec_.group_size];
  const int64_t token_end = trace_.query_positions()[query] + 1;

  const size_t tiles = read.tile_sources.size() / spec_.query_head_count();
  std::vector<uint8_t> sources_of_tiles(read.first_tile + tiles);
  for (size_t i = 0; i < tiles; ++i) {
    sources_of_tiles[read.first_tile + i] = read.tile_sources[head * tiles + i];
  }
  const auto softmax = [&](absl::Span<const uint8_t> sources) {
    return ComputeServedSoftmax(spec_, layers[layer], head, q, decoded, sources, token_end);
  };
  const double true_tv = TotalVariation(truth.probabilities, softmax(sources_of_tiles));
  const bool repaired_keys = std::any_of(sources_of_tiles.begin(), sources_of_tiles.end(),
                                         [](uint8_t x) { return (x & kSourceOriginalKeys) != 0; });
  const double unrepaired_tv =
      repaired_keys ? TotalVariation(truth.probabilities, softmax({})) : true_tv;

  const absl::Span<const float> output(read.outputs.data() + int64_t{head} * spec_.value_dim,
                                       spec_.value_dim);
  const double error = Distance(truth.output, output);
  // What a first read served that skipped and missed isn't known any more.
  const bool first_is_known = options_.skip_tolerance == 0 || certificate.skipped_tokens > 0;
  // Compared so that a NaN is a violation.
  const bool holds =
      true_tv <= certificate.worst_case_tv + kTruthSlack &&
      (!first_is_known || unrepaired_tv <= certificate.first_worst_case_tv + kTruthSlack) &&
      error <= certificate.output_error_bound + kTruthSlack;
  if (!holds) ++result_.violations;
  result_.worst_true_tv = std::max(result_.worst_true_tv, true_tv);
  result_.worst_unrepaired_tv = std::max(result_.worst_unrepaired_tv, unrepaired_tv);
  if (certificate.output_error_bound > 0) {
    result_.worst_error_share =
        std::max(result_.worst_error_share, error / certificate.output_error_bound);
  }
  relative_error_sum_ += error / std::max(Norm(truth.output), 1e-30);
  if (unrepaired_tv > 1e-9) {
    tightness_sum_ += certificate.first_worst_case_tv / unrepaired_tv;
    ++tightness_count_;
  }
  ++result_.histogram.bound[HistogramBucket(certificate.first_worst_case_tv)];
  ++result_.histogram.truth[HistogramBucket(unrepaired_tv)];
  Account(certificate);
}

void DemoRun::Account(const ReadCertificate& certificate) {
  ++result_.reads;
  const bool certified =
      certificate.outcome == Outcome::kCertified && MeetsTolerances(certificate, tolerances_);
  if (!certified && certificate.outcome != Outcome::kExact) ++result_.uncertified_outputs;
  if (certificate.outcome == Outcome::kExact) ++result_.exact_outputs;
  if (certificate.rung == Rung::kNone) {
    if (certified) ++certified_first_;
  } else {
    ++result_.repairs[certificate.rung];
  }
  result_.repair_bytes += certificate.repair_bytes;
  result_.read_tokens += certificate.read_tokens;
  result_.skipped_tokens += certificate.skipped_tokens;
  result_.read_bytes += certificate.read_bytes;
  result_.worst_bound = std::max(result_.worst_bound, double{certificate.worst_case_tv});
  result_.worst_first_bound =
      std::max(result_.worst_first_bound, double{certificate.first_worst_case_tv});
}

void DemoRun::Finish() {
  const auto reads = static_cast<double>(std::max<int64_t>(result_.reads, 1));
  const Worker& worker = *readers_[0].worker;
  result_.format = options_.format_name;
  result_.tv_tolerance = options_.tv_tolerance;
  result_.skip_tolerance = options_.skip_tolerance;
  result_.tokens = trace_.token_count();
  result_.blocks = static_cast<int32_t>(readers_[0].sequence->blocks().size());
  result_.blocks_shared = readers_[1].sequence->shared_block_count();
  result_.original_bytes = result_.blocks * worker.backing_layout().slot_bytes();
  result_.device_bytes = result_.blocks * worker.device_layout().slot_bytes();
  result_.capacity = static_cast<double>(worker.backing_layout().slot_bytes()) /
                     static_cast<double>(worker.device_layout().slot_bytes());
  result_.coverage = static_cast<double>(certified_first_) / reads;
  result_.mean_relative_error = relative_error_sum_ / reads;
  result_.mean_bound_over_truth =
      tightness_sum_ / static_cast<double>(std::max<int64_t>(tightness_count_, 1));
  if (!read_times_.empty()) {
    const auto middle = read_times_.begin() + static_cast<int64_t>(read_times_.size() / 2);
    std::nth_element(read_times_.begin(), middle, read_times_.end());
    result_.read_nanoseconds = *middle;
  }
}

absl::StatusOr<DemoRunResult> DemoRun::Run(const Progress& progress) {
  CERTKV_RETURN_IF_ERROR(Open());
  for (int32_t layer = 0; layer < trace_.layer_count(); ++layer) {
    CERTKV_RETURN_IF_ERROR(ReadLayer(layer, progress));
  }
  Finish();
  CERTKV_ASSIGN_OR_RETURN(result_.risk, request_->Close());
  return result_;
}

}  // namespace

DemoTruth::DemoTruth(const Trace& trace, const Progress& progress)
    : query_count_(trace.query_count()) {
  const CacheSpec spec = trace.MakeSpec({});
  head_count_ = spec.query_head_count();
  const std::vector<client::LayerKv> layers = trace.Layers();
  for (int32_t layer = 0; layer < trace.layer_count(); ++layer) {
    for (int32_t query = 0; query < query_count_; ++query) {
      const std::vector<float> queries = trace.Queries(layer, query);
      for (int32_t head = 0; head < head_count_; ++head) {
        truths_.push_back(ComputeHeadTruth(spec, layers[layer], head,
                                           queries.data() + int64_t{head} * spec.head_dim, 0,
                                           trace.query_positions()[query] + 1));
      }
      progress(layer * query_count_ + query + 1, int64_t{trace.layer_count()} * query_count_);
    }
  }
}

absl::StatusOr<DemoRunResult> RunDemo(const Trace& trace, const DemoTruth& truth,
                                      const DemoRunOptions& options, const Progress& progress) {
  return DemoRun(trace, truth, options).Run(progress);
}

}  // namespace certkv::cli
