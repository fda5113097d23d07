#include "clients/python/native/numpy_array.h"

#include <utility>

namespace certkv::python {

namespace py = pybind11;

namespace {

// Bytes with the buffer protocol, which is how NumPy takes memory that is another's.
struct Memory {
  void* data;
  int64_t size_bytes;
  bool read_only;
  std::shared_ptr<const void> owner;
};

py::tuple TupleOf(const std::vector<int64_t>& numbers) {
  py::tuple out(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) out[i] = numbers[i];
  return out;
}

py::object MakeArray(void* data, const ArrayLayout& layout, bool read_only,
                     std::shared_ptr<const void> owner) {
  const py::module_ numpy = py::module_::import("numpy");
  const py::object dtype = numpy.attr("dtype")(layout.dtype);
  const auto item_bytes = py::cast<int64_t>(dtype.attr("itemsize"));
  int64_t size_bytes = item_bytes;
  py::object strides = py::none();
  if (layout.strides_bytes.empty()) {
    for (const int64_t length : layout.shape) size_bytes *= length;
  } else {
    for (size_t i = 0; i < layout.shape.size(); ++i) {
      size_bytes += (layout.shape[i] - 1) * layout.strides_bytes[i];
    }
    strides = TupleOf(layout.strides_bytes);
  }
  const py::object memory = py::cast(Memory{data, size_bytes, read_only, std::move(owner)});
  return numpy.attr("ndarray")(TupleOf(layout.shape), dtype, memory, 0, strides);
}

}  // namespace

py::object ArrayOver(void* data, const ArrayLayout& layout, std::shared_ptr<const void> owner) {
  return MakeArray(data, layout, /*read_only=*/false, std::move(owner));
}

py::object ReadOnlyArrayOver(const void* data, const ArrayLayout& layout,
                             std::shared_ptr<const void> owner) {
  return MakeArray(const_cast<void*>(data), layout, /*read_only=*/true, std::move(owner));
}

void DefineMemory(py::module_& module) {
  py::class_<Memory>(module, "Memory", py::buffer_protocol()).def_buffer([](Memory& memory) {
    return py::buffer_info(memory.data, 1, py::format_descriptor<uint8_t>::format(), 1,
                           {memory.size_bytes}, {1}, memory.read_only);
  });
}

}  // namespace certkv::python
