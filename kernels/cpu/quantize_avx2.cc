// The tile encoders for one instruction set; CMakeLists.txt has this file's compiler flags.
#include "kernels/cpu/quantize_run.h"
#include "kernels/cpu/simd_avx2.h"

namespace certkv::cpu {

constinit const QuantizeKernels kQuantizeAvx2 = MakeQuantizeKernels<Avx2Simd>();

}  // namespace certkv::cpu
