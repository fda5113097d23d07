// certkv-bench-soundness: looks for a false certificate in as many (token, head) cells as asked
// for.
//
//   shapes       every shape of the conformance suite, queries drawn for it
//   long         30 tiles and a tail: formats x contents x head dims, 16 heads
//   adversary    queries along the residuals of keys, where half-widths have no room left
//   trace        keys and values of a real model with queries of any of its heads and positions
//   progressive  reads of `long` and `trace` that skip, and of keys at the ends of coarse steps
//
// Everything is compared with attention over the originals in double (tests/conformance). Before it
// counts, the program halves certificates on purpose and must find them. Fails at a violation, with
// the kind and seed that repeat it: --kind=NAME --first_seed=N --cells=1.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/safetensors.h"
#include "kernels/ops/attend_progressive.h"
#include "tests/conformance/adversary.h"
#include "tests/conformance/bound_tally.h"
#include "tests/conformance/progressive_tally.h"
#include "tests/conformance/shapes.h"

ABSL_FLAG(int64_t, cells, 10'000'000, "(token, head) cells to check, at least");
ABSL_FLAG(uint64_t, first_seed, 1, "seed of the first case of each kind");
ABSL_FLAG(std::string, kind, "", "check only this kind");
ABSL_FLAG(int32_t, threads, 0, "threads; 0: one per processor");
ABSL_FLAG(std::string, trace, "tests/data/smollm2-135m-4-layers.safetensors", "the real model's");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using namespace certkv::conformance;  // NOLINT: its tools are all that this program is made of

constexpr float kTolerances[] = {0.02f, 0.1f, 0.5f};
// Decoding a sequence costs more than a read of it.
constexpr int kReadsPerCase = 24;
constexpr uint64_t kShapesEvery = 8;

constexpr const char* kFormats[] = {"K8V4", "K8V8w4", "K6V4w1", "K4V4", "FP8V8w4"};

// What one kind has found so far.
struct Findings {
  int64_t cases = 0;
  BoundTally dense;
  ProgressiveTally skipping;

  int64_t cells() const { return dense.cells + skipping.cells; }
  int64_t violations() const { return dense.violations() + skipping.violations(); }
};

SequenceShape LongShape(uint64_t seed) {
  constexpr Content kContents[] = {Content::kNormal, Content::kOutlier, Content::kNeedle,
                                   Content::kConstant, Content::kDenormal};
  constexpr int32_t kDims[] = {64, 80, 96, 128, 256};
  std::mt19937_64 random(seed);
  SequenceShape shape = ShapeOfFormat(kFormats[random() % std::size(kFormats)]);
  shape.content = kContents[random() % 5];
  shape.dtype = random() % 2 == 0 ? OriginalDtype::kF16 : OriginalDtype::kBf16;
  // Small dims are cheaper and drawn more often.
  shape.head_dim = shape.value_dim = kDims[std::min(random() % 5, random() % 5)];
  shape.tile_count = 30;
  shape.tail_count = static_cast<int32_t>(random() % 64);
  shape.group_size = 16;
  shape.has_sink = random() % 4 == 0;
  shape.soft_cap = random() % 4 == 0 ? 30.0f : 0.0f;
  shape.token_begin = random() % 4 == 0 ? static_cast<int64_t>(random() % 500) : 0;
  return shape;
}

// Layers, heads and queries of the trace.
class Trace {
 public:
  explicit Trace(const std::string& path) {
    auto file = SafetensorsFile::Open(path);
    CERTKV_CHECK(file.ok(), "the trace can be read");
    file_ = *std::move(file);
    const auto keys = file_->Tensor("layers.0.key");
    const auto queries = file_->Tensor("layers.0.query");
    CERTKV_CHECK(keys.ok() && queries.ok(), "the trace has keys and queries of layer 0");
    tokens_ = keys->shape[0];
    kv_heads_ = static_cast<int>(keys->shape[1]);
    dim_ = static_cast<int>(keys->shape[2]);
    query_count_ = queries->shape[0];
    heads_ = static_cast<int>(queries->shape[1]);
  }

  int group_size() const { return heads_ / kv_heads_; }
  int dim() const { return dim_; }

