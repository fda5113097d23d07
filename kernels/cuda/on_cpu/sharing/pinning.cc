// Registered host memory, with the rules that CUDA has for it.
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

#include "kernels/cuda/on_cpu/sharing/injected_failures.h"

namespace certkv::cuda_sharing {
namespace {

struct Registered {
  size_t size_bytes;
  uint8_t* on_device;  // the same pages; the address itself where they can't be mapped twice
};

std::mutex mutex;
std::map<uint8_t*, Registered>& All() {
  static std::map<uint8_t*, Registered> all;
  return all;
}

// The registered memory that has all of these bytes, or with `any` some of them.
std::map<uint8_t*, Registered>::iterator Find(const uint8_t* begin, size_t size_bytes, bool any) {
  const uint8_t* const end = begin + size_bytes;
  for (auto one = All().begin(); one != All().end(); ++one) {
    const uint8_t* const one_end = one->first + one->second.size_bytes;
    const bool is_found =
        any ? begin < one_end && one->first < end : one->first <= begin && end <= one_end;
    if (is_found) return one;
  }
  return All().end();
}

bool IsWritable(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char access[8] = {};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s", &begin, &end, access) != 3) {
      continue;
    }
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (begin <= at && at < end) return access[1] == 'w';
  }
  return false;
}

}  // namespace

cudaError_t cudaHostRegister(void* address, size_t size_bytes, unsigned int flags) {
  if (const auto injected = InjectedFailureOf("cudaHostRegister")) return injected;
  if (address == nullptr || size_bytes == 0) return cudaErrorInvalidValue;
  if ((flags & cudaHostRegisterReadOnly) != 0) {
    if (!HasAttribute(cudaDevAttrHostRegisterReadOnlySupported)) return cudaErrorNotSupported;
  } else if (!IsWritable(address) &&
             !HasAttribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables)) {
    return cudaErrorInvalidValue;
  }
  auto* const host = static_cast<uint8_t*>(address);
  const std::lock_guard lock(mutex);
  if (Find(host, size_bytes, true) != All().end()) return cudaErrorHostMemoryAlreadyRegistered;
  // A size of 0 has Linux map the same pages once more, where they are shared.
  void* const again = mremap(address, 0, size_bytes, MREMAP_MAYMOVE);
  All()[host] = {size_bytes, again == MAP_FAILED ? host : static_cast<uint8_t*>(again)};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = All().find(static_cast<uint8_t*>(address));
  if (found == All().end()) return cudaErrorHostMemoryNotRegistered;
  const Registered& one = found->second;
  if (one.on_device != found->first) munmap(one.on_device, one.size_bytes);
  All().erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* host, unsigned int) {
  *on_device = nullptr;
  if (const auto injected = InjectedFailureOf("cudaHostGetDevicePointer")) return injected;
  const auto* const bytes = static_cast<uint8_t*>(host);
  const std::lock_guard lock(mutex);
  const auto found = Find(bytes, 1, false);
  if (found == All().end()) return cudaErrorInvalidValue;
  *on_device = found->second.on_device + (bytes - found->first);
  return cudaSuccess;
}

}  // namespace certkv::cuda_sharing
