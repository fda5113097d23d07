// certkv-bench-kernels: certified attention over quantized blocks against our own 16-bit attention,
// the finishing step and sealing.
//
// Both sides run the same loops, prefetch and pages. The baseline F16 is read under the best of
// several prefetch schedules, every other row under the schedule that ships. Variants alternate
// head by head within a round, each on heads that no cache holds any more; the median over rounds
// of thread CPU time is reported, and ratios are medians of the rounds' ratios, because clocks and
// bandwidth of shared machines drift.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/attend_variants.h"
#include "bench/kernels/bench_data.h"
#include "bench/kernels/bench_report.h"
#include "bench/kernels/progressive_bench.h"
#include "bench/kernels/step_bench.h"
#include "kernels/core/check.h"

ABSL_FLAG(std::vector<std::string>, tokens, std::vector<std::string>({"32768"}),
          "tokens of a sequence, multiples of 64");
ABSL_FLAG(int32_t, rounds, 9, "rounds of alternating variants, at least 7");
ABSL_FLAG(int32_t, heads_per_round, 4, "KV heads that each variant reads in a round");
ABSL_FLAG(std::vector<std::string>, dims, std::vector<std::string>({"128", "64"}), "head dims");
ABSL_FLAG(std::vector<std::string>, groups, std::vector<std::string>({"1", "4", "8"}),
          "query heads per KV head");
ABSL_FLAG(double, cache_factor, 8,
          "working set of each variant in last-level caches; 0 reads one head, from the cache");
ABSL_FLAG(bool, steps, true, "also the finishing step and sealing");
ABSL_FLAG(bool, dense, true, "the dense reads, and with them the finishing step");
ABSL_FLAG(bool, dithered, true, "dithered keys among them, which take most of the time");
ABSL_FLAG(bool, progressive, true, "also reads that skip");
ABSL_FLAG(std::string, trace, "tests/data/smollm2-135m-4-layers.safetensors",
          "for reads that skip; empty: planted data alone");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

// Certified and, where there are such kernels, uncertified reads of one format.
struct Format {
  KeyFormat key_format;
  ValueFormat value_format;
  int32_t witness_bands;
};
constexpr Format kFormats[] = {{KeyFormat::kK8, ValueFormat::kV4, 0},
                               {KeyFormat::kK8, ValueFormat::kV8, 0},
                               {KeyFormat::kK8D, ValueFormat::kV8, 0},
                               {KeyFormat::kK6, ValueFormat::kV4, 1}};
constexpr char kUncertified[] = "/uncertified";
constexpr char kWithout[] = "/without-";

// Tried for the baseline, beside its own.
const std::vector<cpu::PrefetchSchedule> kSchedules = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {2, 3},
                                                       {3, 2}, {3, 3}, {4, 2}, {4, 4}, {6, 4}};
constexpr int kScheduleRepeats = 5;

