// Stands in for kernels/cpu/attend_avx512.cc: as an object of the test it comes before the library.
// clang-format off: SIMDe first
#include "tests/conformance/avx512_emulated/emulated_simd.h"
// clang-format on
#include "kernels/cpu/attend_run.h"

namespace certkv::cpu {

constinit const AttendKernels kAttendAvx512 = MakeAttendKernels<EmulatedSimd>();

}  // namespace certkv::cpu
