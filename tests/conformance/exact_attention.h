// Attention in double, with nothing left out: of the originals, and of what a read serves.
#ifndef CERTKV_TESTS_CONFORMANCE_EXACT_ATTENTION_H_
#define CERTKV_TESTS_CONFORMANCE_EXACT_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "kernels/ops/attend.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {

// One head over the tokens of the range, n = token_end - token_begin.
struct HeadAttention {
  std::vector<double> logit;        // [n] nats
  std::vector<double> probability;  // [n], then the sink's
  double lse = 0;                   // nats, sink included
  std::vector<double> output;       // [d_v]
};

// Rows of the sequence as doubles, [token][dim], so that many reads of one sequence decode it once.
struct SequenceRows {
  std::vector<double> keys;
  std::vector<double> values;
};

// The originals.
SequenceRows OriginalRows(const SequenceCase& sequence);
// What head g reads under args: k^ and v^ (rotated back), or originals by source and in the tail.
SequenceRows ServedRows(const SequenceCase& sequence, const AttendArgs& args, int g);

HeadAttention AttendExactly(const SequenceRows& rows, const AttendArgs& args, int g);

// 1/2 sum |p - p^|, over the tokens and the sink.
double TotalVariation(const HeadAttention& exact, const HeadAttention& served);

// ||a - b||_2.
double Distance(const std::vector<double>& a, absl::Span<const float> b);

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_EXACT_ATTENTION_H_
