// Compiled for one instruction set by CMakeLists.txt, as the file of kernels/cpu that it copies.
#include "bench/kernels/uncertified.h"
#include "kernels/cpu/attend_run.h"
#include "kernels/cpu/simd_avx2.h"

namespace certkv::bench {
namespace {

struct Uncertified : cpu::Avx2Simd {
  static constexpr bool kCertified = false;
};

}  // namespace

const cpu::AttendKernels kUncertifiedAvx2 = cpu::MakeAttendKernels<Uncertified>();

}  // namespace certkv::bench
