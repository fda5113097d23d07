#include "services/common/runtime_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/status.h"

namespace certkv {

std::string RuntimeDirectory() {
  if (const char* path = std::getenv("CERTKV_RUNTIME_DIR"); path != nullptr && *path != '\0') {
    return path;
  }
  if (const char* path = std::getenv("XDG_RUNTIME_DIR"); path != nullptr && *path != '\0') {
    return absl::StrCat(path, "/certkv");
  }
  return absl::StrCat("/tmp/certkv-", getuid());
}

absl::Status EnsureSocketDirectory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return MakeError(absl::StatusCode::kUnavailable, "SOCKET_DIRECTORY_FAILED",
                     absl::StrCat("can't make the socket directory ", path, ": ",
                                  std::strerror(errno), "; choose another with --socket"));
  }
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return MakeError(absl::StatusCode::kUnavailable, "SOCKET_DIRECTORY_FAILED",
                     absl::StrCat(path, " is not a directory; choose another with --socket"));
  }
  const bool owner_is_trusted = info.st_uid == geteuid() || info.st_uid == 0;
  const bool others_may_replace = (info.st_mode & S_IWOTH) != 0 && (info.st_mode & S_ISVTX) == 0;
  if (!owner_is_trusted || others_may_replace) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SOCKET_DIRECTORY_UNSAFE",
                     absl::StrFormat("socket directory %s belongs to user %d with mode %04o, so "
                                     "another user could replace the socket; choose another with "
                                     "--socket or CERTKV_RUNTIME_DIR",
                                     path, info.st_uid, info.st_mode & 07777));
  }
  return absl::OkStatus();
}

}  // namespace certkv
