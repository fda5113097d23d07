// What the kernels are compared with: decode attention over FP16 pages as an engine stores them, by
// an online softmax, without certificates. Split over the sequence as kernels/cuda/attend.h is.
// Needs no CUDA to include.
#ifndef CERTKV_BENCH_GPU_PAGED_DECODE_H_
#define CERTKV_BENCH_GPU_PAGED_DECODE_H_

#include <cstdint>

struct CUstream_st;

namespace certkv::bench {

inline constexpr int32_t kPageTokens = 64;

// One KV head of one sequence; device addresses. d = 64 or 128, d_v = d.
struct PagedRead {
  const uint16_t* queries;        // [G][d] fp16
  const uint16_t* const* keys;    // [pages] of [64][d] fp16
  const uint16_t* const* values;  // the same
  float* outputs;                 // [G][d]
  float* partial;                 // [S][G][d + 2] scratch
  int32_t page_count;
  int32_t pages_per_split;
  int32_t split_count;  // S
};

struct PagedPlan {
  int32_t read_count;
  int32_t group_size;  // G, in [1, 8]
  int32_t head_dim;    // d
  int32_t split_count;
  float logit_scale;
};

// Queues two kernels. `reads` is a device address. 0, or the number of a cudaError_t.
int LaunchPagedDecode(const PagedPlan& plan, const PagedRead* reads, CUstream_st* stream);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_GPU_PAGED_DECODE_H_
