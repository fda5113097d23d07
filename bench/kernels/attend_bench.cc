// certkv-bench-kernels: certified attention over quantized blocks against our own 16-bit attention.
//
// Both sides run the same loops, prefetch and pages, certificate on. Variants alternate head by
// head within a round, each on heads that no cache holds any more; the median over rounds of thread
// CPU time is reported, and ratios are medians of the rounds' ratios, because clocks and bandwidth
// of shared machines drift.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/bench_data.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/finish_certificate.h"

ABSL_FLAG(int32_t, tokens, 32768, "tokens of a sequence, a multiple of 64");
ABSL_FLAG(int32_t, rounds, 9, "rounds of alternating variants, at least 7");
ABSL_FLAG(int32_t, heads_per_round, 4, "KV heads that each variant reads in a round");
ABSL_FLAG(std::vector<std::string>, dims, std::vector<std::string>({"128", "64"}), "head dims");
ABSL_FLAG(std::vector<std::string>, groups, std::vector<std::string>({"1", "4", "8"}),
          "query heads per KV head");
ABSL_FLAG(double, cache_factor, 8,
          "working set of each variant in last-level caches; 0 reads one head, from the cache");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

// A read's results and scratch, reused.
struct ReadMemory {
  std::vector<float> outputs, lse, block_lse, block_max, half_width, tile_error, terms;
  std::unique_ptr<HugeBuffer> workspace;
  AttendResult result{};

  explicit ReadMemory(const AttendArgs& args) {
    const int64_t atoms = int64_t{args.group_size} * AttendAtomCount(args);
    outputs.resize(args.group_size * args.layout->value_dim);
    lse.resize(args.group_size);
    block_lse.resize(atoms);
    block_max.resize(atoms);
    half_width.resize(atoms);
    tile_error.resize(args.group_size * args.tile_count);
    terms.resize(2 * args.group_size + 1);
    workspace = std::make_unique<HugeBuffer>(AttendWorkspaceBytes(args));
    result = {outputs.data(),
              lse.data(),
              block_lse.data(),
              block_max.data(),
              half_width.data(),
              tile_error.data(),
              terms.data(),
              terms.data() + args.group_size,
              terms.data() + 2 * args.group_size};
  }
};

struct Variant {
  std::string name;
  std::unique_ptr<SealedCache> cache;
  AttendArgs args{};
  std::unique_ptr<ReadMemory> memory;
  int64_t next_head = 0;
  std::vector<double> thread_ns;  // per token, one entry a round
  std::vector<double> wall_ns;
  std::vector<double> sum_ns;  // of a plain read of the same bytes, per token
};

// Sums bytes as fast as they come: the machine's own limit.
uint64_t ReadSum(const uint8_t* data, int64_t size_bytes) {
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  const int64_t count = size_bytes / 64;
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int k = 0; k < 8; ++k) sums[k] += words[8 * i + k];
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

volatile uint64_t g_sink;

Variant MakeVariant(KeyFormat key_format, ValueFormat value_format, int32_t dim, int32_t group_size,
                    const std::vector<float>& queries) {
  Variant variant;
  variant.name = FormatPairName(key_format, value_format);
  const CacheSpec spec = BenchSpec(key_format, value_format, dim, group_size);
  const int32_t tile_count = absl::GetFlag(FLAGS_tokens) / kTileTokens;
  const double factor = absl::GetFlag(FLAGS_cache_factor);
  const auto bytes_min = std::max<int64_t>(
      1, static_cast<int64_t>(factor * static_cast<double>(LastLevelCacheBytes())));
  variant.cache = std::make_unique<SealedCache>(spec, tile_count, bytes_min);
  AttendArgs& args = variant.args;
  args.layout = &variant.cache->layout();
  args.original_dtype = spec.original_dtype;
  args.logit_scale = spec.logit_scale;
  args.group_size = group_size;
  args.queries = queries.data();
  args.tile_count = tile_count;
  args.token_end = int64_t{tile_count} * kTileTokens;
  variant.memory = std::make_unique<ReadMemory>(args);
  return variant;
}

