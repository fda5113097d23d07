// Files that hold secrets.
#ifndef CERTKV_SERVICES_COMMON_PRIVATE_FILE_H_
#define CERTKV_SERVICES_COMMON_PRIVATE_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

inline constexpr size_t kTokenBytesMin = 32;
inline constexpr size_t kTokenBytesMax = 256;

// Is the file one that only its owner, who is this user or root, may change, and that others than
// owner and group may not read?
// Errors: FailedPrecondition [SECRET_FILE_UNSAFE]; NotFound [SECRET_FILE_UNREADABLE], with errno's
// text.
absl::Status CheckPrivateFile(const std::string& path);

// The token in a private file: one line of 32 to 256 of [a-zA-Z0-9._~+/=-].
// Errors: as CheckPrivateFile; InvalidArgument [TOKEN_FILE_INVALID]. No error shows the token.
absl::StatusOr<std::string> ReadTokenFile(const std::string& path);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_PRIVATE_FILE_H_
