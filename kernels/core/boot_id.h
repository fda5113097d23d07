// Which run of the machine's kernel this is: what handles of a GPU's memory end with.
#ifndef CERTKV_KERNELS_CORE_BOOT_ID_H_
#define CERTKV_KERNELS_CORE_BOOT_ID_H_

#include <array>
#include <cstdint>

namespace certkv {

using BootId = std::array<uint8_t, 16>;

// Zeros where the kernel doesn't say.
BootId CurrentBootId();

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_BOOT_ID_H_
