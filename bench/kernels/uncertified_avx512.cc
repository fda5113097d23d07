// Compiled for one instruction set by CMakeLists.txt, as the file of kernels/cpu that it copies.
#include "bench/kernels/uncertified.h"
#include "kernels/cpu/attend_run.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_avx512_native.h"

namespace certkv::bench {
namespace {

struct Uncertified : cpu::Avx512Simd<cpu::Avx512Native> {
  static constexpr uint32_t kCertificateParts = 0;
};

}  // namespace

const cpu::AttendKernels kUncertifiedAvx512 = cpu::MakeAttendKernels<Uncertified>();

}  // namespace certkv::bench
