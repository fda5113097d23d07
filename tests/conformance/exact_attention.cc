#include "tests/conformance/exact_attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/core/limits.h"
#include "kernels/reference/hadamard.h"
#include "kernels/reference/sequence.h"

namespace certkv::conformance {
namespace {

double Logit(const double* key, const AttendArgs& args, int g) {
  const int d = args.layout->head_dim;
  const float* query = args.queries + int64_t{g} * d;
  double dot = 0;
  for (int i = 0; i < d; ++i) dot += query[i] * key[i];
  const double logit = args.logit_scale * dot;
  return args.soft_cap > 0 ? args.soft_cap * std::tanh(logit / args.soft_cap) : logit;
}

}  // namespace

SequenceRows OriginalRows(const SequenceCase& sequence) {
  SequenceRows rows;
  const CacheSpec& spec = sequence.spec();
  rows.keys.reserve(sequence.token_count() * spec.head_dim);
  rows.values.reserve(sequence.token_count() * spec.value_dim);
  for (int64_t t = 0; t < sequence.token_count(); ++t) {
    for (int i = 0; i < spec.head_dim; ++i) rows.keys.push_back(sequence.OriginalKey(t, i));
    for (int i = 0; i < spec.value_dim; ++i) rows.values.push_back(sequence.OriginalValue(t, i));
  }
  return rows;
}

SequenceRows ServedRows(const SequenceCase& sequence, const AttendArgs& args, int g) {
  SequenceRows rows;
  const CacheSpec& spec = sequence.spec();
  for (int64_t t = 0; t < sequence.token_count(); ++t) {
    std::array<double, kHeadDimMax> row;
    reference::ReadKey(args, g, t, row.data());
    rows.keys.insert(rows.keys.end(), row.begin(), row.begin() + spec.head_dim);
    if (reference::ReadValue(args, g, t, row.data())) {
      reference::RotateHadamard(row.data(), spec.value_dim);
    }
    rows.values.insert(rows.values.end(), row.begin(), row.begin() + spec.value_dim);
  }
  return rows;
}

HeadAttention AttendExactly(const SequenceRows& rows, const AttendArgs& args, int g) {
  HeadAttention head;
  const int64_t token_count = args.token_end - args.token_begin;
  const int d = args.layout->head_dim;
  const int d_v = args.layout->value_dim;
  double max = args.sink_logits != nullptr ? double{args.sink_logits[g]} : -INFINITY;
  for (int64_t n = 0; n < token_count; ++n) {
    head.logit.push_back(Logit(&rows.keys[(args.token_begin + n) * d], args, g));
    max = std::max(max, head.logit.back());
  }
  double sum = 0;
  for (const double logit : head.logit) head.probability.push_back(std::exp(logit - max));
  head.probability.push_back(args.sink_logits != nullptr ? std::exp(args.sink_logits[g] - max)
                                                         : 0.0);
  for (const double weight : head.probability) sum += weight;
  for (double& weight : head.probability) weight /= sum;
  head.lse = max + std::log(sum);
  head.output.assign(d_v, 0);
  for (int64_t n = 0; n < token_count; ++n) {
    const double* value = &rows.values[(args.token_begin + n) * d_v];
    for (int i = 0; i < d_v; ++i) head.output[i] += head.probability[n] * value[i];
  }
  return head;
}

double TotalVariation(const HeadAttention& exact, const HeadAttention& served) {
  double sum = 0;
  for (size_t n = 0; n < exact.probability.size(); ++n) {
    sum += std::fabs(exact.probability[n] - served.probability[n]);
  }
  // At most 1 by definition; the sum of rounded probabilities may come out above.
  return std::min(1.0, sum / 2);
}

double Distance(const std::vector<double>& a, absl::Span<const float> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

}  // namespace certkv::conformance
