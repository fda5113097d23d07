// Which implementation of an operation runs.
#ifndef CERTKV_KERNELS_OPS_BACKEND_H_
#define CERTKV_KERNELS_OPS_BACKEND_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

enum class Backend : uint8_t {
  kReference = 1,  // the definition: double, plain loops
  kCpu = 2,        // the best instruction set of this machine, or the one that CERTKV_CPU names
  kCuda = 3,       // the device of kernels/ops/device.h; host memory is copied there and back
};

const char* BackendName(Backend backend);  // "reference", "cpu", "cuda"

// Instruction sets of the CPU backend, in ascending order of preference.
enum class CpuIsa : uint8_t {
  kPortable = 1,
  kAvx2 = 2,        // AVX2 + FMA + F16C
  kAvx512Vnni = 3,  // AVX-512 F, BW, DQ, VL, VNNI
};

const char* CpuIsaName(CpuIsa isa);  // "portable", "avx2", "avx512"

// What this machine can run, by cpuid and the operating system's saved state. Never empty.
std::vector<CpuIsa> SupportedCpuIsas();

// The instruction set that Backend::kCpu uses: the best supported one, or, when the environment
// variable CERTKV_CPU is set (portable | avx2 | avx512), that one. Read once, at first use.
// Errors: InvalidArgument [CPU_ISA_UNKNOWN], a name that isn't one of these;
//         FailedPrecondition [CPU_ISA_UNSUPPORTED], this machine can't run it.
absl::StatusOr<CpuIsa> SelectedCpuIsa();

// For tests and benchmarks: makes Backend::kCpu use `isa` from now on in this process.
// Errors: FailedPrecondition [CPU_ISA_UNSUPPORTED]. Not to be called while an operation runs.
absl::Status ForceCpuIsa(CpuIsa isa);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_BACKEND_H_