void ReadHead(Variant* variant, Clocks* spent) {
  variant->args.tiles = variant->cache->head(variant->next_head++).data();
  const Clocks begin = ReadClocks();
  const absl::Status status = Attend(Backend::kCpu, variant->args, variant->memory->result,
                                     variant->memory->workspace->data());
  const Clocks end = ReadClocks();
  CERTKV_CHECK(status.ok(), "the benchmark's reads succeed");
  spent->wall_ns += end.wall_ns - begin.wall_ns;
  spent->thread_ns += end.thread_ns - begin.thread_ns;
}

void RunRound(std::vector<Variant>* variants) {
  const int heads = absl::GetFlag(FLAGS_heads_per_round);
  const double tokens = static_cast<double>(absl::GetFlag(FLAGS_tokens)) * heads;
  std::vector<Clocks> spent(variants->size(), Clocks{});
  for (int h = 0; h < heads; ++h) {
    for (size_t v = 0; v < variants->size(); ++v) ReadHead(&(*variants)[v], &spent[v]);
  }
  for (size_t v = 0; v < variants->size(); ++v) {
    Variant& variant = (*variants)[v];
    variant.thread_ns.push_back(spent[v].thread_ns / tokens);
    variant.wall_ns.push_back(spent[v].wall_ns / tokens);
    Clocks begin = ReadClocks();
    for (int h = 0; h < heads; ++h) {
      g_sink = ReadSum(variant.cache->head_data(variant.next_head++), variant.cache->head_bytes());
    }
    variant.sum_ns.push_back((ReadClocks().thread_ns - begin.thread_ns) / tokens);
  }
}

double MedianRatio(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (size_t i = 0; i < above.size(); ++i) ratios.push_back(above[i] / below[i]);
  return Median(ratios);
}

// Microseconds per query of the finishing step over `atom_count` atoms like those of the read.
double FinishMicroseconds(const Variant& variant, int32_t atom_count) {
  const ReadMemory& memory = *variant.memory;
  const auto read_atoms = static_cast<int32_t>(memory.block_lse.size()) / variant.args.group_size;
  std::vector<float> lse(atom_count), max(atom_count), half_width(atom_count);
  for (int32_t a = 0; a < atom_count; ++a) {
    const int32_t from = a % (read_atoms - 1);  // without the sink's
    lse[a] = memory.block_lse[from];
    max[a] = memory.block_max[from];
    half_width[a] = memory.half_width[from];
  }
  FinishArgs args{};
  args.atom_count = atom_count;
  args.block_lse = lse.data();
  args.block_max_logit = max.data();
  args.logit_half_width = half_width.data();
  args.sink_index = -1;
  args.value_radius = memory.result.value_radius[0];
  args.tv_tolerance = 0.2f;
  FinishWorkspace workspace;
  Certificate certificate;
  std::vector<double> times;
  for (int round = 0; round < 64; ++round) {
    const Clocks begin = ReadClocks();
    CERTKV_CHECK(FinishCertificate(Backend::kCpu, args, &workspace, &certificate).ok(),
                 "the benchmark's certificates can be finished");
    times.push_back((ReadClocks().thread_ns - begin.thread_ns) * 1e-3);
  }
  return Median(times);
}

nlohmann::json ReportVariant(const Variant& variant, const Variant& baseline) {
  const double ns = Median(variant.thread_ns);
  const double bytes =
      static_cast<double>(variant.cache->head_bytes()) / absl::GetFlag(FLAGS_tokens);
  const double sum_ns = Median(variant.sum_ns);
  const double ratio = MedianRatio(baseline.thread_ns, variant.thread_ns);
  absl::PrintF("%4d %2d  %-5s %8.2f %8.2f %7.1f %7.1f %6.0f%% %7.2f\n",
               variant.args.layout->head_dim, variant.args.group_size, variant.name, ns,
               Median(variant.wall_ns), bytes / ns, bytes / sum_ns, 100 * sum_ns / ns, ratio);
  std::fflush(stdout);
  return {{"format", variant.name},
          {"head_dim", variant.args.layout->head_dim},
          {"group_size", variant.args.group_size},
          {"tokens", absl::GetFlag(FLAGS_tokens)},
          {"working_set_bytes", variant.cache->head_count() * variant.cache->head_bytes()},
          {"bytes_per_token", bytes},
          {"ns_per_token", ns},
          {"wall_ns_per_token", Median(variant.wall_ns)},
          {"gigabytes_per_second", bytes / ns},
          {"read_sum_gigabytes_per_second", bytes / sum_ns},
          {"share_of_read_sum", sum_ns / ns},
          {"speedup_over_f16", ratio}};
}

