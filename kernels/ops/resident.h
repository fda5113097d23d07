// Host memory that the device reaches without a copy that an operation makes: operations of
// Backend::kCuda look here, and copy only what they find nowhere.
//
// Resident: the device has the same bytes in its own memory. Pinned: it reads the host's bytes
// themselves, over the bus, at an address of its own.
#ifndef CERTKV_KERNELS_OPS_RESIDENT_H_
#define CERTKV_KERNELS_OPS_RESIDENT_H_

#include <cstdint>

namespace certkv {

struct DeviceRange {
  const uint8_t* host = nullptr;
  int64_t size_bytes = 0;
  const uint8_t* on_device = nullptr;
};

// From now on the device has these bytes wherever who calls an operation says that they are valid:
// an operation doesn't compare them. Ranges don't overlap.
void AddResident(const DeviceRange& range);
// No operation on the range runs, or will.
void RemoveResident(const uint8_t* host);

// Where the device has all of these bytes; null: it hasn't.
const uint8_t* ResidentAddress(const void* host, int64_t size_bytes);

// The same of pinned memory.
void AddPinned(const DeviceRange& range);
void RemovePinned(const uint8_t* host);
const uint8_t* PinnedAddress(const void* host, int64_t size_bytes);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_RESIDENT_H_
