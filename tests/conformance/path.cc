#include "tests/conformance/path.h"

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda.h"

namespace certkv::conformance {

std::vector<Path> CpuPaths() {
  return {{Backend::kCpu, CpuIsa::kPortable},
          {Backend::kCpu, CpuIsa::kAvx2},
          {Backend::kCpu, CpuIsa::kAvx512Vnni}};
}

std::vector<Path> AllPaths() {
  std::vector<Path> paths = CpuPaths();
  paths.insert(paths.begin(), {Backend::kReference, CpuIsa::kPortable});
  paths.push_back({Backend::kCuda, CpuIsa::kPortable});
  return paths;
}

std::string PathName(const Path& path) {
  if (path.backend == Backend::kReference) return "reference";
  if (path.backend == Backend::kCuda) return "cuda_on_cpu";
  return absl::StrCat("cpu_", CpuIsaName(path.isa));
}

std::string SelectPath(const Path& path) {
  if (path.backend == Backend::kReference) return "";
  if (path.backend == Backend::kCuda) {
    RegisterDevice(&cuda::HostMemoryOps());
    return "";
  }
  const absl::Status status = ForceCpuIsa(path.isa);
  if (status.ok()) return "";
  const char* needs =
      path.isa == CpuIsa::kAvx2 ? "AVX2, FMA and F16C" : "AVX-512 F, BW, DQ, VL and VNNI";
  return absl::StrCat("needs a CPU with ", needs, ": ", std::string(status.message()));
}

}  // namespace certkv::conformance
