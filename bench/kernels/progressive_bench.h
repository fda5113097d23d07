// Benchmarks of progressive reads: how much they read, and how fast.
#ifndef CERTKV_BENCH_KERNELS_PROGRESSIVE_BENCH_H_
#define CERTKV_BENCH_KERNELS_PROGRESSIVE_BENCH_H_

#include <cstdint>
#include <string>

#include "nlohmann/json.hpp"

namespace certkv::bench {

struct ProgressiveOptions {
  int rounds = 9;
  int heads_per_round = 4;  // KV heads that each variant reads in a round
  double cache_factor = 8;  // working set in last-level caches
};

// Rows "progressive/G...": d = 128, planted data of which a tenth of the sub-blocks holds nearly
// all of the mass of each head, another tenth for each head.
void AddPlantedRows(const ProgressiveOptions& options, int32_t tokens, int32_t group_size,
                    nlohmann::json* rows);

// Rows "progressive/trace/layer.../n...": each layer of the trace, its first KV head: its real
// tokens, and longer contexts made of them, repeated with fresh noise of a tenth of each channel's
// spread.
void AddTraceRows(const ProgressiveOptions& options, const std::string& path, int32_t tokens,
                  nlohmann::json* rows);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_PROGRESSIVE_BENCH_H_
