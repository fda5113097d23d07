#include "clients/python/native/array.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "clients/python/native/status_error.h"
#include "kernels/core/status.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

absl::Status ArrayInvalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "ARRAY_INVALID", message);
}

int64_t ItemBytes(Dtype dtype) {
  if (dtype == Dtype::kUint8) return 1;
  return dtype == Dtype::kFloat32 || dtype == Dtype::kInt32 ? 4 : 2;
}

std::string TypeName(py::handle object) {
  return py::cast<std::string>(py::type::handle_of(object).attr("__name__"));
}

// The text of the Python exception that is set, which is cleared.
std::string TakePythonError() {
  const py::error_already_set error;
  return error.what();
}

// "float16" of a buffer's format: one letter, perhaps after a mark of the native byte order.
bool DtypeOfFormat(absl::string_view format, int64_t item_bytes, Dtype* dtype) {
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<')) {
    format.remove_prefix(1);
  }
  if (format == "e") {
    *dtype = Dtype::kFloat16;
  } else if (format == "H") {
    *dtype = Dtype::kUint16;
  } else if (format == "f") {
    *dtype = Dtype::kFloat32;
  } else if (format == "i" || (format == "l" && item_bytes == 4)) {
    *dtype = Dtype::kInt32;
  } else if (format == "B") {
    *dtype = Dtype::kUint8;
  } else {
    return false;
  }
  return item_bytes == ItemBytes(*dtype);
}

bool DtypeOfDlpack(const DlDataType& type, Dtype* dtype) {
  if (type.lanes != 1) return false;
  if (type.code == kDlFloat && type.bits == 16) {
    *dtype = Dtype::kFloat16;
  } else if (type.code == kDlBfloat && type.bits == 16) {
    *dtype = Dtype::kBfloat16;
  } else if (type.code == kDlFloat && type.bits == 32) {
    *dtype = Dtype::kFloat32;
  } else if (type.code == kDlUint && type.bits == 16) {
    *dtype = Dtype::kUint16;
  } else if (type.code == kDlInt && type.bits == 32) {
    *dtype = Dtype::kInt32;
  } else if (type.code == kDlUint && type.bits == 8) {
    *dtype = Dtype::kUint8;
  } else {
    return false;
  }
  return true;
}

void ReleaseBuffer(Py_buffer* buffer) {
  PyBuffer_Release(buffer);
  delete buffer;
}

void ReleaseTensor(DlManagedTensor* tensor) {
  if (tensor->deleter != nullptr) tensor->deleter(tensor);
}

constexpr char kKnownDtypes[] = "float16, bfloat16, float32, uint8, uint16 and int32";

}  // namespace

const char* DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kBfloat16:
      return "bfloat16";
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kUint16:
      return "uint16";
    case Dtype::kInt32:
      return "int32";
    case Dtype::kUint8:
      return "uint8";
  }
  return "?";
}

Array::Array(py::handle object, const std::string& name, Strides strides)
    : name_(name),
      strides_(strides),
      buffer_(nullptr, &ReleaseBuffer),
      managed_(nullptr, &ReleaseTensor) {
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    BorrowBuffer(object);
  } else if (py::hasattr(object, "__dlpack__") && py::hasattr(object, "__dlpack_device__")) {
    BorrowDlpack(object);
  } else {
    Refuse(absl::StrCat("is a ", TypeName(object),
                        "; pass a NumPy array or an object with __dlpack__"));
  }
}

void Array::Refuse(const std::string& what) const {
  Throw(ArrayInvalid(absl::StrCat(name_, " ", what)));
}

void Array::BorrowBuffer(py::handle object) {
  // What can't say its layout or dtype (NumPy's extension types) is refused with Python's reason.
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), buffer.get(), PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    Refuse(absl::StrCat("can't be borrowed: ", TakePythonError()));
  }
  buffer_.reset(buffer.release());
  const absl::string_view format = buffer_->format == nullptr ? "B" : buffer_->format;
  if (!DtypeOfFormat(format, buffer_->itemsize, &dtype_)) {
    Refuse(absl::StrCat("has the element format '", format, "', known are ", kKnownDtypes,
                        " in native byte order"));
  }
  shape_.assign(buffer_->shape, buffer_->shape + buffer_->ndim);
  data_ = buffer_->buf;
  TakeLayout({buffer_->strides, buffer_->strides + buffer_->ndim}, buffer_->itemsize);
}

