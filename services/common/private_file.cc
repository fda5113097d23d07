#include "services/common/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

absl::Status Unreadable(const std::string& path) {
  return MakeError(absl::StatusCode::kNotFound, "SECRET_FILE_UNREADABLE",
                   absl::StrCat("can't read ", path, ": ", std::strerror(errno),
                                "; check the path and who may read it"));
}

bool IsTokenByte(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
         absl::string_view("._~+/=-").find(c) != absl::string_view::npos;
}

}  // namespace

absl::Status CheckPrivateFile(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return Unreadable(path);
  const bool is_trusted = info.st_uid == geteuid() || info.st_uid == 0;
  if (is_trusted && S_ISREG(info.st_mode) && (info.st_mode & (S_IRWXO | S_IWGRP)) == 0) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "SECRET_FILE_UNSAFE",
                   absl::StrFormat("%s belongs to user %d with mode %04o, must be a file of this "
                                   "user or root that others can neither read nor change; chmod "
                                   "600 %s",
                                   path, info.st_uid, info.st_mode & 07777, path));
}

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  CERTKV_RETURN_IF_ERROR(CheckPrivateFile(path));
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return Unreadable(path);
  std::string text(kTokenBytesMax + 3, '\0');
  const ssize_t size = read(file.get(), text.data(), text.size());
  if (size < 0) return Unreadable(path);
  text.resize(static_cast<size_t>(size));
  const absl::string_view token = absl::StripTrailingAsciiWhitespace(text);
  if (token.size() >= kTokenBytesMin && token.size() <= kTokenBytesMax &&
      std::all_of(token.begin(), token.end(), IsTokenByte)) {
    return std::string(token);
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "TOKEN_FILE_INVALID",
                   absl::StrCat(path, " holds no token, must be one line of ", kTokenBytesMin,
                                " to ", kTokenBytesMax, " of [a-zA-Z0-9._~+/=-]"));
}

}  // namespace certkv
