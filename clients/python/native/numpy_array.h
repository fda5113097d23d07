// NumPy arrays over the extension's memory, made by Python calls.
//
// Not by pybind11/numpy.h: it reads NumPy's structures where the NumPy that it was written for has
// them, so a build with Debian's pybind11 2.10 takes wrong strides from NumPy 2, without an error.
#ifndef CERTKV_CLIENTS_PYTHON_NATIVE_NUMPY_ARRAY_H_
#define CERTKV_CLIENTS_PYTHON_NATIVE_NUMPY_ARRAY_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace certkv::python {

struct ArrayLayout {
  pybind11::object dtype;              // what numpy.dtype takes
  std::vector<int64_t> shape;          // every length > 0
  std::vector<int64_t> strides_bytes;  // one for each axis, >= 0; {} = C-contiguous
};

// An array over `data`, without a copy. It keeps `owner` until it and all its views are gone, and
// drops it with the GIL held.
pybind11::object ArrayOver(void* data, const ArrayLayout& layout,
                           std::shared_ptr<const void> owner);
// The same, which can't be made writable.
pybind11::object ReadOnlyArrayOver(const void* data, const ArrayLayout& layout,
                                   std::shared_ptr<const void> owner);

// Before the first array.
void DefineMemory(pybind11::module_& module);

}  // namespace certkv::python

#endif  // CERTKV_CLIENTS_PYTHON_NATIVE_NUMPY_ARRAY_H_
