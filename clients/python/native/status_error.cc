#include "clients/python/native/status_error.h"

#include <string>

#include "kernels/core/status.h"
#include "services/common/retry_delay.h"

namespace certkv::python {

namespace py = pybind11;

void Throw(const absl::Status& error) { throw StatusError(error); }

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) Throw(status);
}

py::object ExceptionOf(const absl::Status& status) {
  const py::object make = py::module_::import("certkv._errors").attr("error_of");
  return make(absl::StatusCodeToString(status.code()), ReasonOf(status),
              std::string(status.message()), RetryDelayMsOf(status));
}

void RegisterStatusError() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      const py::object exception = ExceptionOf(error.status());
      PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
    }
  });
}

}  // namespace certkv::python
