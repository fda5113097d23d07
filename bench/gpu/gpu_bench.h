// What the kernels of kernels/cuda reach on a GPU: shares of the bandwidth that a copy reaches, and
// times beside decode attention over FP16 pages in the same run.
#ifndef CERTKV_BENCH_GPU_GPU_BENCH_H_
#define CERTKV_BENCH_GPU_GPU_BENCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace certkv::bench {

struct GpuBenchSizes {
  int64_t copy_bytes;   // of the copy that gives the bandwidth
  int64_t cache_bytes;  // of FP16 keys and values that a launch reads, at least; above the L2
  int32_t dim;          // d = d_v, 64 or 128
  int32_t repetitions;  // of each time, whose median is told
  int32_t seal_tiles;   // of one launch
  std::vector<int32_t> token_counts;  // of a read, multiples of 64
  std::vector<int32_t> group_sizes;   // at most 8
  std::vector<int32_t> repair_tiles;
};

// Minutes on a GPU, gigabytes of its memory.
GpuBenchSizes FullSizes();
// A second on CPU threads.
GpuBenchSizes SmallSizes();

// Errors: those of kernels/ops/device.h. Blocks until done.
absl::StatusOr<nlohmann::json> RunGpuBench(const GpuBenchSizes& sizes);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_GPU_GPU_BENCH_H_
