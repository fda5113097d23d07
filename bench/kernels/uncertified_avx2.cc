// Compiled for one instruction set by CMakeLists.txt, as the file of kernels/cpu that it copies.
#include "bench/kernels/uncertified.h"
#include "kernels/cpu/attend_run.h"
#include "kernels/cpu/simd_avx2.h"

namespace certkv::bench {
namespace {

template <uint32_t kParts>
struct WithParts : cpu::Avx2Simd {
  static constexpr uint32_t kCertificateParts = kParts;
};

}  // namespace

const cpu::AttendKernels kUncertifiedAvx2 = cpu::MakeAttendKernels<WithParts<0>>();

#if defined(CERTKV_BENCH_PARTS)
template <uint32_t kPart>
constexpr cpu::AttendKernels Without() {
  using V = WithParts<cpu::kWholeCertificate & ~kPart>;
  cpu::AttendKernels kernels = cpu::MakeAttendKernels<WithParts<0>>();
  kernels.run = cpu::Run<V>;  // no benchmark of a part skips or has a tail
  kernels.finish_atoms = cpu::FinishAtoms<V>;
  return kernels;
}
const cpu::AttendKernels kAvx2WithoutPart[kCertificatePartCount] = {
    Without<cpu::kHalfWidthPart>(), Without<cpu::kAtomPart>(), Without<cpu::kWeightErrorPart>(),
    Without<cpu::kValueErrorPart>()};
#endif

}  // namespace certkv::bench
