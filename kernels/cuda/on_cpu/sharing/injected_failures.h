// Failures of the CUDA runtime, as tests ask for them.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_SHARING_INJECTED_FAILURES_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_SHARING_INJECTED_FAILURES_H_

#include <string>

#include "kernels/cuda/on_cpu/sharing/cuda_runtime.h"

namespace certkv::cuda_sharing {

// From now on these calls fail: "cudaMalloc=2 cudaMemcpyAsync=214@3" is every cudaMalloc with error
// 2, and every cudaMemcpyAsync from the third on with error 214. "launch" is every launch of a
// kernel, "*" every call there is: a device that is lost. "" is none.
void InjectFailures(const std::string& failures);
// The same, as the file of that name says at the time of each call; one that isn't there says "".
void InjectFailuresFromFile(const std::string& path);

// What a call of `function` is to fail with, or cudaSuccess.
cudaError_t InjectedFailureOf(const char* function);
// Has a device the attribute? Not as cuda_runtime.h says where failures name it.
bool HasAttribute(cudaDeviceAttr attribute);
// The last failure of this thread that nobody has taken.
cudaError_t TakeLastError();

}  // namespace certkv::cuda_sharing

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_SHARING_INJECTED_FAILURES_H_
