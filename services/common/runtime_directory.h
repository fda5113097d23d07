// Where sockets live by default.
#ifndef CERTKV_SERVICES_COMMON_RUNTIME_DIRECTORY_H_
#define CERTKV_SERVICES_COMMON_RUNTIME_DIRECTORY_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace certkv {

// $CERTKV_RUNTIME_DIR, else $XDG_RUNTIME_DIR/certkv, else /tmp/certkv-<uid>. Doesn't create it.
std::string RuntimeDirectory();

// Makes `path` with mode 0700 (its parent exists) or accepts the directory that is there.
// Errors: FailedPrecondition [SOCKET_DIRECTORY_UNSAFE], another user owns it, or others may write
// to it without the sticky bit: a stranger could put a socket in our server's place.
// Unavailable [SOCKET_DIRECTORY_FAILED], with errno's text.
absl::Status EnsureSocketDirectory(const std::string& path);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_RUNTIME_DIRECTORY_H_