struct Shape {
  int32_t dim;
  int32_t group_size;
  int32_t tokens;
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

std::vector<Variant> MakeVariants(const Shape& shape, const std::vector<float>& queries) {
  std::vector<Variant> variants;
  VariantShape of{KeyFormat::kF16,
                  ValueFormat::kF16,
                  0,
                  shape.dim,
                  shape.group_size,
                  shape.tokens / kTileTokens,
                  absl::GetFlag(FLAGS_cache_factor)};
  variants.emplace_back("F16", of, MakeSealedCache(of), queries, CertifiedKernels());
  for (const Format& format : kFormats) {
    of.key_format = format.key_format;
    of.value_format = format.value_format;
    of.witness_bands = format.witness_bands;
    if (format.key_format == KeyFormat::kK8D && !absl::GetFlag(FLAGS_dithered)) continue;
    const std::shared_ptr<SealedCache> cache = MakeSealedCache(of);
    const std::string name = FormatPairName(format.key_format, format.value_format);
    variants.emplace_back(name, of, cache, queries, nullptr);
    if (UncertifiedKernels() == nullptr || format.key_format == KeyFormat::kK8D) continue;
    variants.emplace_back(absl::StrCat(name, kUncertified), of, cache, queries,
                          UncertifiedKernels());
    if (format.value_format == ValueFormat::kV8) continue;
    for (const PartlyCertified& partly : PartlyCertifiedKernels()) {
      variants.emplace_back(absl::StrCat(name, kWithout, partly.name), of, cache, queries,
                            partly.kernels);
    }
  }
  return variants;
}

// Returns the nanoseconds per byte of a plain sum.
double RunRound(std::vector<Variant>* variants, const Shape& shape, bool counts) {
  const int heads = absl::GetFlag(FLAGS_heads_per_round);
  const double tokens = static_cast<double>(shape.tokens) * heads;
  std::vector<Clocks> spent(variants->size(), Clocks{});
  int64_t sum_ns = 0;
  SealedCache* plain = (*variants)[0].mutable_cache();
  for (int h = 0; h < heads; ++h) {
    for (size_t v = 0; v < variants->size(); ++v) {
      const Clocks read = (*variants)[v].Read();
      spent[v].wall_ns += read.wall_ns;
      spent[v].thread_ns += read.thread_ns;
    }
    const Clocks begin = ReadClocks();
    g_sink = ReadSum(plain->NextHeadData(), plain->head_bytes());
    sum_ns += ReadClocks().thread_ns - begin.thread_ns;
  }
  for (size_t v = 0; counts && v < variants->size(); ++v) {
    (*variants)[v].thread_ns.push_back(static_cast<double>(spent[v].thread_ns) / tokens);
    (*variants)[v].wall_ns.push_back(static_cast<double>(spent[v].wall_ns) / tokens);
  }
  return static_cast<double>(sum_ns) / static_cast<double>(heads * plain->head_bytes());
}

double MedianRatio(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (size_t i = 0; i < above.size(); ++i) ratios.push_back(above[i] / below[i]);
  return Median(ratios);
}

std::string RowName(const Variant& variant, const Shape& shape) {
  return absl::StrCat("attend/", variant.name(), "/G", shape.group_size,
                      shape.dim == 128 ? "" : absl::StrCat("/d", shape.dim),
                      shape.tokens == 32768 ? "" : absl::StrCat("/n", shape.tokens));
}

void ReportShape(const std::vector<Variant>& variants, const Shape& shape, double sum_ns_per_byte,
                 nlohmann::json* rows) {
  for (size_t v = 0; v < variants.size(); ++v) {
    const Variant& variant = variants[v];
    const double ns = Median(variant.thread_ns);
    const double bytes = variant.bytes_per_token();
    const double ratio = MedianRatio(variants[0].thread_ns, variant.thread_ns);
    const double share = sum_ns_per_byte * bytes / ns;
    nlohmann::json row = {{"name", RowName(variant, shape)},
                          {"head_dim", shape.dim},
                          {"group_size", shape.group_size},
                          {"tokens", shape.tokens},
                          {"working_set_bytes", variant.cache().size_bytes()},
                          {"ns_per_token", ns},
                          {"wall_ns_per_token", Median(variant.wall_ns)},
                          {"bytes_per_token", bytes},
                          {"ratio_to_fp16", ratio},
                          {"gigabytes_per_second", bytes / ns},
                          {"read_sum_gigabytes_per_second", 1 / sum_ns_per_byte},
                          {"share_of_read_bandwidth", share},
                          {"huge_pages_in_use", HugePagesInUse()}};
    if (variant.schedule() != nullptr) {
      row["prefetch_lines"] = {variant.schedule()->key_lines, variant.schedule()->value_lines};
    }
    std::string cost;
    const size_t without = variant.name().find(kWithout);
    if (without != std::string::npos) {
      // What the whole kernel takes more than this one.
      const std::string whole = variant.name().substr(0, without);
      const auto certified =
          std::find_if(variants.begin(), variants.end(),
                       [&whole](const Variant& other) { return other.name() == whole; });
      const double part = MedianRatio(certified->thread_ns, variant.thread_ns) - 1;
      row["part_cost"] = part;
      cost = absl::StrFormat("%5.1f%% for it", 100 * part);
    }
    if (v + 1 < variants.size() && variants[v + 1].name() == variant.name() + kUncertified) {
      const double part = MedianRatio(variant.thread_ns, variants[v + 1].thread_ns) - 1;
      row["certificate_cost"] = part;
      cost = absl::StrFormat("%5.1f%%", 100 * part);
    }
    absl::PrintF("%-34s %7.1f %8.2f %8.2f %7.2f %6.0f%%  %s\n", row["name"].get<std::string>(),
                 bytes, ns, Median(variant.wall_ns), ratio, 100 * share, cost);
    rows->push_back(row);
  }
  std::fflush(stdout);
}

void RunShape(const Shape& shape, bool finish, nlohmann::json* rows) {
  const std::vector<float> queries = BenchQueries(shape.group_size, shape.dim);
  std::vector<Variant> variants = MakeVariants(shape, queries);
  RunRound(&variants, shape, false);  // warms up code and pages
  variants[0].ChooseSchedule(kSchedules, kScheduleRepeats);
  std::vector<double> sums;
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    sums.push_back(RunRound(&variants, shape, true));
  }
  ReportShape(variants, shape, Median(sums), rows);
  if (finish) AddFinishRows(variants[1], 8192, rows);
}

