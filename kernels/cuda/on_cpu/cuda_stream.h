// Streams, events and graphs of the CUDA runtime, as cuda_runtime.h: a call has done its work when
// it returns, but while a stream is captured, what is queued on it is recorded and done when the
// graph is launched.
//
// Stricter than a GPU while anything is captured: allocating, freeing, waiting and whatever is
// queued on the default stream fail and end the capture, from every thread and whatever its mode.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_CUDA_STREAM_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_CUDA_STREAM_H_

#include <cstddef>
#include <functional>

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;

// Numbers of the CUDA runtime.
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorIllegalState = 401,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureImplicit = 906,
};
enum cudaStreamCaptureMode : int {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
inline constexpr unsigned cudaStreamNonBlocking = 1;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
// cudaErrorStreamCaptureInvalidated, and no graph, when something failed that ended the capture.
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end);

namespace certkv::cuda_on_cpu {

// What may be made to fail.
enum class RuntimeCall : int { kLaunch, kAllocate, kFree, kCopy, kSynchronize };
inline constexpr int kRuntimeCalls = 5;

// The call of that kind after `skipped` others fails with `error` and does nothing; once. A graph's
// launches count when they are replayed.
void InjectFailure(RuntimeCall call, int skipped, cudaError_t error);

// Does `work` now, or records it where the stream is captured. For what is queued on streams.
cudaError_t Submit(RuntimeCall call, cudaStream_t stream, std::function<cudaError_t()> work);
// For what isn't: cudaSuccess, or why it fails now.
cudaError_t Enter(RuntimeCall call);

}  // namespace certkv::cuda_on_cpu

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_CUDA_STREAM_H_
