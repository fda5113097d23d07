// The stable C layout of DLPack's unversioned exchange (dmlc/dlpack, major version 0), which every
// __dlpack__() without a max_version argument gives. Little enough to be no dependency.
#ifndef CERTKV_CLIENTS_PYTHON_NATIVE_DLPACK_H_
#define CERTKV_CLIENTS_PYTHON_NATIVE_DLPACK_H_

#include <cstddef>
#include <cstdint>

namespace certkv::python {

inline constexpr int32_t kDlCpu = 1;  // device type

// Type codes.
inline constexpr uint8_t kDlInt = 0;
inline constexpr uint8_t kDlUint = 1;
inline constexpr uint8_t kDlFloat = 2;
inline constexpr uint8_t kDlBfloat = 4;

struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim] in elements; null = C-contiguous
  uint64_t byte_offset;
};

struct DlManagedTensor {
  DlTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DlManagedTensor* self);  // may be null
};
static_assert(offsetof(DlTensor, shape) == 24 && sizeof(DlTensor) == 48);
static_assert(sizeof(DlManagedTensor) == 64);

}  // namespace certkv::python

#endif  // CERTKV_CLIENTS_PYTHON_NATIVE_DLPACK_H_
