// The tile encoders for one instruction set; CMakeLists.txt has this file's compiler flags.
#include "kernels/cpu/quantize_run.h"
#include "kernels/cpu/simd_portable.h"

namespace certkv::cpu {

constinit const QuantizeKernels kQuantizePortable = MakeQuantizeKernels<PortableSimd>();

}  // namespace certkv::cpu
