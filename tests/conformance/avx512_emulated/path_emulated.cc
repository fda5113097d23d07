// Stands in for tests/conformance/path.cc and kernels/cpu/isa.cc: the suite runs on one path, the
// AVX-512 kernels over their emulation.
#include "kernels/cpu/cpu.h"
#include "tests/conformance/path.h"

namespace certkv::cpu {

// The emulation itself uses AVX2, FMA and F16C.
std::vector<CpuIsa> SupportedIsas() {
  const bool runs = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  if (!runs) return {CpuIsa::kPortable};
  return {CpuIsa::kPortable, CpuIsa::kAvx512Vnni};
}

}  // namespace certkv::cpu

namespace certkv::conformance {

std::vector<Path> CpuPaths() { return {{Backend::kCpu, CpuIsa::kAvx512Vnni}}; }

std::vector<Path> AllPaths() { return CpuPaths(); }

std::string PathName(const Path& /*path*/) { return "cpu_avx512_emulated"; }

std::string SelectPath(const Path& path) {
  const absl::Status status = ForceCpuIsa(path.isa);
  return status.ok() ? "" : "needs a CPU with AVX2, FMA and F16C for the emulation";
}

}  // namespace certkv::conformance
