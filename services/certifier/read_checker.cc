#include "services/certifier/read_checker.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::certifier {
namespace {

// DequantizeTile rounds keys to float, 2^-24 of a logit below 2^10 nats; doubles add less.
constexpr double kTruthErrorNat = 0x1p-12;
constexpr double kTruthErrorTv = kTruthErrorNat;
constexpr double kTruthErrorRelative = 1e-6;

double Cap(const CacheSpec& spec, double logit) {
  return spec.soft_cap > 0 ? spec.soft_cap * std::tanh(logit / spec.soft_cap) : logit;
}

// exp(logit - max) / sum in place; -infinity has weight 0. The sink takes its share.
void Softmax(double sink_logit, std::vector<double>* logits) {
  double max = sink_logit;
  for (const double logit : *logits) max = std::max(max, logit);
  double sum = std::exp(sink_logit - max);
  for (double& logit : *logits) sum += logit = std::exp(logit - max);
  for (double& weight : *logits) weight /= sum;
}

double SinkLogit(const ReadRequest& request, int32_t query_head) {
  return request.sink_logits.empty() ? -std::numeric_limits<double>::infinity()
                                     : double{request.sink_logits[query_head]};
}

}  // namespace

ExactAttention ExactAttentionOf(const FakeCache& fake, const ReadRequest& request,
                                int32_t query_head) {
  const CacheSpec& spec = fake.spec();
  const int32_t kv_head = query_head / spec.group_size;
  const float* query = request.queries.data() + int64_t{query_head} * spec.head_dim;
  const int32_t window = spec.layers[request.layer].sliding_window;
  const int64_t end = request.query_position + 1;
  const int64_t begin = window == 0 ? 0 : std::max<int64_t>(0, end - window);
  ExactAttention exact;
  exact.weights.assign(end, -std::numeric_limits<double>::infinity());
  for (int64_t t = begin; t < end; ++t) {
    const uint16_t* key = fake.data().key(spec, request.layer, kv_head, t);
    double dot = 0;
    for (int32_t i = 0; i < spec.head_dim; ++i) {
      dot += double{query[i]} * OriginalToFloat(spec.original_dtype, key[i]);
    }
    exact.weights[t] = Cap(spec, spec.logit_scale * dot);
  }
  Softmax(SinkLogit(request, query_head), &exact.weights);
  exact.output.assign(spec.value_dim, 0);
  for (int64_t t = begin; t < end; ++t) {
    const uint16_t* value = fake.data().value(spec, request.layer, kv_head, t);
    double norm_square = 0;
    for (int32_t i = 0; i < spec.value_dim; ++i) {
      const double v = OriginalToFloat(spec.original_dtype, value[i]);
      exact.output[i] += exact.weights[t] * v;
      norm_square += v * v;
    }
    exact.value_norm_max = std::max(exact.value_norm_max, std::sqrt(norm_square));
  }
  return exact;
}

