// Many reads of sealed sequences in device memory, as one launch of a layer, with their finishing
// step and their progressive form; and the same tokens as FP16 pages.
#ifndef CERTKV_BENCH_GPU_READ_LAUNCH_H_
#define CERTKV_BENCH_GPU_READ_LAUNCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu/device_cache.h"
#include "bench/gpu/paged_decode.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/finish.h"
#include "kernels/cuda/progressive.h"
#include "kernels/cuda/runtime.h"

namespace certkv::bench {

struct ReadShape {
  int32_t read_count;
  int32_t tiles_per_read;
  int32_t group_size;
  int32_t block_target;  // splits of a read
  float skip_tolerance;
  float tv_tolerance;
};

// Owns everything that its launches touch but the tiles.
class ReadLaunch {
 public:
  static absl::StatusOr<std::unique_ptr<ReadLaunch>> Make(const DeviceTiles& tiles,
                                                          const ReadShape& shape);
  int Attend(CUstream_st* stream) const;
  int Finish(CUstream_st* stream) const;
  bool can_skip() const { return CanSkip(layout_); }
  int Progressive(CUstream_st* stream) const;  // where can_skip
  // Of what the last Progressive read, the share of its sub-blocks.
  absl::StatusOr<double> ShareRead() const;
  // Largest worst_case_tv of the last Finish.
  absl::StatusOr<double> WorstTv() const;

 private:
  ReadLaunch(const TileLayout& layout, const ReadShape& shape) : layout_(layout), shape_(shape) {}
  absl::Status Prepare(const DeviceTiles& tiles);
  absl::Status PrepareProgressive();
  // Device memory, uninitialized, kept until the end.
  template <typename T>
  absl::StatusOr<T*> Allocate(int64_t count);
  template <typename T>
  absl::StatusOr<T*> Place(const std::vector<T>& data);

  TileLayout layout_;
  ReadShape shape_;
  std::vector<cuda::Buffer> buffers_;
  std::vector<AttendArgs> args_;
  float* skip_tolerance_ = nullptr;
  uint8_t* masks_ = nullptr;
  Certificate* certificates_ = nullptr;
  cuda::AttendRead* reads_ = nullptr;
  cuda::FinishRead* finishes_ = nullptr;
  cuda::ProgressiveRead* progressive_ = nullptr;
  cuda::AttendPlan plan_{};
  cuda::FinishPlan finish_plan_{};
  cuda::ProgressivePlan progressive_plan_{};
};

// Keys and values as they are, in pages of 64 tokens.
class PagedLaunch {
 public:
  static absl::StatusOr<std::unique_ptr<PagedLaunch>> Make(const DeviceOriginals& originals,
                                                           const ReadShape& shape, int32_t dim);
  int Decode(CUstream_st* stream) const;
  const float* outputs() const { return outputs_->As<float>(); }

 private:
  PagedLaunch() = default;

  std::unique_ptr<cuda::Buffer> queries_, keys_, values_, outputs_, partial_, reads_;
  PagedPlan plan_{};
};

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_GPU_READ_LAUNCH_H_
