#include "clients/cli/calibrate.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "kernels/core/status.h"
#include "services/common/random_id.h"

namespace certkv::cli {
namespace {

constexpr int32_t kReadsPerCall = 32;

absl::Status CheckTraces(absl::Span<const CalibrationTrace> traces) {
  const auto invalid = [](absl::string_view message) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TRACE_INVALID", message);
  };
  const Trace& first = *traces[0].trace;
  bool has_choosing = false;
  bool has_held_out = false;
  for (const CalibrationTrace& one : traces) {
    if (DigestCacheSpec(one.trace->MakeSpec({})) != DigestCacheSpec(first.MakeSpec({})) ||
        one.trace->layer_numbers() != first.layer_numbers()) {
      return invalid(absl::StrCat("the traces are of ", DescribeCacheSpec(first.MakeSpec({})),
                                  " and of ", DescribeCacheSpec(one.trace->MakeSpec({})),
                                  "; give traces of one model, name and layers included"));
    }
    for (int32_t query = 0; query < one.trace->query_count(); ++query) {
      (IsHeldOut(one.role, query) ? has_held_out : has_choosing) = true;
    }
  }
  if (has_choosing && has_held_out) return absl::OkStatus();
  return invalid(absl::StrCat("the traces have no ", has_choosing ? "held-out" : "choosing",
                              " queries: one trace is split into runs of ", kSplitRun,
                              ", so it needs more than those; record more queries"));
}

// A trace in a store, in one format.
class MeasuredTrace {
 public:
  MeasuredTrace(const CalibrationTrace& trace, const Tolerances& tolerances)
      : trace_(*trace.trace), role_(trace.role), tolerances_(tolerances) {}

  absl::Status Open(const client::Options& services, const Candidate& candidate) {
    CacheSpec spec = trace_.MakeSpec(candidate.format);
    for (size_t layer = 0; layer < candidate.weights.size(); ++layer) {
      spec.layers[layer].witness_weights = candidate.weights[layer];
    }
    client::Options options = services;
    options.worker_name = "certkv-calibrate";
    CERTKV_ASSIGN_OR_RETURN(worker_, client::Worker::Attach(options, spec));
    CERTKV_ASSIGN_OR_RETURN(sequence_, worker_->PutSequence(trace_.token_ids(), trace_.Layers(),
                                                            client::DefaultKeyContext(spec)));
    // At tolerance 0 a bound is as tight as it gets; OBSERVE repairs nothing.
    const Tolerances tightest = {.tv_tolerance = 0, .value_tolerance = 0};
    client::RequestOptions request;
    request.label = "certkv calibrate";
    request.tolerances = &tightest;
    request.read_mode = ReadMode::kObserve;
    CERTKV_ASSIGN_OR_RETURN(
        request_, client::Request::Open(options, absl::StrCat("calibrate-", RandomId()), request));
    CERTKV_ASSIGN_OR_RETURN(attention_, client::Attention::Open(*worker_, *sequence_, *request_));
    return absl::OkStatus();
  }