double ServedTotalVariation(const AttendArgs& args, int32_t g, const ReadPlan& plan,
                            const ExactAttention& exact, const uint8_t* sub_blocks_read) {
  const CacheSpec& spec = plan.cache->spec();
  const int64_t first_token = int64_t{plan.first_block} * spec.block_tokens;
  const float* query = args.queries + int64_t{g} * spec.head_dim;
  std::vector<double> weights(exact.weights.size(), -std::numeric_limits<double>::infinity());
  std::vector<float> decoded(int64_t{kTileTokens} * spec.head_dim);
  int32_t decoded_tile = -1;
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    const int64_t tile = t / kTileTokens;
    const bool in_tail = tile >= args.tile_count;
    if (!in_tail && sub_blocks_read != nullptr &&
        (sub_blocks_read[tile] >> (t % kTileTokens / kSubBlockTokens) & 1) == 0) {
      continue;  // skipped: its served weight is 0
    }
    const bool original =
        in_tail || (args.tile_sources != nullptr &&
                    args.tile_sources[int64_t{g} * args.tile_count + tile] & kSourceOriginalKeys);
    if (!original && decoded_tile != tile) {
      CERTKV_CHECK(DequantizeTile(*args.layout, args.tiles[tile].scan, args.tiles[tile].detail,
                                  decoded.data(), nullptr)
                       .ok(),
                   "a tile that was attended can be decoded");
      decoded_tile = static_cast<int32_t>(tile);
    }
    double dot = 0;
    for (int32_t i = 0; i < spec.head_dim; ++i) {
      const int64_t row = t % kTileTokens;
      double key = 0;
      if (in_tail) {
        const int64_t tail_row = t - int64_t{args.tile_count} * kTileTokens;
        key = OriginalToFloat(spec.original_dtype, args.tail_keys[tail_row * spec.head_dim + i]);
      } else if (original) {
        key = OriginalToFloat(spec.original_dtype,
                              args.tiles[tile].original_keys[row * spec.head_dim + i]);
      } else {
        key = decoded[row * spec.head_dim + i];
      }
      dot += query[i] * key;
    }
    weights[first_token + t] = Cap(spec, spec.logit_scale * dot);
  }
  const double sink = args.sink_logits == nullptr ? -std::numeric_limits<double>::infinity()
                                                  : double{args.sink_logits[g]};
  Softmax(sink, &weights);
  double distance = 0;
  double served_sum = 0;
  double exact_sum = 0;
  for (size_t t = 0; t < weights.size(); ++t) {
    distance += std::fabs(weights[t] - exact.weights[t]);
    served_sum += weights[t];
    exact_sum += exact.weights[t];
  }
  return (distance + std::fabs(served_sum - exact_sum)) / 2;  // the sink is a token too
}

ReadChecker::ReadChecker(FakeCache* fake, ReadKernels kernels)
    : fake_(fake), kernels_(std::move(kernels)) {}

absl::Status ReadChecker::Read(const View& view, const ReadRequest& request, int64_t now_ms) {
  const CacheSpec& spec = fake_->spec();
  CERTKV_ASSIGN_OR_RETURN(const ReadPlan plan, PlanRead(view, request, now_ms));
  plan_ = &plan;
  exact_.clear();
  for (int32_t head = 0; head < spec.query_head_count(); ++head) {
    exact_.push_back(ExactAttentionOf(*fake_, request, head));
  }
  true_tv_.assign(spec.query_head_count(), std::numeric_limits<double>::quiet_NaN());
  output_error_.assign(spec.query_head_count(), std::numeric_limits<double>::quiet_NaN());
  certificates_.assign(spec.query_head_count(), ReadCertificate());
  outputs_.assign(int64_t{spec.query_head_count()} * spec.value_dim,
                  std::numeric_limits<float>::quiet_NaN());
  ReadKernels watched = kernels_;
  const auto watch = [this, &request, &spec](const AttendArgs& args,
                                             const uint8_t* sub_blocks_read) {
    for (int32_t g = 0; g < args.group_size; ++g) {
      // Which head is it? The one whose query it is.
      const float* row = args.queries + int64_t{g} * spec.head_dim;
      for (int32_t head = 0; head < spec.query_head_count(); ++head) {
        const float* query = request.queries.data() + int64_t{head} * spec.head_dim;
        if (!std::equal(row, row + spec.head_dim, query)) continue;
        const uint8_t* read =
            sub_blocks_read == nullptr ? nullptr : sub_blocks_read + int64_t{g} * args.tile_count;
        true_tv_[head] = ServedTotalVariation(args, g, *plan_, exact_[head], read);
      }
    }
    if (after_attend) after_attend();
  };
  watched.attend = [this, &watch](const AttendArgs& args, const AttendResult& result,
                                  void* workspace) {
    CERTKV_RETURN_IF_ERROR(kernels_.attend(args, result, workspace));
    watch(args, nullptr);
    return absl::OkStatus();
  };
  if (kernels_.attend_on_device != nullptr) {
    watched.attend_on_device = [this, &watch](const AttendArgs& args, const AttendResult& result,
                                              void* workspace) {
      CERTKV_RETURN_IF_ERROR(kernels_.attend_on_device(args, result, workspace));
      watch(args, nullptr);
      return absl::OkStatus();
    };
  }
  watched.attend_progressive = [this, &watch](const ProgressiveArgs& args,
                                              const ProgressiveResult& result, void* workspace) {
    CERTKV_RETURN_IF_ERROR(kernels_.attend_progressive(args, result, workspace));
    watch(args.read, result.sub_blocks_read);
    return absl::OkStatus();
  };
  const ReadEngine engine(watched, &counters_);
  const absl::Status status =
      engine.Read(plan, &workspace_, {absl::MakeSpan(certificates_), absl::MakeSpan(outputs_)});
  if (status.ok()) {
    for (int32_t head = 0; head < spec.query_head_count(); ++head) CheckHead(plan, head);
  }
  return status;
}