std::vector<int32_t> Numbers(const std::vector<std::string>& texts) {
  std::vector<int32_t> numbers(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    CERTKV_CHECK(absl::SimpleAtoi(texts[i], &numbers[i]),
                 "--tokens, --dims and --groups list numbers");
  }
  return numbers;
}

void AddProgressiveRows(nlohmann::json* rows) {
  const ProgressiveOptions options = {absl::GetFlag(FLAGS_rounds),
                                      absl::GetFlag(FLAGS_heads_per_round),
                                      absl::GetFlag(FLAGS_cache_factor)};
  for (const int32_t group_size : Numbers(absl::GetFlag(FLAGS_groups))) {
    for (const int32_t tokens : Numbers(absl::GetFlag(FLAGS_tokens))) {
      AddPlantedRows(options, tokens, group_size, rows);
    }
  }
  const std::string trace = absl::GetFlag(FLAGS_trace);
  if (trace.empty()) return;
  for (const int32_t tokens : {0, 32768, 131072}) AddTraceRows(options, trace, tokens, rows);
}

int Main() {
  nlohmann::json rows = nlohmann::json::array();
  const bool steps = absl::GetFlag(FLAGS_steps);
  absl::PrintF("%-34s %7s %8s %8s %7s %7s  %s\n", "variant", "B/token", "ns/token", "wall",
               "vs F16", "of read", "certificate");
  for (const int32_t dim : Numbers(absl::GetFlag(FLAGS_dims))) {
    bool finish = steps && dim == 128;  // once
    for (const int32_t tokens : Numbers(absl::GetFlag(FLAGS_tokens))) {
      for (const int32_t group_size : Numbers(absl::GetFlag(FLAGS_groups))) {
        if (!absl::GetFlag(FLAGS_dense)) break;
        RunShape({dim, group_size, tokens}, finish && group_size == 1, &rows);
        finish = finish && group_size != 1;
      }
    }
    if (steps) AddSealRows(dim, absl::GetFlag(FLAGS_rounds), &rows);
  }
  if (absl::GetFlag(FLAGS_progressive)) AddProgressiveRows(&rows);
  nlohmann::json results = DescribeRun();
  results["rounds"] = absl::GetFlag(FLAGS_rounds);
  std::printf("%s\n", results.dump(2).c_str());
  results["rows"] = rows;
  return WriteReport(results, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  bool is_valid = absl::GetFlag(FLAGS_rounds) >= 7;
  for (const int32_t tokens : certkv::bench::Numbers(absl::GetFlag(FLAGS_tokens))) {
    is_valid = is_valid && tokens % certkv::kTileTokens == 0 && tokens > 0;
  }
  if (!is_valid) {
    std::fprintf(stderr, "--tokens must be positive multiples of 64 and --rounds at least 7\n");
    return 2;
  }
  return certkv::bench::Main();
}
