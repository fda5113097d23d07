#include "bench/kernels/step_bench.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/bench_data.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "kernels/ops/finish_certificate.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::bench {
namespace {

constexpr int kFinishRounds = 1001;
constexpr int32_t kDistinctTiles = 16;

}  // namespace

void AddFinishRows(const Variant& variant, int32_t atom_count, nlohmann::json* rows) {
  const ReadMemory& memory = variant.memory();
  const auto read_atoms = static_cast<int32_t>(memory.block_lse.size()) / variant.args().group_size;
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
  FinishWorkspace workspace;
  for (const double tolerance : {0.2, 0.0}) {
    args.tv_tolerance = static_cast<float>(tolerance);
    Certificate certificate;
    std::vector<double> times;
    for (int round = 0; round < kFinishRounds; ++round) {
      const Clocks begin = ReadClocks();
      CERTKV_CHECK(FinishCertificate(Backend::kCpu, args, &workspace, &certificate).ok(),
                   "the benchmark's certificates can be finished");
      times.push_back(static_cast<double>(ReadClocks().thread_ns - begin.thread_ns) * 1e-3);
    }
    const std::string name = absl::StrCat("finish/", variant.name(), "/tolerance_", tolerance);
    absl::PrintF("%-34s %8.1f us per query of %d atoms, TV* %.4f\n", name, Median(times),
                 atom_count, certificate.worst_case_tv);
    rows->push_back({{"name", name},
                     {"atoms", atom_count},
                     {"microseconds", Median(times)},
                     {"worst_case_tv", certificate.worst_case_tv}});
  }
}

void AddSealRows(int32_t dim, int rounds, nlohmann::json* rows) {
  const int64_t original_bytes = int64_t{4} * kTileTokens * dim;  // keys, then values
  const auto tiles = static_cast<int32_t>(4 * LastLevelCacheBytes() / original_bytes);
  const HugeBuffer originals(tiles * original_bytes);
  std::vector<std::vector<uint16_t>> keys(kDistinctTiles), values(kDistinctTiles);
  for (int i = 0; i < kDistinctTiles; ++i) FillOriginals(i, dim, &keys[i], &values[i]);
  for (int32_t t = 0; t < tiles; ++t) {
    uint8_t* tile = originals.data() + t * original_bytes;
    std::memcpy(tile, keys[t % kDistinctTiles].data(), original_bytes / 2);
    std::memcpy(tile + original_bytes / 2, values[t % kDistinctTiles].data(), original_bytes / 2);
  }
  struct Choice {
    KeyFormat key_format;
    ValueFormat value_format;
    int32_t witness_bands;
  };
  for (const Choice& choice :
       {Choice{KeyFormat::kK8, ValueFormat::kV4, 0}, Choice{KeyFormat::kK8, ValueFormat::kV4, 1},
        Choice{KeyFormat::kK8, ValueFormat::kV8, 0}, Choice{KeyFormat::kK6, ValueFormat::kV4, 1}}) {
    const CacheSpec spec =
        BenchSpec(choice.key_format, choice.value_format, dim, 1, choice.witness_bands);
    const TileLayout layout = MakeTileLayout(spec, 0);
    const HugeBuffer records(tiles * layout.tile_bytes());
    std::vector<double> rates;
    for (int round = 0; round < rounds; ++round) {
      const Clocks begin = ReadClocks();
      for (int32_t t = 0; t < tiles; ++t) {
        QuantizeTileArgs args{};
        args.spec = &spec;
        args.layout = &layout;
        args.keys = reinterpret_cast<const uint16_t*>(originals.data() + t * original_bytes);
        args.values = args.keys + int64_t{kTileTokens} * dim;
        args.witness_weights = WitnessWeightsOf(spec, 0, 0);
        args.key_stride = args.value_stride = dim;
        args.scan = records.data() + t * layout.tile_bytes();
        args.detail = args.scan + layout.scan_bytes;
        CERTKV_CHECK(QuantizeTile(Backend::kCpu, args).ok(), "the benchmark's data can be sealed");
      }
      const double ns = static_cast<double>(ReadClocks().thread_ns - begin.thread_ns);
      rates.push_back(static_cast<double>(tiles * original_bytes) / ns);
    }
    const std::string name = absl::StrCat(
        "seal/", FormatPairName(choice.key_format, choice.value_format),
        choice.witness_bands > 0 ? "w" : "", dim == 128 ? "" : absl::StrCat("/d", dim));
    absl::PrintF("%-34s %8.2f GB/s of 16-bit input, one core, checksums included\n", name,
                 Median(rates));
    rows->push_back({{"name", name},
                     {"head_dim", dim},
                     {"witness_bands", choice.witness_bands},
                     {"gigabytes_per_second", Median(rates)},
                     {"ns_per_token", 4.0 * dim / Median(rates)}});
  }
}

}  // namespace certkv::bench
