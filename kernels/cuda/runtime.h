// What a program without CUDA's headers needs of the device beside the kernels: memory, streams,
// graphs and times. For tests and benchmarks; an engine has its own.
//
// Errors: those of kernels/ops/device.h; of what is freed none are reported. Threads: an object
// belongs to one thread at a time.
#ifndef CERTKV_KERNELS_CUDA_RUNTIME_H_
#define CERTKV_KERNELS_CUDA_RUNTIME_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct CUstream_st;

namespace certkv::cuda {

// Queues launches on a stream: 0, or the number of a cudaError_t.
using Launches = std::function<int(CUstream_st*)>;

// OK, or what the runtime says of a launch function's result.
absl::Status StatusOfLaunch(int error, absl::string_view what);

struct DeviceDescription {
  std::string name;  // "cpu threads" where kernels are executed on them
  int32_t multiprocessors;
  int64_t memory_bytes;  // 0: unknown
};
absl::StatusOr<DeviceDescription> DescribeDevice();

enum class MemoryKind : uint8_t { kDevice, kPinnedHost };

// One allocation. Pinned memory is readable and writable by the host and the device.
class Buffer {
 public:
  static absl::StatusOr<Buffer> Allocate(int64_t size_bytes, MemoryKind kind = MemoryKind::kDevice);
  // Both wait until the copy is done.
  absl::Status CopyFrom(const void* host, int64_t size_bytes, int64_t offset_bytes = 0);
  absl::Status CopyTo(void* host, int64_t size_bytes, int64_t offset_bytes = 0) const;

  template <typename T>
  T* As() const {
    return static_cast<T*>(address_.get());
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    MemoryKind kind;
    void operator()(void* address) const;
  };
  Buffer(void* address, MemoryKind kind, int64_t size_bytes)
      : address_(address, Free{kind}), size_bytes_(size_bytes) {}

  std::unique_ptr<void, Free> address_;
  int64_t size_bytes_;
};

// Queues a copy of device memory on the stream, as a launch does.
int LaunchCopy(void* to, const void* from, int64_t size_bytes, CUstream_st* stream);

class Stream {
 public:
  static absl::StatusOr<Stream> Create();
  CUstream_st* get() const { return stream_.get(); }
  absl::Status Synchronize() const;
  // Seconds from the begin of what is queued by `launches` to its end, on the device's clock.
  absl::StatusOr<double> SecondsOf(const Launches& launches) const;

 private:
  struct Destroy {
    void operator()(CUstream_st* stream) const;
  };
  explicit Stream(CUstream_st* stream) : stream_(stream) {}

  std::unique_ptr<CUstream_st, Destroy> stream_;
};

// Launches that were captured once and are replayed with whatever is in device memory then.
class Graph {
 public:
  // Errors: Internal [DEVICE_FAILED] also when `launches` does what a graph can't hold: allocates,
  // waits, or uses another stream than it was given.
  static absl::StatusOr<Graph> Capture(const Stream& stream, const Launches& launches);
  // Queues all of them: 0, or the number of a cudaError_t.
  int Launch(CUstream_st* stream) const;

 private:
  struct Destroy {
    void operator()(void* exec) const;
  };
  explicit Graph(void* exec) : exec_(exec) {}

  std::unique_ptr<void, Destroy> exec_;
};

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_RUNTIME_H_
