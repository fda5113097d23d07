// The attention kernels without the work of the certificate, or without a part of it, built for the
// benchmark only: the difference is what the certificate, or that part, costs. Results of what is
// left out are not written; nothing but a benchmark may run them.
#ifndef CERTKV_BENCH_KERNELS_UNCERTIFIED_H_
#define CERTKV_BENCH_KERNELS_UNCERTIFIED_H_

#include <cstdint>

#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/certificate_parts.h"

namespace certkv::bench {

extern const cpu::AttendKernels kUncertifiedAvx2;
extern const cpu::AttendKernels kUncertifiedAvx512;

// Half-widths, atoms, errors of weights and of values, as cpu::kHalfWidthPart and so on. Kernels
// that leave one out are there when CMake's CERTKV_BENCH_PARTS is on: each is another minute of
// compiling.
inline constexpr int kCertificatePartCount = 4;
extern const cpu::AttendKernels kAvx2WithoutPart[kCertificatePartCount];

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_UNCERTIFIED_H_
