// The attention kernels for one instruction set; CMakeLists.txt has this file's compiler flags.
#include "kernels/cpu/attend_run.h"
#include "kernels/cpu/simd_portable.h"

namespace certkv::cpu {

constinit const AttendKernels kAttendPortable = MakeAttendKernels<PortableSimd>();

}  // namespace certkv::cpu
