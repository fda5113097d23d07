// Which format and tolerance each layer of a model needs, measured on traces.
//
// Every candidate format is put into a real store, and every query of the traces is read from there
// with nothing repaired. A read (of one query head) is covered at a tolerance when it needs no
// repair: its worst_case_tv is within it, and value and output parts are within the policy's.
// Queries are split: those that choose have no part in the figures that are expected.
#ifndef CERTKV_CLIENTS_CLI_CALIBRATE_H_
#define CERTKV_CLIENTS_CLI_CALIBRATE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "clients/cli/trace.h"
#include "clients/cli/witness_weights.h"
#include "clients/cpp/options.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/policy.h"
#include "kernels/core/slab_layout.h"

namespace certkv::cli {

// Which of a trace's queries choose, and which tell what to expect.
enum class QueryRole : uint8_t {
  kSplit,    // runs of kSplitRun positions by turns, the first run chooses
  kChoose,   // all choose
  kHeldOut,  // all are held out
};
inline constexpr int32_t kSplitRun = 8;
bool IsHeldOut(QueryRole role, int32_t query_index);

struct CalibrationTrace {
  const Trace* trace;  // borrowed
  QueryRole role;
};

// One read of one query head, nothing repaired.
struct MeasuredRead {
  float worst_case_tv;
  bool meets_others;  // the tolerances of values and output
};
struct LayerReads {
  std::vector<MeasuredRead> choosing;
  std::vector<MeasuredRead> held_out;
};
struct Candidate {
  std::string name;  // ParseWeightedFormat
  FormatChoice format;
  std::vector<LayerReads> layers;  // as in the traces
  bool is_weighted = false;
  LayerWeights weights = {};  // chosen by Measure; empty: none
};

// Share of reads that are covered; 0 of none.
double Coverage(absl::Span<const MeasuredRead> reads, float tv_tolerance);

// The smallest tolerance, in hundredths, at which a share of at least `coverage` is covered; < 0
// when that is not so at `tv_tolerance_max`, which is also the most that is given.
float TightestTolerance(absl::Span<const MeasuredRead> reads, double coverage,
                        float tv_tolerance_max);

// Bytes of one token and KV head in a tier.
double BytesPerToken(const CacheSpec& spec, SlabKind kind);

struct LayerChoice {
  int32_t candidate = 0;         // index
  bool reaches_coverage = true;  // false: no candidate does; the one that comes closest
  float tv_tolerance = 0;
  double bytes_per_token = 0;
  double choosing_coverage = 0;  // at tv_tolerance, of the queries that chose
  double held_out_coverage = 0;  // of those that did not
};
struct UniformFigures {  // of one candidate in every layer, at the largest tolerance
  double bytes_per_token = 0;
  double held_out_coverage = 0;
};
struct CalibrationTerms {
  Tolerances tolerances;   // the loosest that a read may have
  double coverage = 0.95;  // in (0, 1]
  bool of_model = false;   // of the reads of all layers together, and not of each layer
};
struct Calibration {
  CalibrationTerms terms;
  std::vector<int32_t> layer_numbers;  // in the model
  CacheSpec spec;                      // with the chosen formats
  std::vector<Candidate> candidates;
  std::vector<UniformFigures> uniform;  // as candidates
  std::vector<LayerChoice> layers;
  int64_t choosing_reads = 0;  // per candidate
  int64_t held_out_reads = 0;
  double bytes_per_token = 0;
  double original_bytes_per_token = 0;
  double held_out_coverage = 0;  // of all reads, each layer at its tolerance
};

// Reads done and to do.
using CalibrationProgress = std::function<void(int64_t, int64_t)>;

// Reads every trace from the servers of `services` in the format of `candidate`, whose weights are
// chosen first, where it has some, from the queries that choose.
// Errors: InvalidArgument [TRACE_INVALID], the traces are of different models, or of too few
//         queries for a part of the split; those of the services, naming the format.
absl::Status Measure(absl::Span<const CalibrationTrace> traces, const client::Options& services,
                     const Tolerances& tolerances, Candidate* candidate,
                     const CalibrationProgress& progress);

// Chooses for each layer the candidate of fewest bytes whose choosing queries are covered as
// `terms` say at the largest tolerance (of equal bytes the one that covers more), and then the
// tightest tolerance at which they still are. With terms.of_model the candidates of fewest bytes in
// all that cover so much of all layers' reads, at the largest tolerance; where none do, those that
// cover most. `trace` is one of those measured.
Calibration Choose(const Trace& trace, std::vector<Candidate> candidates,
                   const CalibrationTerms& terms);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_CALIBRATE_H_