void RunShape(int32_t dim, int32_t group_size, nlohmann::json* results) {
  const std::vector<float> queries = BenchQueries(group_size, dim);
  std::vector<Variant> variants;
  variants.push_back(MakeVariant(KeyFormat::kF16, ValueFormat::kF16, dim, group_size, queries));
  variants.push_back(MakeVariant(KeyFormat::kK8, ValueFormat::kV4, dim, group_size, queries));
  variants.push_back(MakeVariant(KeyFormat::kK8, ValueFormat::kV8, dim, group_size, queries));
  RunRound(&variants);  // warms up code and pages, not counted
  for (Variant& variant : variants) {
    variant.thread_ns.clear();
    variant.wall_ns.clear();
    variant.sum_ns.clear();
  }
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) RunRound(&variants);
  const std::string huge_pages = HugePagesInUse();
  for (const Variant& variant : variants) {
    nlohmann::json row = ReportVariant(variant, variants[0]);
    const auto read_atoms = static_cast<int32_t>(variant.memory->block_lse.size()) / group_size;
    row["huge_pages_in_use"] = huge_pages;
    row["finish_us_of_this_read"] = FinishMicroseconds(variant, read_atoms - 1);
    row["finish_us_of_8192_atoms"] = FinishMicroseconds(variant, 8192);
    results->push_back(row);
  }
}

int Main() {
  nlohmann::json results = nlohmann::json::array();
  nlohmann::json run;
  absl::PrintF("   d  G  format     ns/t  wall/t    GB/s sum GB/s  share  vs F16\n");
  for (const std::string& dim_text : absl::GetFlag(FLAGS_dims)) {
    for (const std::string& group_text : absl::GetFlag(FLAGS_groups)) {
      int32_t dim = 0;
      int32_t group_size = 0;
      CERTKV_CHECK(absl::SimpleAtoi(dim_text, &dim) && absl::SimpleAtoi(group_text, &group_size),
                   "--dims and --groups are lists of numbers");
      RunShape(dim, group_size, &results);
    }
  }
  for (const nlohmann::json& row : results) {
    if (row["format"] != "K8V4") continue;
    absl::PrintF("finish K8V4 d %d G %d: %.1f us per query of this read, %.1f us for 8192 atoms\n",
                 row["head_dim"].get<int>(), row["group_size"].get<int>(),
                 row["finish_us_of_this_read"].get<double>(),
                 row["finish_us_of_8192_atoms"].get<double>());
  }
  run = DescribeRun();
  run["rounds"] = absl::GetFlag(FLAGS_rounds);
  std::printf("%s\n", run.dump(2).c_str());
  const std::string path = absl::GetFlag(FLAGS_json);
  if (path.empty()) return 0;
  std::ofstream file(path);
  file << nlohmann::json{{"run", run}, {"results", results}}.dump(2) << "\n";
  if (!file.good()) {
    std::fprintf(stderr, "can't write --json=%s\n", path.c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (absl::GetFlag(FLAGS_tokens) % 64 != 0 || absl::GetFlag(FLAGS_tokens) <= 0 ||
      absl::GetFlag(FLAGS_rounds) < 7) {
    std::fprintf(stderr, "--tokens must be a positive multiple of 64 and --rounds at least 7\n");
    return 2;
  }
  return certkv::bench::Main();
}
