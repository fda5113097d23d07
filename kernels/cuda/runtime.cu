#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/runtime.h"

namespace certkv::cuda {

absl::Status StatusOfLaunch(int error, absl::string_view what) {
  return StatusOfCuda(static_cast<cudaError_t>(error), what);
}

absl::StatusOr<DeviceDescription> DescribeDevice() {
  DeviceDescription description{};
  int device = 0;
  cudaDeviceProp properties{};
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaGetDevice(&device), "asking for the device"));
  CERTKV_RETURN_IF_ERROR(
      StatusOfCuda(cudaGetDeviceProperties(&properties, device), "asking what the device is"));
  description.name = properties.name;
  description.multiprocessors = properties.multiProcessorCount;
  description.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  return description;
}

void Buffer::Free::operator()(void* address) const {
  if (kind == MemoryKind::kDevice) {
    cudaFree(address);
  } else {
    cudaFreeHost(address);
  }
}

absl::StatusOr<Buffer> Buffer::Allocate(int64_t size_bytes, MemoryKind kind) {
  void* address = nullptr;
  const auto size = static_cast<size_t>(size_bytes);
  const cudaError_t error = size_bytes == 0               ? cudaSuccess
                            : kind == MemoryKind::kDevice ? cudaMalloc(&address, size)
                                                          : cudaMallocHost(&address, size);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(error, absl::StrCat("allocating ", size_bytes, " bytes")));
  return Buffer(address, kind, size_bytes);
}

absl::Status Buffer::CopyFrom(const void* host, int64_t size_bytes, int64_t offset_bytes) {
  CERTKV_CHECK(offset_bytes + size_bytes <= size_bytes_, "a copy lies within its buffer");
  if (size_bytes == 0) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(
      cudaMemcpyAsync(As<uint8_t>() + offset_bytes, host, static_cast<size_t>(size_bytes),
                      cudaMemcpyHostToDevice, nullptr),
      "copying to the device"));
  return StatusOfCuda(cudaStreamSynchronize(nullptr), "copying to the device");
}

absl::Status Buffer::CopyTo(void* host, int64_t size_bytes, int64_t offset_bytes) const {
  CERTKV_CHECK(offset_bytes + size_bytes <= size_bytes_, "a copy lies within its buffer");
  if (size_bytes == 0) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(
      cudaMemcpyAsync(host, As<uint8_t>() + offset_bytes, static_cast<size_t>(size_bytes),
                      cudaMemcpyDeviceToHost, nullptr),
      "copying from the device"));
  return StatusOfCuda(cudaStreamSynchronize(nullptr), "copying from the device");
}

int LaunchCopy(void* to, const void* from, int64_t size_bytes, CUstream_st* stream) {
  return cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToDevice,
                         stream);
}

void Stream::Destroy::operator()(CUstream_st* stream) const { cudaStreamDestroy(stream); }

absl::StatusOr<Stream> Stream::Create() {
  cudaStream_t stream = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOfCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream"));
  return Stream(stream);
}

absl::Status Stream::Synchronize() const {
  return StatusOfCuda(cudaStreamSynchronize(get()), "waiting for the device");
}

absl::StatusOr<double> Stream::SecondsOf(const Launches& launches) const {
  struct Destroy {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  std::unique_ptr<CUevent_st, Destroy> events[2];
  for (auto& event : events) {
    cudaEvent_t created = nullptr;
    CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaEventCreate(&created), "creating an event"));
    event.reset(created);
  }
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaEventRecord(events[0].get(), get()), "timing"));
  CERTKV_RETURN_IF_ERROR(StatusOfLaunch(launches(get()), "what is timed"));
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaEventRecord(events[1].get(), get()), "timing"));
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaEventSynchronize(events[1].get()), "what is timed"));
  float milliseconds = 0;
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(
      cudaEventElapsedTime(&milliseconds, events[0].get(), events[1].get()), "timing"));
  return milliseconds * 1e-3;
}

void Graph::Destroy::operator()(void* exec) const {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(exec));
}

absl::StatusOr<Graph> Graph::Capture(const Stream& stream, const Launches& launches) {
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(
      cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal), "beginning a capture"));
  const int error = launches(stream.get());
  // Ends the capture in any case.
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream.get(), &graph);
  struct DestroyGraph {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
  };
  const std::unique_ptr<CUgraph_st, DestroyGraph> owned(graph);
  CERTKV_RETURN_IF_ERROR(StatusOfLaunch(error, "a captured launch"));
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(ended, "ending a capture"));
  cudaGraphExec_t exec = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOfCuda(cudaGraphInstantiate(&exec, graph, 0), "making a captured graph runnable"));
  return Graph(exec);
}

int Graph::Launch(CUstream_st* stream) const {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(exec_.get()), stream);
}

}  // namespace certkv::cuda
