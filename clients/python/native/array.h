// Arrays of Python callers, borrowed for one call without a copy: what has the buffer protocol
// (NumPy, array.array, memoryview) or DLPack (PyTorch, JAX and others, on the CPU).
#ifndef CERTKV_CLIENTS_PYTHON_NATIVE_ARRAY_H_
#define CERTKV_CLIENTS_PYTHON_NATIVE_ARRAY_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "clients/python/native/dlpack.h"

namespace certkv::python {

enum class Dtype { kFloat16, kBfloat16, kFloat32, kUint16, kInt32, kUint8 };
const char* DtypeName(Dtype dtype);  // "float16", ...

// Holds the caller's array while it lives, so that its memory stays. Made and destroyed with the
// GIL; data() may be read without.
//
// Invariant: the array is aligned for its dtype, in this machine's memory and byte order and,
// unless strides are asked for, C-contiguous; anything else is refused when it is made.
class Array {
 public:
  // `name` goes into errors: "keys of layer 3".
  // Throws InvalidArgument [ARRAY_INVALID]: no array, of another device, dtype, byte order or
  // layout. Nothing is converted or copied silently.
  enum class Strides : uint8_t { kContiguous, kAny };
  Array(pybind11::handle object, const std::string& name, Strides strides = Strides::kContiguous);
  Array(Array&&) = default;

  const void* data() const { return data_; }
  // The memory to write into. Throws InvalidArgument [ARRAY_INVALID] unless the array has the
  // buffer protocol and can be written.
  void* MutableData() const;
  Dtype dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  // One for each axis.
  const std::vector<int64_t>& strides_bytes() const { return strides_bytes_; }

  // Throws InvalidArgument [ARRAY_INVALID] with the seen and the wanted shape; -1 is any length.
  void CheckShape(const std::vector<int64_t>& wanted, const char* axes) const;
  // Throws InvalidArgument [ARRAY_INVALID] with the dtypes that are taken.
  void CheckDtype(const std::vector<Dtype>& wanted) const;

 private:
  void BorrowBuffer(pybind11::handle object);
  void BorrowDlpack(pybind11::handle object);
  // No strides: contiguous.
  void TakeLayout(const std::vector<int64_t>& strides_bytes, int64_t item_bytes);
  [[noreturn]] void Refuse(const std::string& what) const;

  std::string name_;
  Strides strides_;
  const void* data_ = nullptr;
  Dtype dtype_ = Dtype::kFloat32;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_bytes_;
  // One of them holds the memory.
  std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> buffer_;
  std::unique_ptr<DlManagedTensor, void (*)(DlManagedTensor*)> managed_;
};

// The token ids of a call: a sequence of Python integers, or an int32 array.
// Throws InvalidArgument [ARRAY_INVALID | SEQUENCE_INVALID].
std::vector<int32_t> TokenIds(pybind11::handle object);

}  // namespace certkv::python

#endif  // CERTKV_CLIENTS_PYTHON_NATIVE_ARRAY_H_