  absl::Status ReadLayer(int32_t layer, LayerReads* reads) {
    for (int32_t begin = 0; begin < trace_.query_count(); begin += kReadsPerCall) {
      CERTKV_RETURN_IF_ERROR(
          ReadQueries(layer, begin, std::min(begin + kReadsPerCall, trace_.query_count()), reads));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ReadQueries(int32_t layer, int32_t begin, int32_t end, LayerReads* reads) {
    std::vector<std::vector<float>> queries;
    std::vector<client::ReadRequest> requests;
    for (int32_t query = begin; query < end; ++query) {
      queries.push_back(trace_.Queries(layer, query));
      requests.push_back({.layer = layer,
                          .query_position = trace_.query_positions()[query],
                          .queries = queries.back().data()});
    }
    CERTKV_ASSIGN_OR_RETURN(const auto results, attention_->Attend(requests));
    for (int32_t query = begin; query < end; ++query) {
      const client::ReadResult& result = results[query - begin];
      CERTKV_RETURN_IF_ERROR(result.status);
      if (result.in_process) {
        return MakeError(absl::StatusCode::kUnavailable, "CERTIFIER_UNREACHABLE",
                         "the certifier went away, so reads are exact; start again");
      }
      auto& part = IsHeldOut(role_, query) ? reads->held_out : reads->choosing;
      for (const ReadCertificate& certificate : result.certificates) {
        part.push_back(
            {certificate.worst_case_tv, MeetsValueTolerance(certificate, tolerances_) &&
                                            MeetsOutputTolerance(certificate, tolerances_)});
      }
    }
    return absl::OkStatus();
  }

  const Trace& trace_;
  const QueryRole role_;
  const Tolerances& tolerances_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<client::Attention> attention_;
};

absl::StatusOr<LayerWeights> WeightsOf(absl::Span<const CalibrationTrace> traces,
                                       const Candidate& candidate) {
  if (!candidate.is_weighted) return LayerWeights();
  std::vector<ChoosingTrace> choosing;
  for (const CalibrationTrace& one : traces) {
    const QueryRole role = one.role;
    choosing.push_back({one.trace, [role](int32_t query) { return !IsHeldOut(role, query); }});
  }
  return ChooseWeights(choosing, candidate.format);
}

CacheSpec OneLayer(const CacheSpec& spec, int32_t layer, const Candidate& candidate) {
  const FormatChoice& format = candidate.format;
  CacheSpec one = spec;
  one.layers = {spec.layers[layer]};
  one.layers[0].key_format = format.key_format;
  one.layers[0].value_format = format.value_format;
  one.layers[0].witness_bands = format.witness_bands;
  if (!candidate.weights.empty()) one.layers[0].witness_weights = candidate.weights[layer];
  return one;
}

LayerChoice ChooseLayer(const CacheSpec& spec, absl::Span<const Candidate> candidates,
                        int32_t layer, const CalibrationTerms& terms) {
  const float limit = terms.tolerances.tv_tolerance;
  LayerChoice best;
  double best_coverage = -1;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const LayerReads& reads = candidates[i].layers[layer];
    LayerChoice one;
    one.candidate = static_cast<int32_t>(i);
    one.bytes_per_token = BytesPerToken(OneLayer(spec, layer, candidates[i]), SlabKind::kDevice);
    const double coverage = Coverage(reads.choosing, limit);
    one.reaches_coverage = coverage >= terms.coverage;
    const bool is_smaller =
        one.bytes_per_token < best.bytes_per_token ||
        (one.bytes_per_token == best.bytes_per_token && coverage > best_coverage);
    const bool is_better =
        best_coverage < 0 || (one.reaches_coverage != best.reaches_coverage ? one.reaches_coverage
                              : one.reaches_coverage                        ? is_smaller
                                                     : coverage > best_coverage);
    if (!is_better) continue;
    best = one;
    best_coverage = coverage;
  }
  const LayerReads& reads = candidates[best.candidate].layers[layer];
  best.tv_tolerance =
      best.reaches_coverage ? TightestTolerance(reads.choosing, terms.coverage, limit) : limit;
  best.choosing_coverage = Coverage(reads.choosing, best.tv_tolerance);
  best.held_out_coverage = Coverage(reads.held_out, best.tv_tolerance);
  return best;
}

// Choices for the first layers: so many bytes, and so many reads covered.
struct Choices {
  int64_t bytes = 0;
  int64_t covered = 0;
  int32_t candidate = 0;  // of the last of them
  int32_t before = 0;     // index of the Choices for the layers before it
};

// Drops choices that cover no more than others of as many bytes or fewer; the rest by bytes.
void KeepBest(std::vector<Choices>* choices) {
  std::sort(choices->begin(), choices->end(), [](const Choices& a, const Choices& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.covered > b.covered;
  });
  int64_t most = -1;
  const auto is_worse = [&most](const Choices& one) {
    if (one.covered <= most) return true;
    most = one.covered;
    return false;
  };
  choices->erase(std::remove_if(choices->begin(), choices->end(), is_worse), choices->end());
}

// Fewest bytes in all for the coverage of all layers' reads, exactly: layer by layer, of all ways
// to choose for those before it only the ones that no other beats in bytes and in coverage.
std::vector<LayerChoice> ChooseTogether(const CacheSpec& spec,
                                        absl::Span<const Candidate> candidates,
                                        const CalibrationTerms& terms) {
  const float limit = terms.tolerances.tv_tolerance;
  const auto layer_count = static_cast<int32_t>(candidates[0].layers.size());
  std::vector<std::vector<Choices>> best = {{Choices{}}};  // for the first 0, 1, ... layers
  double reads = 0;
  for (int32_t layer = 0; layer < layer_count; ++layer) {
    std::vector<Choices> all;
    for (size_t i = 0; i < candidates.size(); ++i) {
      const std::vector<MeasuredRead>& measured = candidates[i].layers[layer].choosing;
      const int64_t bytes =
          SlabLayout::SlotBytes(OneLayer(spec, layer, candidates[i]), SlabKind::kDevice);
      const int64_t covered =
          std::llround(Coverage(measured, limit) * static_cast<double>(measured.size()));
      for (size_t n = 0; n < best.back().size(); ++n) {
        const Choices& before = best.back()[n];
        all.push_back({before.bytes + bytes, before.covered + covered, static_cast<int32_t>(i),
                       static_cast<int32_t>(n)});
      }
    }
    KeepBest(&all);
    best.push_back(std::move(all));
    reads += static_cast<double>(candidates[0].layers[layer].choosing.size());
  }
  const std::vector<Choices>& last = best.back();
  auto end = std::find_if(last.begin(), last.end(), [&](const Choices& one) {
    return static_cast<double>(one.covered) >= terms.coverage * reads;
  });
  const bool is_reached = end != last.end();
  auto at = static_cast<int32_t>((is_reached ? end : std::prev(end)) - last.begin());
  std::vector<LayerChoice> choices(layer_count);
  for (int32_t layer = layer_count - 1; layer >= 0; --layer) {
    const Choices& chosen = best[layer + 1][at];
    const Candidate& candidate = candidates[chosen.candidate];
    const LayerReads& measured = candidate.layers[layer];
    choices[layer] = {chosen.candidate,
                      is_reached,
                      limit,
                      BytesPerToken(OneLayer(spec, layer, candidate), SlabKind::kDevice),
                      Coverage(measured.choosing, limit),
                      Coverage(measured.held_out, limit)};
    at = chosen.before;
  }
  return choices;
}

UniformFigures FiguresOf(const Trace& trace, const Candidate& candidate, float tv_tolerance) {
  double covered = 0;
  double reads = 0;
  for (const LayerReads& layer : candidate.layers) {
    const auto count = static_cast<double>(layer.held_out.size());
    covered += Coverage(layer.held_out, tv_tolerance) * count;
    reads += count;
  }
  return {BytesPerToken(trace.MakeSpec(candidate.format), SlabKind::kDevice), covered / reads};
}

}  // namespace

bool IsHeldOut(QueryRole role, int32_t query_index) {
  return role == QueryRole::kHeldOut ||
         (role == QueryRole::kSplit && query_index / kSplitRun % 2 == 1);
}

double Coverage(absl::Span<const MeasuredRead> reads, float tv_tolerance) {
  if (reads.empty()) return 0;
  const auto covered = std::count_if(reads.begin(), reads.end(), [&](const MeasuredRead& read) {
    return read.meets_others && read.worst_case_tv <= tv_tolerance;
  });
  return static_cast<double>(covered) / static_cast<double>(reads.size());
}

float TightestTolerance(absl::Span<const MeasuredRead> reads, double coverage,
                        float tv_tolerance_max) {
  if (!(Coverage(reads, tv_tolerance_max) >= coverage)) return -1;
  for (int hundredths = 0;; ++hundredths) {
    const float tolerance = static_cast<float>(hundredths) / 100;
    if (tolerance >= tv_tolerance_max) return tv_tolerance_max;
    if (Coverage(reads, tolerance) >= coverage) return tolerance;
  }
}

double BytesPerToken(const CacheSpec& spec, SlabKind kind) {
  return static_cast<double>(SlabLayout::SlotBytes(spec, kind)) /
         (static_cast<double>(spec.block_tokens) * spec.kv_head_count * spec.layer_count());
}

absl::Status Measure(absl::Span<const CalibrationTrace> traces, const client::Options& services,
                     const Tolerances& tolerances, Candidate* candidate,
                     const CalibrationProgress& progress) {
  CERTKV_RETURN_IF_ERROR(CheckTraces(traces));
  const int32_t layer_count = traces[0].trace->layer_count();
  const auto total = static_cast<int64_t>(traces.size()) * layer_count;
  candidate->layers.assign(layer_count, {});
  CERTKV_ASSIGN_OR_RETURN(candidate->weights, WeightsOf(traces, *candidate));
  int64_t done = 0;
  for (const CalibrationTrace& one : traces) {
    MeasuredTrace measured(one, tolerances);
    absl::Status status = measured.Open(services, *candidate);
    for (int32_t layer = 0; status.ok() && layer < layer_count; ++layer) {
      status = measured.ReadLayer(layer, &candidate->layers[layer]);
      progress(++done, total);
    }
    if (!status.ok()) return WithContext(status, candidate->name);
  }
  return absl::OkStatus();
}

Calibration Choose(const Trace& trace, std::vector<Candidate> candidates,
                   const CalibrationTerms& terms) {
  Calibration calibration;
  calibration.terms = terms;
  calibration.layer_numbers = trace.layer_numbers();
  calibration.candidates = std::move(candidates);
  calibration.spec = trace.MakeSpec({});
  for (const Candidate& candidate : calibration.candidates) {
    calibration.uniform.push_back(FiguresOf(trace, candidate, terms.tolerances.tv_tolerance));
  }
  std::vector<LayerChoice> together;
  if (terms.of_model) together = ChooseTogether(calibration.spec, calibration.candidates, terms);
  double covered = 0;
  for (int32_t layer = 0; layer < trace.layer_count(); ++layer) {
    const LayerChoice choice =
        terms.of_model ? together[layer]
                       : ChooseLayer(calibration.spec, calibration.candidates, layer, terms);
    const Candidate& chosen = calibration.candidates[choice.candidate];
    calibration.spec.layers[layer] = OneLayer(calibration.spec, layer, chosen).layers[0];
    const LayerReads& reads = chosen.layers[layer];
    calibration.choosing_reads += static_cast<int64_t>(reads.choosing.size());
    calibration.held_out_reads += static_cast<int64_t>(reads.held_out.size());
    covered += choice.held_out_coverage * static_cast<double>(reads.held_out.size());
    calibration.layers.push_back(choice);
  }
  calibration.held_out_coverage = covered / static_cast<double>(calibration.held_out_reads);
  calibration.bytes_per_token = BytesPerToken(calibration.spec, SlabKind::kDevice);
  calibration.original_bytes_per_token = BytesPerToken(calibration.spec, SlabKind::kBacking);
  return calibration;
}

}  // namespace certkv::cli
