// Status helpers: an error carries a code (what the caller does next), a reason (for programs) and
// a message (for people).
//
// The reason is an UPPER_SNAKE word from docs/errors.md, stored as a payload of the absl::Status
// and sent over the wire as google.rpc.ErrorInfo-like metadata by services/common. A message says
// what happened to which thing, the value seen, the limit with its unit, and the remedy.
#ifndef CERTKV_KERNELS_CORE_STATUS_H_
#define CERTKV_KERNELS_CORE_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

// Makes an error. `code` must not be kOk; `reason` is UPPER_SNAKE and at most 63 bytes.
absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message);

// The reason of `status`, or "" when it has none (or is OK).
std::string ReasonOf(const absl::Status& status);

// The same error with `context` and ": " before its message; code, reason and payloads stay.
absl::Status WithContext(const absl::Status& status, absl::string_view context);

}  // namespace certkv

// Returns from the calling function when `expr` is an error.
#define CERTKV_RETURN_IF_ERROR(expr)                 \
  do {                                               \
    absl::Status certkv_status_ = (expr);            \
    if (!certkv_status_.ok()) return certkv_status_; \
  } while (false)

// CERTKV_ASSIGN_OR_RETURN(auto value, Function());
#define CERTKV_ASSIGN_OR_RETURN(lhs, expr) \
  CERTKV_ASSIGN_OR_RETURN_IMPL_(CERTKV_STATUS_CONCAT_(certkv_statusor_, __LINE__), lhs, expr)
#define CERTKV_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return statusor.status();            \
  lhs = std::move(statusor).value()
#define CERTKV_STATUS_CONCAT_(a, b) CERTKV_STATUS_CONCAT_IMPL_(a, b)
#define CERTKV_STATUS_CONCAT_IMPL_(a, b) a##b

#endif  // CERTKV_KERNELS_CORE_STATUS_H_
