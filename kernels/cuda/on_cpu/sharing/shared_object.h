// Memory that another process opens by a handle: the file descriptor of its maker, through /proc.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_SHARING_SHARED_OBJECT_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_SHARING_SHARED_OBJECT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/on_cpu/sharing/cuda_runtime.h"

namespace certkv::cuda_sharing {

struct SharedObject {
  void* address = nullptr;
  size_t size_bytes = 0;
  int fd = -1;      // -1: opened from another process
  uint64_t id = 0;  // random, and in the memory's name

  // Null where the system has no memory or descriptor left.
  static SharedObject Create(size_t size_bytes);
  // Errors: cudaErrorDeviceUninitialized, a handle of this process; cudaErrorInvalidResourceHandle,
  // its process has ended, or freed it.
  static cudaError_t Open(const char (&handle)[64], SharedObject* object);
  void WriteHandle(char (&handle)[64]) const;
  void Destroy();
};

}  // namespace certkv::cuda_sharing

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_SHARING_SHARED_OBJECT_H_
