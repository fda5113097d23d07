#include "kernels/ops/resident.h"

#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace certkv {
namespace {

struct Residents {
  absl::Mutex mutex;
  std::map<const uint8_t*, ResidentRange> by_host ABSL_GUARDED_BY(mutex);
};

Residents& All() {
  static auto* const residents = new Residents;
  return *residents;
}

}  // namespace

void AddResident(const ResidentRange& range) {
  Residents& residents = All();
  absl::MutexLock lock(&residents.mutex);
  residents.by_host[range.host] = range;
}

void RemoveResident(const uint8_t* host) {
  Residents& residents = All();
  absl::MutexLock lock(&residents.mutex);
  residents.by_host.erase(host);
}

const uint8_t* ResidentAddress(const void* host, int64_t size_bytes) {
  const auto* const bytes = static_cast<const uint8_t*>(host);
  Residents& residents = All();
  absl::ReaderMutexLock lock(&residents.mutex);
  auto after = residents.by_host.upper_bound(bytes);
  if (after == residents.by_host.begin()) return nullptr;
  const ResidentRange& range = std::prev(after)->second;
  const int64_t offset = bytes - range.host;
  return offset + size_bytes <= range.size_bytes ? range.on_device + offset : nullptr;
}

}  // namespace certkv
