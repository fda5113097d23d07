// Errors at the boundary to Python: an absl::Status becomes an exception of certkv._errors, with
// its code, reason, message and retry delay. The one place where CertKV's C++ throws, because
// pybind11 carries errors that way.
#ifndef CERTKV_CLIENTS_PYTHON_NATIVE_STATUS_ERROR_H_
#define CERTKV_CLIENTS_PYTHON_NATIVE_STATUS_ERROR_H_

#include <pybind11/pybind11.h>

#include <exception>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace certkv::python {

// Carries an error to where pybind11 turns it into the Python exception.
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)) {}
  const absl::Status& status() const { return status_; }
  const char* what() const noexcept override { return "certkv error"; }

 private:
  absl::Status status_;
};

// Throws, unless OK. Callable without the GIL.
[[noreturn]] void Throw(const absl::Status& error);
void ThrowIfError(const absl::Status& status);
template <typename T>
T ValueOrThrow(absl::StatusOr<T> value) {
  ThrowIfError(value.status());
  return *std::move(value);
}

// The exception object of an error. Needs the GIL.
pybind11::object ExceptionOf(const absl::Status& status);

// Makes pybind11 translate StatusError. Once, when the module is loaded.
void RegisterStatusError();

}  // namespace certkv::python

#endif  // CERTKV_CLIENTS_PYTHON_NATIVE_STATUS_ERROR_H_
