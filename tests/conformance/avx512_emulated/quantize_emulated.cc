// Stands in for kernels/cpu/quantize_avx512.cc.
// clang-format off: SIMDe first
#include "tests/conformance/avx512_emulated/emulated_simd.h"
// clang-format on
#include "kernels/cpu/quantize_run.h"

namespace certkv::cpu {

constinit const QuantizeKernels kQuantizeAvx512 = MakeQuantizeKernels<EmulatedSimd>();

}  // namespace certkv::cpu
