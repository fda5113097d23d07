#include "kernels/cuda/on_cpu/cuda_stream.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

using Node = std::function<cudaError_t()>;

struct CUgraph_st {
  std::vector<Node> nodes;
};
struct CUgraphExec_st {
  std::vector<Node> nodes;
};
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
};
struct CUstream_st {
  bool is_captured = false;
  bool is_invalidated = false;
  CUgraph_st graph;
};

namespace certkv::cuda_on_cpu {
namespace {

std::mutex mutex;
// Streams that are captured now.
std::vector<CUstream_st*> captured;

struct Injected {
  int left = -1;  // calls before the one that fails; below 0: none
  cudaError_t error = cudaSuccess;
};
Injected injected[kRuntimeCalls];

// With the mutex held: what a call that no capture allows does to all of them.
cudaError_t InvalidateCaptures(cudaError_t error) {
  if (captured.empty()) return cudaSuccess;
  for (CUstream_st* const stream : captured) stream->is_invalidated = true;
  return error;
}

// With the mutex held.
cudaError_t TakeInjected(RuntimeCall call) {
  Injected& failure = injected[static_cast<int>(call)];
  if (failure.left < 0) return cudaSuccess;
  return failure.left-- == 0 ? failure.error : cudaSuccess;
}

cudaError_t Replay(const std::vector<Node>& nodes) {
  for (const Node& node : nodes) {
    if (const cudaError_t error = node(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

void InjectFailure(RuntimeCall call, int skipped, cudaError_t error) {
  const std::lock_guard lock(mutex);
  injected[static_cast<int>(call)] = {skipped, error};
}

cudaError_t Submit(RuntimeCall call, cudaStream_t stream, Node work) {
  Node checked = [call, work = std::move(work)] {
    {
      const std::lock_guard lock(mutex);
      if (const cudaError_t error = TakeInjected(call); error != cudaSuccess) return error;
    }
    return work();
  };
  {
    const std::lock_guard lock(mutex);
    if (stream == nullptr) {
      const cudaError_t error = InvalidateCaptures(cudaErrorStreamCaptureImplicit);
      if (error != cudaSuccess) return error;
    } else if (stream->is_captured) {
      if (stream->is_invalidated) return cudaErrorStreamCaptureInvalidated;
      stream->graph.nodes.push_back(std::move(checked));
      return cudaSuccess;
    }
  }
  return checked();
}

cudaError_t Enter(RuntimeCall call) {
  const std::lock_guard lock(mutex);
  const cudaError_t error = InvalidateCaptures(cudaErrorStreamCaptureUnsupported);
  return error != cudaSuccess ? error : TakeInjected(call);
}

}  // namespace certkv::cuda_on_cpu

namespace on_cpu = certkv::cuda_on_cpu;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) {
  return on_cpu::Enter(on_cpu::RuntimeCall::kSynchronize);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  const std::lock_guard lock(on_cpu::mutex);
  if (stream == nullptr || stream->is_captured) return cudaErrorIllegalState;
  stream->is_captured = true;
  stream->is_invalidated = false;
  stream->graph.nodes.clear();
  on_cpu::captured.push_back(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const std::lock_guard lock(on_cpu::mutex);
  if (stream == nullptr || !stream->is_captured) return cudaErrorIllegalState;
  stream->is_captured = false;
  std::erase(on_cpu::captured, stream);
  if (stream->is_invalidated) return cudaErrorStreamCaptureInvalidated;
  *graph = new CUgraph_st(std::move(stream->graph));
  stream->graph.nodes.clear();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long /*flags*/) {
  *exec = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t /*stream*/) {
  return on_cpu::Replay(exec->nodes);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t /*stream*/) {
  event->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) {
  return on_cpu::Enter(on_cpu::RuntimeCall::kSynchronize);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return cudaSuccess;
}
