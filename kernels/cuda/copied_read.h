// A read of host memory, with everything that it points to copied to the device: what operations
// over host memory, tests and benchmarks launch. What the device reaches already isn't copied, or
// gathered over the bus (kernels/ops/resident.h). A decode path has its data on the device and
// makes an AttendRead itself. Needs no CUDA to include.
//
// Errors: those of kernels/ops/device.h. Threads: used by one. Blocks: until copies are done.
#ifndef CERTKV_KERNELS_CUDA_COPIED_READ_H_
#define CERTKV_KERNELS_CUDA_COPIED_READ_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/attend.h"

namespace certkv::cuda {

class DeviceMemory;

// Elements from the first row's begin to the last one's end.
inline int64_t StridedCount(int64_t rows, int64_t stride, int64_t width) {
  return rows == 0 ? 0 : (rows - 1) * stride + width;
}

class CopiedRead {
 public:
  struct Options {
    int32_t block_target = 0;  // as in PlanRead; 0: two blocks for every multiprocessor
    QueryRows queries = {};    // host address; copied in the place of AttendArgs::queries
  };

  // `args` and `result` hold host addresses; what `result` points to is written by ReadBack. Tiles
  // outside the range are not copied.
  static absl::StatusOr<CopiedRead> Make(const AttendArgs& args, const AttendResult& result,
                                         const Options& options);
  CopiedRead(CopiedRead&&) noexcept;
  CopiedRead& operator=(CopiedRead&&) noexcept;
  ~CopiedRead();

  // With device addresses.
  const AttendRead& read() const { return read_; }
  // The same in device memory.
  const AttendRead* device_read() const { return device_read_; }
  // Other queries of the same shape and type, for the next launch.
  absl::Status CopyQueries(const void* queries);
  // Waits for what was queued on the default stream and copies the results to the host.
  absl::Status ReadBack();

 private:
  CopiedRead();

  std::unique_ptr<DeviceMemory> memory_;
  AttendRead read_{};
  const AttendRead* device_read_ = nullptr;
};

// Everything that `args` points to in `memory`, but the layout, and the queries where it is told
// so.
absl::StatusOr<AttendArgs> CopyAttendArgs(const AttendArgs& args, bool has_float_queries,
                                          DeviceMemory* memory);

// Splits for two blocks on every multiprocessor of the device.
absl::StatusOr<int32_t> DefaultBlockTarget();

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_COPIED_READ_H_
