// The tile encoders for one instruction set; CMakeLists.txt has this file's compiler flags.
#include "kernels/cpu/quantize_run.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_avx512_native.h"

namespace certkv::cpu {

constinit const QuantizeKernels kQuantizeAvx512 = MakeQuantizeKernels<Avx512Simd<Avx512Native>>();

}  // namespace certkv::cpu
