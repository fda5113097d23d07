// Linked into a server with kernels/cuda/on_cpu in the place of CUDA: host memory is its GPU, which
// fails as the file in its environment says.
#include <cstdlib>

#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "tests/system/cluster.h"  // kDeviceFailures

namespace certkv {
namespace {

const bool kInjects = [] {
  const char* const path = std::getenv(kDeviceFailures);
  if (path != nullptr) cuda_sharing::InjectFailuresFromFile(path);
  return path != nullptr;
}();

}  // namespace
}  // namespace certkv
