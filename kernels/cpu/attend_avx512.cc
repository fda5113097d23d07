// The attention kernels for one instruction set; CMakeLists.txt has this file's compiler flags.
#include "kernels/cpu/attend_run.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_avx512_native.h"

namespace certkv::cpu {

constinit const AttendKernels kAttendAvx512 = MakeAttendKernels<Avx512Simd<Avx512Native>>();

}  // namespace certkv::cpu