void ReadChecker::CheckHead(const ReadPlan& plan, int32_t query_head) {
  const CacheSpec& spec = fake_->spec();
  const ReadCertificate& certificate = certificates_[query_head];
  const ExactAttention& exact = exact_[query_head];
  const auto violate = [&](const auto&... what) {
    violations_.push_back(absl::StrCat("layer ", certificate.layer, " head ", query_head,
                                       " position ", certificate.query_position, " ",
                                       RungName(certificate.rung), ": ", what...));
  };
  double error_square = 0;
  for (int32_t i = 0; i < spec.value_dim; ++i) {
    const double error = exact.output[i] - outputs_[int64_t{query_head} * spec.value_dim + i];
    error_square += error * error;
  }
  const double error = std::sqrt(error_square);
  output_error_[query_head] = error;
  const double true_tv = true_tv_[query_head];
  if (!(true_tv <= certificate.worst_case_tv + kTruthErrorTv)) {
    violate("true TV ", true_tv, " is above its bound ", certificate.worst_case_tv);
  }
  const double truth_error = kTruthErrorRelative * exact.value_norm_max;
  if (!(error <= certificate.output_error_bound + truth_error)) {
    violate("output error ", error, " is above its bound ", certificate.output_error_bound);
  }
  if (!(certificate.value_radius >= exact.value_norm_max * (1 - kTruthErrorRelative))) {
    violate("value_radius ", certificate.value_radius, " is below ", exact.value_norm_max);
  }
  const HeadTerms terms = TermsOf(*plan.snapshot.policy, certificate.layer, query_head);
  const Tolerances& tolerances = terms.tolerances;
  if (terms.exact && plan.mode != ReadMode::kObserve && certificate.outcome != Outcome::kExact) {
    violate("not EXACT although its lease says so");
  }
  const int64_t covered = certificate.read_tokens + certificate.skipped_tokens;
  if (covered != plan.token_end - plan.token_begin || certificate.read_bytes <= 0) {
    violate("its record says ", certificate.read_tokens, " tokens read, ",
            certificate.skipped_tokens, " skipped, ", certificate.read_bytes, " bytes");
  }
  if (certificate.skipped_tokens > 0 &&
      (tolerances.skip_tolerance == 0 || certificate.rung != Rung::kNone)) {
    violate("skipped ", certificate.skipped_tokens, " tokens though it must not");
  }
  switch (certificate.outcome) {
    case Outcome::kCertified:
      if (!(true_tv <= tolerances.tv_tolerance + kTruthErrorTv)) {
        violate("CERTIFIED with true TV ", true_tv, ", tolerance ", tolerances.tv_tolerance);
      }
      if (!MeetsTolerances(certificate, tolerances)) violate("CERTIFIED outside its tolerances");
      break;
    case Outcome::kExact:
      if (!(true_tv <= kTruthErrorTv)) violate("EXACT with true TV ", true_tv);
      if (!(error <= 1e-3 * (1 + exact.value_norm_max))) violate("EXACT with error ", error);
      if (certificate.value_term != 0) violate("EXACT with value_term ", certificate.value_term);
      break;
    case Outcome::kObserved:
      if (plan.mode != ReadMode::kObserve) violate("OBSERVED outside mode OBSERVE");
      break;
    default:
      violate("outcome ", static_cast<int>(certificate.outcome));
  }
}

std::vector<float> RandomQueries(const CacheSpec& spec, float scale, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<float> queries(int64_t{spec.query_head_count()} * spec.head_dim);
  for (float& query : queries) query = normal(*random) * scale;
  return queries;
}

}  // namespace certkv::certifier
