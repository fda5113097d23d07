// Fuzzes SafetensorsFile::Parse: any bytes are refused with a reason, or read inside themselves.
//
// The build's target runs each file of the given folders once (ctest:
// tests/fuzz/safetensors_corpus). With libFuzzer, from the repository root:
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -DCERTKV_LIBFUZZER -I.
//     tests/fuzz/safetensors_fuzz.cc kernels/core/{safetensors,status,check}.cc
//     $(pkg-config --libs absl_status absl_statusor absl_strings) -o build/safetensors_fuzz
//   build/safetensors_fuzz -max_len=4096 NEW_INPUTS_FOLDER tests/fuzz/safetensors_corpus
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "kernels/core/check.h"
#include "kernels/core/safetensors.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

// Aborts when the parser breaks its promise.
void CheckParse(absl::Span<const uint8_t> input) {
  const auto file = SafetensorsFile::Parse(input);
  if (!file.ok()) {
    CERTKV_CHECK(!ReasonOf(file.status()).empty(), "every refusal has a reason");
    CERTKV_CHECK(file.status().message().size() < 4096, "messages stay short");
    return;
  }
  int64_t tensor_bytes = 0;
  uint64_t sum = 0;
  for (const auto& [name, tensor] : (*file)->tensors()) {
    CERTKV_CHECK(static_cast<int64_t>(tensor.bytes.size()) ==
                     tensor.element_count() * TensorDtypeBytes(tensor.dtype),
                 "a view holds whole elements");
    int64_t elements = 1;
    for (const int64_t dim : tensor.shape) elements *= dim;
    CERTKV_CHECK(elements == tensor.element_count(), "a view has the size of its shape");
    for (const uint8_t byte : tensor.bytes) sum += byte;  // AddressSanitizer watches
    tensor_bytes += static_cast<int64_t>(tensor.bytes.size());
  }
  CERTKV_CHECK(tensor_bytes <= static_cast<int64_t>(input.size()) - 8, "views do not overlap");
  CERTKV_CHECK(sum <= 255 * static_cast<uint64_t>(tensor_bytes), "bytes are bytes");
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  certkv::CheckParse(absl::MakeConstSpan(data, size));
  return 0;
}

#ifndef CERTKV_LIBFUZZER
int main(int argc, char** argv) {
  int input_count = 0;
  for (int i = 1; i < argc; ++i) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(argv[i], error)) {
      std::ifstream stream(entry.path(), std::ios::binary);
      const std::vector<char> bytes(std::istreambuf_iterator<char>(stream), {});
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++input_count;
    }
    if (error) std::fprintf(stderr, "%s: %s\n", argv[i], error.message().c_str());
  }
  std::printf("%d inputs\n", input_count);
  if (input_count > 0) return 0;
  std::fprintf(stderr, "usage: %s FOLDER...; no input was run\n", argv[0]);
  return 1;
}
#endif
