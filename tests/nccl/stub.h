// Where the stub of NCCL is, and how a test has it fail (stub_nccl.cc).
#ifndef CERTKV_TESTS_NCCL_STUB_H_
#define CERTKV_TESTS_NCCL_STUB_H_

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace certkv {

// CERTKV_STUB_NCCL_PATH and _TRUNCATED come from the build.
inline std::string StubNccl() { return CERTKV_STUB_NCCL_PATH; }

// Has the stub in this process fail while it lives.
class StubFailures {
 public:
  StubFailures() : path_(absl::StrCat(::testing::TempDir(), "/stub-nccl-", getpid())) {
    Set("");
    setenv("CERTKV_STUB_NCCL", path_.c_str(), 1);
  }
  ~StubFailures() {
    unsetenv("CERTKV_STUB_NCCL");
    unlink(path_.c_str());
  }
  // In the language of stub_nccl.cc; counts of "@" begin anew.
  void Set(const std::string& failures) const { std::ofstream(path_) << failures; }

 private:
  const std::string path_;
};

// The most bytes that were under way at once in this process since the last call.
inline int64_t TakeStubPeakBytes() {
  void* const stub = dlopen(StubNccl().c_str(), RTLD_NOW | RTLD_NOLOAD);
  CERTKV_CHECK(stub != nullptr, "the stub was opened");
  auto* const take = reinterpret_cast<int64_t (*)()>(dlsym(stub, "stub_nccl_take_peak_bytes"));
  const int64_t bytes = take();
  dlclose(stub);
  return bytes;
}

}  // namespace certkv

#endif  // CERTKV_TESTS_NCCL_STUB_H_
