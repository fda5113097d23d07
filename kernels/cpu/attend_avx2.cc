// The attention kernels for one instruction set; CMakeLists.txt has this file's compiler flags.
#include "kernels/cpu/attend_run.h"
#include "kernels/cpu/simd_avx2.h"

namespace certkv::cpu {

constinit const AttendKernels kAttendAvx2 = MakeAttendKernels<Avx2Simd>();

}  // namespace certkv::cpu
