#include "tests/conformance/adversary.h"

#include <cmath>
#include <iterator>
#include <random>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/reference/tile_codec.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {

namespace {

double Residual(SequenceCase* sequence, int64_t token, int channel) {
  const auto tile = static_cast<int>(token / kTileTokens);
  return sequence->OriginalKey(token, channel) -
         reference::DecodeKey(sequence->layout(), sequence->scan(tile), sequence->detail(tile),
                              static_cast<int>(token % kTileTokens), channel);
}

int64_t TokenOfHead(int g) { return int64_t{5} * g; }

}  // namespace

std::vector<float> QueriesAgainstScales(SequenceCase* sequence, double share) {
  const TileLayout& layout = sequence->layout();
  const int d = layout.head_dim;
  const double half_range = AffineDepthOf(layout.key_format).half_range;
  std::vector<float> queries(int64_t{sequence->spec().group_size} * d);
  for (int g = 0; g < sequence->spec().group_size; ++g) {
    const auto tile = static_cast<int>(TokenOfHead(g) / kTileTokens);
    for (int i = 0; i < d; ++i) {
      const double box =
          half_range * F16ToFloat(reference::ReadKeyScale(layout, sequence->scan(tile), i));
      const double residual = Residual(sequence, TokenOfHead(g), i);
      if (std::fabs(residual) >= share * box) queries[g * d + i] = residual > 0 ? 1.0f : -1.0f;
    }
  }
  return queries;
}

std::vector<float> QueriesAgainstWitness(SequenceCase* sequence) {
  const int d = sequence->layout().head_dim;
  const float* const weights = WitnessWeightsOf(sequence->spec(), 0, 0);
  std::vector<float> queries(int64_t{sequence->spec().group_size} * d);
  std::vector<double> along(d);  // w^2 r: q / w is then parallel to w r
  for (int g = 0; g < sequence->spec().group_size; ++g) {
    double square = 0;
    for (int i = 0; i < d; ++i) {
      const double weight = weights == nullptr ? 1.0 : weights[i];
      along[i] = weight * weight * Residual(sequence, TokenOfHead(g), i);
      square += along[i] * along[i];
    }
    for (int i = 0; i < d; ++i) {
      queries[g * d + i] = static_cast<float>(along[i] / std::sqrt(square));
    }
  }
  return queries;
}

std::vector<float> QueriesAgainstTopTokens(SequenceCase* sequence) {
  const int d = sequence->layout().head_dim;
  std::vector<float> queries = QueriesAgainstWitness(sequence);
  for (int g = 0; g < sequence->spec().group_size; ++g) {
    const int64_t token = TokenOfHead(g);
    double square = 0;
    double along = 0;  // the residual's part along the key must not take the rest away
    for (int i = 0; i < d; ++i) {
      square += std::pow(sequence->OriginalKey(token, i), 2);
      along += sequence->OriginalKey(token, i) * queries[g * d + i];
    }
    const double towards = (along < 0 ? -1 : 1) / std::sqrt(square);
    for (int i = 0; i < d; ++i) {
      queries[g * d + i] = static_cast<float>(std::fabs(towards) * sequence->OriginalKey(token, i) +
                                              (along < 0 ? -1.0 : 1.0) * queries[g * d + i]);
    }
  }
  return queries;
}

std::unique_ptr<SequenceCase> SequenceAgainstCoarseScan(uint64_t seed, Backend quantizer) {
  // Where the key x of a channel is level_max at most, its scale is 1 and coarse step n is
  // [16 n + low, 16 n + high], for n > 0.
  struct Steps {
    const char* format;
    int level_max;
    int low;
    int high;
  };
  constexpr Steps kSteps[] = {
      {"K8V4", 255, 0, 15}, {"K8V8w4", 255, 0, 15}, {"K6V4w1", 252, -1, 13}, {"K4V4", 240, -7, 7}};
  constexpr int32_t kDims[] = {64, 80, 96, 128};
  std::mt19937_64 random(seed);
  const Steps& steps = kSteps[random() % std::size(kSteps)];
  SequenceShape shape = ShapeOfFormat(steps.format);
  shape.head_dim = shape.value_dim = kDims[random() % std::size(kDims)];
  shape.group_size = 8;
  const int d = shape.head_dim;
  const int64_t token_count = int64_t{kTileTokens} * static_cast<int64_t>(2 + random() % 15);
  std::vector<bool> is_positive(d);
  for (int i = 0; i < d; ++i) is_positive[i] = random() % 2 == 0;
  std::vector<uint16_t> keys(token_count * d);
  std::vector<uint16_t> values(token_count * d);
  int level = 0;
  for (int64_t t = 0; t < token_count; ++t) {
    if (t % kSubBlockTokens == 0) level = 1 + static_cast<int>(random() % (random() % 14 + 1));
    const auto place = static_cast<int>(t % kTileTokens);
    const float value = random() % 4 == 0 ? 100.0f : 1.0f;
    for (int i = 0; i < d; ++i) {
      int x = is_positive[i] ? 16 * level + steps.high : 16 * (15 - level) + steps.low;
      if (place < 2) x = is_positive[i] == (place == 0) ? 0 : steps.level_max;  // the range
      keys[t * d + i] = FloatToF16(static_cast<float>(x));
      values[t * d + i] = FloatToF16(random() % 2 == 0 ? value : -value);
    }
  }
  auto sequence = std::make_unique<SequenceCase>(shape, SpecOfShape(shape), keys.data(), d,
                                                 values.data(), d, token_count, quantizer);
  // From the lowest level to the highest, logits differ by 1/4 to 64 nats.
  std::uniform_real_distribution<float> exponent(-2, 6);
  std::vector<float> queries(int64_t{shape.group_size} * d);
  for (int g = 0; g < shape.group_size; ++g) {
    const float step = std::exp2(exponent(random)) /
                       (224.0f * static_cast<float>(d) * sequence->args().logit_scale);
    for (int i = 0; i < d; ++i) queries[g * d + i] = is_positive[i] ? step : -step;
  }
  sequence->SetQueries(std::move(queries));
  return sequence;
}

void AddReadWithCanary(Canary canary, Backend backend, const SequenceCase& sequence,
                       BoundTally* tally) {
  const AttendArgs& args = sequence.args();
  ReadResult result(args);
  ASSERT_NO_FATAL_FAILURE(result.Run(backend, args));
  for (int64_t n = 0; n < int64_t{args.group_size} * result.atom_count(); ++n) {
    if (canary == Canary::kHalfWidth) result.mutable_view()->logit_half_width[n] *= 0.5f;
    if (canary == Canary::kHalfWidth || canary == Canary::kTopHalfWidth) {
      result.mutable_view()->top_half_width[n] *= 0.5f;
    }
  }
  const SequenceRows original = OriginalRows(sequence);
  FinishWorkspace workspace;
  for (int g = 0; g < args.group_size; ++g) {
    const SequenceRows served_rows = ServedRows(sequence, args, g);
    Certificate certificate = FinishHead(backend, args, g, result, 0.0f, &workspace);
    if (canary == Canary::kWorstCaseTv) certificate.worst_case_tv *= 0.5f;
    if (canary == Canary::kOutputBound) certificate.output_error_bound *= 0.5f;
    AddHead(args, g, result, certificate, AttendExactly(original, args, g),
            AttendExactly(served_rows, args, g), tally);
  }
}

}  // namespace certkv::conformance
