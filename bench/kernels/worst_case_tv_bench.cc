// certkv-bench-worst-case-tv: time of TV* per read, against the number of atoms and the spread of
// their half-widths. Masses are log-normal (sigma 1.5), half-widths 0.2 nats times log-normal.
//
//   relaxation   bins alone, what every read pays
//   tolerance    0.2, what the product asks: heavy tokens only when the relaxation misses it
//   tight        tolerance 0: all heavy tokens enumerated
//
// The label is the bound. CPU time is what counts on a shared machine.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/bounds/worst_case_tv.h"

namespace certkv {
namespace {

constexpr uint64_t kSeed = 11;

struct Atoms {
  std::vector<float> mass;
  std::vector<float> half_width;
};

// spread_percent: sigma of the logarithm of the half-widths, in percent.
Atoms MakeAtoms(int64_t count, int64_t spread_percent) {
  std::mt19937_64 random(kSeed);
  std::normal_distribution<double> normal;
  Atoms atoms;
  for (int64_t i = 0; i < count; ++i) {
    atoms.mass.push_back(static_cast<float>(std::exp(1.5 * normal(random))));
    const double spread = static_cast<double>(spread_percent) / 100;
    atoms.half_width.push_back(static_cast<float>(0.2 * std::exp(spread * normal(random))));
  }
  return atoms;
}

void Run(benchmark::State& state, const WorstCaseTvOptions& options) {
  const Atoms atoms = MakeAtoms(state.range(0), state.range(1));
  WorstCaseTvWorkspace workspace;
  WorstCaseTvResult result;
  for (auto _ : state) {
    result =
        WorstCaseTv(TvAtoms<float, float>{atoms.mass, atoms.half_width, {}}, options, &workspace);
    benchmark::DoNotOptimize(result);
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
  state.SetLabel(std::to_string(result.worst_case_tv) + ", heavy tokens " +
                 std::to_string(result.heavy_tokens_used));
}

void BM_Relaxation(benchmark::State& state) {
  WorstCaseTvOptions options;
  options.heavy_tokens_max = 0;
  Run(state, options);
}

void BM_Tolerance(benchmark::State& state) {
  WorstCaseTvOptions options;
  options.tolerance = 0.2;
  Run(state, options);
}

void BM_Tight(benchmark::State& state) { Run(state, {}); }

void Shapes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"atoms", "spread"})->ArgsProduct({{32, 128, 512, 2048, 8192}, {0, 10, 50}});
}

BENCHMARK(BM_Relaxation)->Apply(Shapes);
BENCHMARK(BM_Tolerance)->Apply(Shapes);
BENCHMARK(BM_Tight)->Apply(Shapes);

}  // namespace
}  // namespace certkv

BENCHMARK_MAIN();
