// Device memory that other processes open through this one's descriptors, so that it ends with the
// process as a GPU's does.

#include <cstring>
#include <map>
#include <mutex>

#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/cuda/on_cpu/sharing/shared_object.h"

namespace certkv::cuda_sharing {
namespace {

std::mutex mutex;
// Shared allocations of this process, and what it has opened of others.
std::map<void*, SharedObject>& Allocations() {
  static std::map<void*, SharedObject> allocations;
  return allocations;
}
std::map<void*, SharedObject>& Imports() {
  static std::map<void*, SharedObject> imports;
  return imports;
}

}  // namespace

cudaError_t cudaMalloc(void** address, size_t size_bytes) {
  *address = nullptr;
  if (const auto injected = InjectedFailureOf("cudaMalloc")) return injected;
  const SharedObject object = SharedObject::Create((size_bytes + 4095) / 4096 * 4096);
  if (object.address == nullptr) return cudaErrorMemoryAllocation;
  *address = object.address;
  // Not zeros, which would hide what nobody has written.
  std::memset(*address, 0xff, size_bytes);
  const std::lock_guard lock(mutex);
  Allocations()[object.address] = object;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = Allocations().find(address);
  if (found == Allocations().end()) return cudaErrorInvalidValue;
  found->second.Destroy();
  Allocations().erase(found);
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  if (const auto injected = InjectedFailureOf("cudaIpcGetMemHandle")) return injected;
  const std::lock_guard lock(mutex);
  const auto found = Allocations().find(address);
  if (found == Allocations().end()) return cudaErrorInvalidValue;
  found->second.WriteHandle(handle->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned int) {
  *address = nullptr;
  if (const auto injected = InjectedFailureOf("cudaIpcOpenMemHandle")) return injected;
  SharedObject object;
  const cudaError_t error = SharedObject::Open(handle.reserved, &object);
  if (error != cudaSuccess) return error;
  *address = object.address;
  const std::lock_guard lock(mutex);
  Imports()[object.address] = object;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = Imports().find(address);
  if (found == Imports().end()) return cudaErrorInvalidValue;
  found->second.Destroy();
  Imports().erase(found);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {cudaMemoryTypeUnregistered, -1};
  if (const auto injected = InjectedFailureOf("cudaPointerGetAttributes")) return injected;
  const std::lock_guard lock(mutex);
  for (const auto* objects : {&Allocations(), &Imports()}) {
    for (const auto& [begin, object] : *objects) {
      const auto offset = static_cast<const uint8_t*>(address) - static_cast<uint8_t*>(begin);
      if (offset >= 0 && static_cast<size_t>(offset) < object.size_bytes) {
        *attributes = {cudaMemoryTypeDevice, 0};
      }
    }
  }
  return cudaSuccess;
}

}  // namespace certkv::cuda_sharing
