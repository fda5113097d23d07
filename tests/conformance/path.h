// The implementations that the conformance suite runs against.
#ifndef CERTKV_TESTS_CONFORMANCE_PATH_H_
#define CERTKV_TESTS_CONFORMANCE_PATH_H_

#include <ostream>
#include <string>
#include <vector>

#include "kernels/ops/backend.h"

namespace certkv::conformance {

struct Path {
  Backend backend;
  CpuIsa isa;  // kCpu only
};

// The reference, then the CPU backend with every instruction set that CertKV has, whether this
// machine can run it or not, then the CUDA kernels, executed on CPU threads.
std::vector<Path> AllPaths();
// The CPU backend's alone.
std::vector<Path> CpuPaths();

// "reference", "cpu_avx2", "cuda_on_cpu", ...: for test names.
std::string PathName(const Path& path);

// Makes the path's backend use its instruction set or device. Empty, or why this machine can't run
// it.
std::string SelectPath(const Path& path);

inline void PrintTo(const Path& path, std::ostream* out) { *out << PathName(path); }

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_PATH_H_
