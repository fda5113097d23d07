// Fuzzes SafetensorsFile::Parse: any bytes are refused with a reason, or read inside themselves.
#include <cstdint>

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