  std::unique_ptr<SequenceCase> Case(uint64_t seed, std::mt19937_64* random) const {
    constexpr int kLayers[] = {0, 9, 19, 29};
    const int layer = kLayers[(*random)() % 4];
    const int kv_head = static_cast<int>((*random)() % kv_heads_);
    SequenceShape shape = ShapeOfFormat(kFormats[seed % std::size(kFormats)]);
    shape.head_dim = shape.value_dim = dim_;
    shape.group_size = group_size();
    CacheSpec spec = SpecOfShape(shape);
    spec.logit_scale = 0.125f;
    spec.rotary_dim = dim_;
    const std::string prefix = absl::StrCat("layers.", layer, ".");
    const int64_t offset = int64_t{kv_head} * dim_;
    const int64_t stride = int64_t{kv_heads_} * dim_;
    return std::make_unique<SequenceCase>(shape, spec, Numbers(prefix + "key") + offset, stride,
                                          Numbers(prefix + "value") + offset, stride, tokens_,
                                          Backend::kCpu);
  }

  // Queries of any layer, head and position.
  std::vector<float> Queries(std::mt19937_64* random) const {
    constexpr int kLayers[] = {0, 9, 19, 29};
    std::vector<float> queries;
    for (int g = 0; g < group_size(); ++g) {
      const auto* from = Numbers(absl::StrCat("layers.", kLayers[(*random)() % 4], ".query")) +
                         static_cast<int64_t>((*random)() % (query_count_ * heads_)) * dim_;
      for (int i = 0; i < dim_; ++i) queries.push_back(F16ToFloat(from[i]));
    }
    return queries;
  }
  int64_t Position(std::mt19937_64* random) const {
    return 1 + static_cast<int64_t>((*random)() % tokens_);
  }

 private:
  const uint16_t* Numbers(const std::string& name) const {
    const auto tensor = file_->Tensor(name);
    CERTKV_CHECK(tensor.ok(), "the trace has keys, values and queries of layers 0, 9, 19 and 29");
    return reinterpret_cast<const uint16_t*>(tensor->bytes.data());
  }

  std::unique_ptr<SafetensorsFile> file_;
  int64_t tokens_ = 0;
  int kv_heads_ = 0;
  int heads_ = 0;
  int dim_ = 0;
  int64_t query_count_ = 0;
};

void AddSkipping(const SequenceCase& sequence, float tolerance, const SequenceRows& original,
                 const SequenceRows& served, Findings* findings) {
  if (!CanSkip(sequence.layout())) return;
  ProgressiveRead read(sequence.args(), tolerance);
  read.Run(Backend::kCpu);
  AddProgressiveRead(Backend::kCpu, read, original, served, &findings->skipping);
}

void CheckShapes(uint64_t seed, Findings* findings) {
  static const std::vector<NamedShape> shapes = AllShapes();
  const SequenceShape& shape = shapes[seed % shapes.size()].shape;
  const SequenceCase sequence(shape, seed, Backend::kCpu);
  AddRead(Backend::kCpu, sequence, &findings->dense);
}

// The queries given, longer or shorter, and turned a little.
std::vector<float> Vary(const std::vector<float>& queries, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  const float length = std::exp(normal(*random));
  std::vector<float> varied = queries;
  for (float& q : varied) q = length * (q + 0.3f * std::fabs(q) * normal(*random));
  return varied;
}

// Reads of one sequence: as it comes, then with varied queries.
template <typename AddOne>
void AddVariedReads(SequenceCase* sequence, uint64_t seed, const AddOne& add_one) {
  const SequenceRows original = OriginalRows(*sequence);
  const SequenceRows served = ServedRows(*sequence, sequence->args(), 0);
  const AttendArgs& args = sequence->args();
  const std::vector<float> queries(args.queries,
                                   args.queries + int64_t{args.group_size} * args.layout->head_dim);
  std::mt19937_64 random(seed);
  for (int n = 0; n < kReadsPerCase; ++n) {
    if (n > 0) sequence->SetQueries(Vary(queries, &random));
    add_one(original, served);
  }
}

void CheckLong(uint64_t seed, Findings* findings) {
  SequenceCase sequence(LongShape(seed), seed, Backend::kCpu);
  AddVariedReads(&sequence, seed, [&](const SequenceRows& original, const SequenceRows& served) {
    AddRead(Backend::kCpu, sequence, original, served, &findings->dense);
  });
}

