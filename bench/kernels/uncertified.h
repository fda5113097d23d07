// The attention kernels without the work of the certificate, built for the benchmark only: the
// difference is what the certificate costs. Their half-widths, atoms and error terms are not
// written; nothing but a benchmark may run them.
#ifndef CERTKV_BENCH_KERNELS_UNCERTIFIED_H_
#define CERTKV_BENCH_KERNELS_UNCERTIFIED_H_

#include "kernels/cpu/attend_state.h"

namespace certkv::bench {

extern const cpu::AttendKernels kUncertifiedAvx2;
extern const cpu::AttendKernels kUncertifiedAvx512;

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_UNCERTIFIED_H_
