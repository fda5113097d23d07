// What the header page of a slab (docs/formats.md, section 7) says about memory of a GPU that the
// slab's store exports: of a device slab its copy; of a staging slab the same slots on the GPU, in
// which the worker may write originals as well (no event, state kReady until the session ends).
//
// The slab itself, a memfd, has every byte. Its store may keep the same bytes, at the same offsets,
// in the memory of a GPU, so that kernels there read them. How another process reaches that copy
// stands in the slab's header page, at kDeviceExportOffset; all zeros: there is no copy. Who does
// not know this record reads the memfd alone and misses nothing.
//
// A slot's bytes are in the copy whenever its generation is even and the state is kReady. The store
// sets kWithdrawn before it seals a slot whose bytes it could not copy, so a reader looks at the
// generations first and then at the state.
#ifndef CERTKV_KERNELS_CORE_DEVICE_EXPORT_H_
#define CERTKV_KERNELS_CORE_DEVICE_EXPORT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace certkv {

inline constexpr int64_t kDeviceExportOffset = 1024;
inline constexpr uint64_t kDeviceExportMagic = 0x31505845564544;  // "DEVEXP1"
inline constexpr uint32_t kDeviceExportVersion = 1;

enum class DeviceExportState : uint32_t { kNone = 0, kReady = 1, kWithdrawn = 2 };

struct DeviceExport {
  uint64_t magic;
  uint32_t version;
  std::atomic<DeviceExportState> state;  // kReady is written last
  uint8_t boot_id[16];                   // of the machine's kernel: handles end with it
  uint8_t device_uuid[16];
  int64_t size_bytes;         // of the copy: the slab's
  uint64_t export_id;         // random; the copy has this record too, so a handle proves itself
  uint8_t memory_handle[64];  // cudaIpcMemHandle_t
  uint8_t event_handle[64];   // cudaIpcEventHandle_t, recorded after each batch of copies; staging:
                              // zeros
};
static_assert(sizeof(std::atomic<DeviceExportState>) == 4 &&
              std::atomic<DeviceExportState>::is_always_lock_free);
static_assert(sizeof(DeviceExport) == 192 && offsetof(DeviceExport, state) == 12 &&
              offsetof(DeviceExport, boot_id) == 16 && offsetof(DeviceExport, device_uuid) == 32 &&
              offsetof(DeviceExport, size_bytes) == 48 && offsetof(DeviceExport, export_id) == 56 &&
              offsetof(DeviceExport, memory_handle) == 64 &&
              offsetof(DeviceExport, event_handle) == 128);

inline DeviceExport& DeviceExportAt(uint8_t* base) {
  return *reinterpret_cast<DeviceExport*>(base + kDeviceExportOffset);
}
inline const DeviceExport& DeviceExportAt(const uint8_t* base) {
  return *reinterpret_cast<const DeviceExport*>(base + kDeviceExportOffset);
}

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_DEVICE_EXPORT_H_
