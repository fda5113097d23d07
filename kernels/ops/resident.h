// Host memory of which the device has a copy: operations of Backend::kCuda read the copy, and copy
// only what they find nowhere.
#ifndef CERTKV_KERNELS_OPS_RESIDENT_H_
#define CERTKV_KERNELS_OPS_RESIDENT_H_

#include <cstdint>

namespace certkv {

struct ResidentRange {
  const uint8_t* host = nullptr;
  int64_t size_bytes = 0;
  const uint8_t* on_device = nullptr;
};

// From now on the device has these bytes wherever who calls an operation says that they are valid:
// an operation doesn't compare them. Ranges don't overlap.
void AddResident(const ResidentRange& range);
// No operation on the range runs, or will.
void RemoveResident(const uint8_t* host);

// Where the device has all of these bytes; null: it hasn't.
const uint8_t* ResidentAddress(const void* host, int64_t size_bytes);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_RESIDENT_H_