void CheckAdversary(uint64_t seed, Findings* findings) {
  SequenceShape shape = LongShape(seed);
  const bool is_witness = shape.witness_bands > 0;
  shape.content = seed % 2 == 0 ? Content::kNormal : Content::kOutlier;
  shape.dtype = OriginalDtype::kF16;
  if (shape.head_dim == 256) shape.head_dim = shape.value_dim = 64;
  SequenceCase sequence(shape, seed, Backend::kCpu);
  const SequenceRows original = OriginalRows(sequence);
  const SequenceRows served = ServedRows(sequence, sequence.args(), 0);
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> share(0.1, 0.95);
  for (int n = 0; n < kReadsPerCase; ++n) {
    std::vector<float> queries = is_witness ? QueriesAgainstWitness(&sequence)
                                            : QueriesAgainstScales(&sequence, share(random));
    const auto length = static_cast<float>(std::exp2(8 * share(random) - 4));
    for (float& q : queries) q *= length;
    sequence.SetQueries(std::move(queries));
    AddRead(Backend::kCpu, sequence, original, served, &findings->dense);
  }
}

void CheckTrace(const Trace& trace, bool skips, uint64_t seed, Findings* findings) {
  std::mt19937_64 random(seed);
  const auto sequence = trace.Case(seed, &random);
  const SequenceRows original = OriginalRows(*sequence);
  const SequenceRows served = ServedRows(*sequence, sequence->args(), 0);
  for (int n = 0; n < kReadsPerCase; ++n) {
    sequence->SetQueries(trace.Queries(&random));
    sequence->SetRange(0, trace.Position(&random));
    if (skips) {
      AddSkipping(*sequence, kTolerances[n % 3], original, served, findings);
    } else {
      AddRead(Backend::kCpu, *sequence, original, served, &findings->dense);
    }
  }
}

void CheckCoarseSteps(uint64_t seed, Findings* findings) {
  const auto sequence = SequenceAgainstCoarseScan(seed, Backend::kCpu);
  const SequenceRows original = OriginalRows(*sequence);
  const SequenceRows served = ServedRows(*sequence, sequence->args(), 0);
  for (const float tolerance : kTolerances) {
    AddSkipping(*sequence, tolerance, original, served, findings);
  }
}

void CheckProgressive(const Trace& trace, uint64_t seed, Findings* findings) {
  if (seed % 4 == 1) return CheckCoarseSteps(seed, findings);
  if (seed % 2 == 0) return CheckTrace(trace, true, seed, findings);
  SequenceCase sequence(LongShape(seed), seed, Backend::kCpu);
  AddVariedReads(&sequence, seed, [&](const SequenceRows& original, const SequenceRows& served) {
    AddSkipping(sequence, kTolerances[seed % 3], original, served, findings);
  });
}

constexpr const char* kKinds[] = {"shapes", "long", "adversary", "trace", "progressive"};

void CheckCase(const std::string& kind, const Trace& trace, uint64_t seed, Findings* findings) {
  ++findings->cases;
  if (kind == "shapes") return CheckShapes(seed, findings);
  if (kind == "long") return CheckLong(seed, findings);
  if (kind == "adversary") return CheckAdversary(seed, findings);
  if (kind == "trace") return CheckTrace(trace, false, seed, findings);
  return CheckProgressive(trace, seed, findings);
}

// Does the tally find certificates that are false by a factor of 2?
bool FindsBrokenCertificates() {
  SequenceShape shape = ShapeOfFormat(kFormats[0]);
  shape.tile_count = 4;
  SequenceCase sequence(shape, 1, Backend::kCpu);
  sequence.SetQueries(QueriesAgainstScales(&sequence, 0.9));
  BoundTally sound;
  BoundTally broken;
  AddReadWithCanary(Canary::kNone, Backend::kCpu, sequence, &sound);
  AddReadWithCanary(Canary::kHalfWidth, Backend::kCpu, sequence, &broken);
  return sound.violations() == 0 && broken.half_width_violations > 0;
}

class Search {
 public:
  Search(const Trace* trace, std::vector<std::string> kinds, uint64_t first_seed, int64_t cells)
      : trace_(trace), kinds_(std::move(kinds)), first_seed_(first_seed), cells_wanted_(cells) {}

