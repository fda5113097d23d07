#include "kernels/ops/resident.h"

#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace certkv {
namespace {

class Ranges {
 public:
  void Add(const DeviceRange& range) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    by_host_[range.host] = range;
  }
  void Remove(const uint8_t* host) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    by_host_.erase(host);
  }
  const uint8_t* Find(const void* host, int64_t size_bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    const auto* const bytes = static_cast<const uint8_t*>(host);
    absl::ReaderMutexLock lock(&mutex_);
    auto after = by_host_.upper_bound(bytes);
    if (after == by_host_.begin()) return nullptr;
    const DeviceRange& range = std::prev(after)->second;
    const int64_t offset = bytes - range.host;
    return offset + size_bytes <= range.size_bytes ? range.on_device + offset : nullptr;
  }

 private:
  absl::Mutex mutex_;
  std::map<const uint8_t*, DeviceRange> by_host_ ABSL_GUARDED_BY(mutex_);
};

Ranges& Residents() {
  static auto* const ranges = new Ranges;
  return *ranges;
}
Ranges& Pinned() {
  static auto* const ranges = new Ranges;
  return *ranges;
}

}  // namespace

void AddResident(const DeviceRange& range) { Residents().Add(range); }
void RemoveResident(const uint8_t* host) { Residents().Remove(host); }
const uint8_t* ResidentAddress(const void* host, int64_t size_bytes) {
  return Residents().Find(host, size_bytes);
}

void AddPinned(const DeviceRange& range) { Pinned().Add(range); }
void RemovePinned(const uint8_t* host) { Pinned().Remove(host); }
const uint8_t* PinnedAddress(const void* host, int64_t size_bytes) {
  return Pinned().Find(host, size_bytes);
}

}  // namespace certkv
