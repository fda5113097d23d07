// Strict reader of safetensors files (https://github.com/huggingface/safetensors, format v1).
//
//   u64 little-endian header length n | n bytes of JSON | tensor bytes
//
// The file is memory-mapped read-only; tensors are views into it. Everything is checked when the
// file is opened, so that a view can never reach outside the file.
#ifndef CERTKV_KERNELS_CORE_SAFETENSORS_H_
#define CERTKV_KERNELS_CORE_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace certkv {

enum class TensorDtype : uint8_t { kF16, kBf16, kF32, kF64, kI8, kU8, kI16, kI32, kI64, kBool };

const char* TensorDtypeName(TensorDtype dtype);   // "F16", ...
int64_t TensorDtypeBytes(TensorDtype dtype);      // of one element

// A tensor of an open file. Row-major. Valid while its SafetensorsFile lives.
struct TensorView {
  TensorDtype dtype;
  std::vector<int64_t> shape;
  absl::Span<const uint8_t> bytes;  // element_count() * TensorDtypeBytes(dtype); any alignment
  int64_t element_count() const;
};

// Threads: const methods may be called concurrently.
class SafetensorsFile {
 public:
  // Maps and checks `path`. Does file I/O. Errors, each with its reason:
  //   NotFound [FILE_NOT_FOUND]; InvalidArgument [FILE_TRUNCATED] shorter than 8 bytes or than its
  //   header or tensors say; [HEADER_TOO_LARGE] > 16 MiB; [HEADER_NOT_JSON]; [HEADER_INVALID] wrong
  //   types or missing fields or duplicate names; [DTYPE_UNKNOWN]; [SHAPE_INVALID] negative,
  //   overflowing, or shape * dtype != bytes; [OFFSETS_INVALID] begin > end or past the data;
  //   [OFFSETS_OVERLAP]; [OFFSETS_GAP] bytes that belong to no tensor.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(absl::string_view path);
  // The same checks over bytes in memory, which must outlive the result (for tests and fuzzing).
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Parse(absl::Span<const uint8_t> bytes);

  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // Errors: NotFound [TENSOR_NOT_FOUND].
  absl::StatusOr<TensorView> Tensor(absl::string_view name) const;
  const std::map<std::string, TensorView, std::less<>>& tensors() const { return tensors_; }
  // The "__metadata__" strings.
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

 private:
  SafetensorsFile() = default;

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::map<std::string, TensorView, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_SAFETENSORS_H_
