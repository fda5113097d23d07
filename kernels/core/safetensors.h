// Strict reader of safetensors files (https://github.com/huggingface/safetensors, format v1).
//
//   u64 little-endian header length n | n bytes of JSON | tensor bytes
//
// The file is memory-mapped read-only; tensors are views into it. Everything is checked when the
// file is opened, so that a view can never reach outside the file.
#ifndef CERTKV_KERNELS_CORE_SAFETENSORS_H_
#define CERTKV_KERNELS_CORE_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace certkv {

enum class TensorDtype : uint8_t { kF16, kBf16, kF32, kF64, kI8, kU8, kI16, kI32, kI64, kBool };

const char* TensorDtypeName(TensorDtype dtype);  // "F16", ...
int64_t TensorDtypeBytes(TensorDtype dtype);     // of one element

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
  // Maps and checks `path`. Does file I/O. The file must not shrink while it is open (the kernel
  // would raise SIGBUS). Errors, each with its reason and the file's name:
  //   NotFound [FILE_NOT_FOUND]; [FILE_UNREADABLE] with the code of the system's error.
  //   InvalidArgument, in the order in which they are checked:
  //   [FILE_TRUNCATED] shorter than 8 bytes, or than its header or tensors say; [HEADER_TOO_LARGE]
  //   above kSafetensorsHeaderBytesMax; [HEADER_NOT_JSON]; [HEADER_INVALID] a name twice, nesting
  //   deeper than the format's, wrong types, missing or unknown fields; [DTYPE_UNKNOWN];
  //   [SHAPE_INVALID] negative or overflowing; [OFFSETS_INVALID] negative or begin > end;
  //   [SHAPE_INVALID] shape * dtype != bytes; [OFFSETS_OVERLAP]; [OFFSETS_GAP] bytes that belong to
  //   no tensor, also behind the last.
  // Tensors of size zero are allowed between others.
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
  // Checks `bytes` and fills tensors_ and metadata_. `path` is for messages.
  absl::Status Load(absl::string_view path, absl::Span<const uint8_t> bytes);

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::map<std::string, TensorView, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_SAFETENSORS_H_