void Array::BorrowDlpack(py::handle object) {
  std::pair<int, int> device;
  py::object capsule;
  try {
    device = py::cast<std::pair<int, int>>(object.attr("__dlpack_device__")());
    if (device.first == kDlCpu) capsule = object.attr("__dlpack__")();
  } catch (const py::error_already_set& error) {
    Refuse(absl::StrCat("can't be borrowed: ", error.what()));
  }
  if (device.first != kDlCpu) {
    Refuse(absl::StrCat("is on DLPack device type ", device.first,
                        ", only 1 (CPU memory) can be read; move it to the CPU"));
  }
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) Refuse(absl::StrCat("gave no DLPack tensor: ", TakePythonError()));
  const DlTensor& tensor = managed->dl_tensor;
  // Until the capsule is renamed it is its own to free, whatever is thrown.
  if (!DtypeOfDlpack(tensor.dtype, &dtype_)) {
    Refuse(absl::StrCat("has DLPack type code ", tensor.dtype.code, " of ", tensor.dtype.bits,
                        " bits, known are ", kKnownDtypes));
  }
  shape_.assign(tensor.shape, tensor.shape + tensor.ndim);
  data_ = static_cast<const uint8_t*>(tensor.data) + tensor.byte_offset;
  const int64_t item_bytes = ItemBytes(dtype_);
  std::vector<int64_t> strides;
  for (int i = 0; tensor.strides != nullptr && i < tensor.ndim; ++i) {
    strides.push_back(tensor.strides[i] * item_bytes);
  }
  TakeLayout(strides, item_bytes);
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  managed_.reset(managed);
}

void Array::TakeLayout(const std::vector<int64_t>& strides_bytes, int64_t item_bytes) {
  if (reinterpret_cast<uintptr_t>(data_) % item_bytes != 0) {
    Refuse(absl::StrCat("is not aligned to its ", item_bytes, " byte elements; copy it"));
  }
  strides_bytes_ = strides_bytes;
  strides_bytes_.resize(shape_.size());
  int64_t expected = item_bytes;
  for (size_t i = shape_.size(); i-- > 0;) {
    if (strides_bytes.empty()) strides_bytes_[i] = expected;
    // The stride of an axis of length 1 means nothing.
    if (strides_ == Strides::kContiguous && shape_[i] > 1 && !strides_bytes.empty() &&
        strides_bytes[i] != expected) {
      Refuse(absl::StrCat("has strides of (", absl::StrJoin(strides_bytes, ", "),
                          ") bytes for the shape (", absl::StrJoin(shape_, ", "),
                          "), must be C-contiguous; pass numpy.ascontiguousarray(...) or "
                          "tensor.contiguous()"));
    }
    expected *= std::max<int64_t>(shape_[i], 1);
  }
}

void* Array::MutableData() const {
  if (buffer_ == nullptr || buffer_->readonly != 0) {
    Refuse("is written into, and must be a writable array with the buffer protocol");
  }
  return buffer_->buf;
}

void Array::CheckShape(const std::vector<int64_t>& wanted, const char* axes) const {
  bool fits = wanted.size() == shape_.size();
  for (size_t i = 0; fits && i < wanted.size(); ++i) {
    fits = wanted[i] == -1 || wanted[i] == shape_[i];
  }
  if (fits) return;
  const auto any = [](std::string* out, int64_t length) {
    absl::StrAppend(out, length == -1 ? "any" : absl::StrCat(length));
  };
  Refuse(absl::StrCat("has the shape (", absl::StrJoin(shape_, ", "), "), must be (",
                      absl::StrJoin(wanted, ", ", any), "): ", axes));
}

void Array::CheckDtype(const std::vector<Dtype>& wanted) const {
  if (std::find(wanted.begin(), wanted.end(), dtype_) != wanted.end()) return;
  const auto name = [](std::string* out, Dtype dtype) { absl::StrAppend(out, DtypeName(dtype)); };
  Refuse(absl::StrCat("is ", DtypeName(dtype_), ", must be ", absl::StrJoin(wanted, " or ", name)));
}

std::vector<int32_t> TokenIds(py::handle object) {
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    std::vector<int32_t> ids;
    ids.reserve(py::len(object));
    for (const py::handle item : object) {
      int overflow = 0;
      const int64_t id = PyLong_Check(item.ptr()) != 0
                             ? PyLong_AsLongLongAndOverflow(item.ptr(), &overflow)
                             : int64_t{-1};
      if (!(overflow == 0 && id >= 0 && id <= std::numeric_limits<int32_t>::max())) {
        Throw(ArrayInvalid(absl::StrCat("token_ids[", ids.size(), "] is ",
                                        py::cast<std::string>(py::repr(item)),
                                        ", must be an integer in [0, 2147483647]")));
      }
      ids.push_back(static_cast<int32_t>(id));
    }
    return ids;
  }
  const Array array(object, "token_ids");
  array.CheckDtype({Dtype::kInt32});
  array.CheckShape({-1}, "one id for each token");
  const auto* ids = static_cast<const int32_t*>(array.data());
  return std::vector<int32_t>(ids, ids + array.shape()[0]);
}

}  // namespace certkv::python
