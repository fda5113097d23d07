#include "tests/conformance/path.h"

#include "absl/strings/str_cat.h"

namespace certkv::conformance {

std::vector<Path> CpuPaths() {
  return {{Backend::kCpu, CpuIsa::kPortable},
          {Backend::kCpu, CpuIsa::kAvx2},
          {Backend::kCpu, CpuIsa::kAvx512Vnni}};
}

std::vector<Path> AllPaths() {
  std::vector<Path> paths = CpuPaths();
  paths.insert(paths.begin(), {Backend::kReference, CpuIsa::kPortable});
  return paths;
}

std::string PathName(const Path& path) {
  if (path.backend == Backend::kReference) return "reference";
  return absl::StrCat("cpu_", CpuIsaName(path.isa));
}

std::string SelectPath(const Path& path) {
  if (path.backend == Backend::kReference) return "";
  const absl::Status status = ForceCpuIsa(path.isa);
  if (status.ok()) return "";
  const char* needs =
      path.isa == CpuIsa::kAvx2 ? "AVX2, FMA and F16C" : "AVX-512 F, BW, DQ, VL and VNNI";
  return absl::StrCat("needs a CPU with ", needs, ": ", std::string(status.message()));
}

}  // namespace certkv::conformance
