#include "kernels/cuda/on_cpu/sharing/shared_object.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>

namespace certkv::cuda_sharing {
namespace {

constexpr size_t kPageBytes = 4096;

struct Handle {
  int64_t pid;
  uint64_t id;
  uint64_t size_bytes;
  int32_t fd;
};
static_assert(sizeof(Handle) <= 64);

std::string NameOf(uint64_t id) { return "certkv-on-cpu-" + std::to_string(id); }

// With a page after it that isn't mapped.
void* MapWithGuard(int fd, size_t size_bytes) {
  void* const reserved = mmap(nullptr, size_bytes + kPageBytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  void* const mapped =
      mmap(reserved, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped != MAP_FAILED) return mapped;
  munmap(reserved, size_bytes + kPageBytes);
  return nullptr;
}

}  // namespace

SharedObject SharedObject::Create(size_t size_bytes) {
  std::random_device random;
  SharedObject object;
  object.size_bytes = size_bytes;
  object.id = uint64_t{random()} << 32 | random();
  object.fd = memfd_create(NameOf(object.id).c_str(), MFD_CLOEXEC);
  if (object.fd >= 0 && ftruncate(object.fd, static_cast<off_t>(size_bytes)) == 0) {
    object.address = MapWithGuard(object.fd, size_bytes);
  }
  if (object.address == nullptr && object.fd >= 0) close(object.fd);
  return object;
}

cudaError_t SharedObject::Open(const char (&handle)[64], SharedObject* object) {
  Handle from;
  std::memcpy(&from, handle, sizeof(from));
  if (from.pid == getpid()) return cudaErrorDeviceUninitialized;
  const std::string path = "/proc/" + std::to_string(from.pid) + "/fd/" + std::to_string(from.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return cudaErrorInvalidResourceHandle;
  char name[256] = {};
  // Another process or file may have that number now.
  const std::string opened = "/proc/self/fd/" + std::to_string(fd);
  const bool is_it = readlink(opened.c_str(), name, sizeof(name) - 1) > 0 &&
                     std::strstr(name, NameOf(from.id).c_str()) != nullptr;
  object->size_bytes = from.size_bytes;
  object->id = from.id;
  object->address = is_it ? MapWithGuard(fd, from.size_bytes) : nullptr;
  close(fd);
  return object->address == nullptr ? cudaErrorInvalidResourceHandle : cudaSuccess;
}

void SharedObject::WriteHandle(char (&handle)[64]) const {
  const Handle to{getpid(), id, size_bytes, fd};
  std::memset(handle, 0, sizeof(handle));
  std::memcpy(handle, &to, sizeof(to));
}

void SharedObject::Destroy() {
  munmap(address, size_bytes + kPageBytes);
  if (fd >= 0) close(fd);
}

}  // namespace certkv::cuda_sharing
