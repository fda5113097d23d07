// Stands in for tests/conformance/path.cc: the suite runs on one path, this machine's GPU.
#include "kernels/cuda/cuda.h"
#include "tests/conformance/path.h"

namespace certkv::conformance {

std::vector<Path> AllPaths() { return {{Backend::kCuda, CpuIsa::kPortable}}; }

std::vector<Path> CpuPaths() { return AllPaths(); }

std::string PathName(const Path& /*path*/) { return "gpu"; }

std::string SelectPath(const Path& /*path*/) {
  const absl::Status status = cuda::CheckDevice();
  if (!status.ok()) return "needs a GPU: " + std::string(status.message());
  RegisterDevice(&cuda::HostMemoryOps());
  return "";
}

}  // namespace certkv::conformance