  void Run(int32_t thread_count) {
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < thread_count; ++i) threads.emplace_back([this] { Work(); });
    for (std::thread& thread : threads) thread.join();
    std::fputc('\n', stderr);
  }
  // After Run.
  const std::map<std::string, Findings>& findings() const { return findings_; }
  int64_t violations() const {
    int64_t sum = 0;
    for (const auto& [kind, found] : findings_) sum += found.violations();
    return sum;
  }

 private:
  struct Case {
    std::string kind;
    uint64_t seed;
  };

  // Of the kind with the fewest cells, so that all get as many; `shapes`, whose cells cost most,
  // now and then.
  Case NextCase() {
    absl::MutexLock lock(&mutex_);
    std::string kind = kinds_.back();
    for (const std::string& other : kinds_) {
      if (other != "shapes" && findings_[other].cells() < findings_[kind].cells()) kind = other;
    }
    if (next_++ % kShapesEvery == 0) kind = kinds_.front();
    return {kind, first_seed_ + begun_[kind]++};
  }

  void Work() {
    while (cells_.load() < cells_wanted_) {
      const Case next = NextCase();
      Findings found;
      CheckCase(next.kind, *trace_, next.seed, &found);
      Add(next.kind, next.seed, found);
    }
  }

  void Add(const std::string& kind, uint64_t seed, const Findings& found) {
    absl::MutexLock lock(&mutex_);
    Findings& all = findings_[kind];
    all.cases += found.cases;
    all.dense.Merge(found.dense);
    all.skipping.Merge(found.skipping);
    const int64_t cells = cells_.fetch_add(found.cells()) + found.cells();
    if (found.violations() > 0) {
      absl::FPrintF(stderr, "\nVIOLATION in kind %s, seed %d: %s; %s\n", kind, seed,
                    found.dense.Summary(), found.skipping.Summary());
    }
    const int percent = static_cast<int>(std::min<int64_t>(100, 100 * cells / cells_wanted_));
    if (percent == percent_) return;
    percent_ = percent;
    absl::FPrintF(stderr, "\r%3d %% of %d cells", percent, cells_wanted_);
  }

  const Trace* const trace_;
  const std::vector<std::string> kinds_;
  const uint64_t first_seed_;
  const int64_t cells_wanted_;
  std::atomic<int64_t> cells_{0};
  absl::Mutex mutex_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, uint64_t> begun_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Findings> findings_;  // under mutex_ while Work runs
  int percent_ = -1;
};

nlohmann::json RowOf(const std::string& kind, const Findings& found) {
  nlohmann::json row = {{"name", kind},
                        {"cases", found.cases},
                        {"cells", found.cells()},
                        {"reads", found.dense.reads + found.skipping.reads},
                        {"violations", found.violations()}};
  if (found.dense.cells > 0) {
    row["median_half_width_over_error"] = found.dense.MedianTightness();
    row["worst_true_tv"] = found.dense.worst_tv;
  }
  if (found.skipping.stored_cells > 0) row["share_read"] = found.skipping.ShareRead();
  return row;
}

int Main() {
  if (!FindsBrokenCertificates()) {
    std::fputs("certkv-bench-soundness: a halved certificate was not found; the tally is broken\n",
               stderr);
    return 1;
  }
  const std::string only = absl::GetFlag(FLAGS_kind);
  std::vector<std::string> kinds(std::begin(kKinds), std::end(kKinds));
  if (!only.empty()) {
    if (std::find(kinds.begin(), kinds.end(), only) == kinds.end()) {
      absl::FPrintF(stderr,
                    "--kind=%s: no such kind; choose shapes, long, adversary, trace or "
                    "progressive\n",
                    only);
      return 1;
    }
    kinds = {only};
  }
  const Trace trace(absl::GetFlag(FLAGS_trace));
  Search search(&trace, kinds, absl::GetFlag(FLAGS_first_seed), absl::GetFlag(FLAGS_cells));
  const int32_t threads = absl::GetFlag(FLAGS_threads);
  const Clocks begin = ReadClocks();
  search.Run(threads > 0 ? threads
                         : std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
  nlohmann::json report = DescribeRun();
  report["seconds"] = static_cast<double>(ReadClocks().wall_ns - begin.wall_ns) * 1e-9;
  report["first_seed"] = absl::GetFlag(FLAGS_first_seed);
  for (const auto& [kind, found] : search.findings()) {
    report["rows"].push_back(RowOf(kind, found));
    absl::PrintF("%-12s %12d cells of %8d reads, %d violations\n", kind, found.cells(),
                 found.dense.reads + found.skipping.reads, found.violations());
  }
  if (!WriteReport(report, absl::GetFlag(FLAGS_json))) return 1;
  return search.violations() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
