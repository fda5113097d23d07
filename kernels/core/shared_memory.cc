#include "kernels/core/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

// F_SEAL_FUTURE_WRITE of Linux 5.1, which not every libc names.
constexpr int kSealFutureWrite = 0x0010;
constexpr size_t kFdsPerMessageMax = 8;
constexpr int kPollMsMax = 1 << 30;  // 12 days, in one poll
constexpr size_t kMessageBytesMaxWithFds = 4096;

std::string ErrnoText() { return std::strerror(errno); }

absl::Status SocketClosed(absl::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, "SOCKET_CLOSED",
                   absl::StrCat("Unix socket: ", what, "; connect again"));
}

}  // namespace

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = fd;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    size_bytes_ = std::exchange(other.size_bytes_, 0);
  }
  return *this;
}

void Mapping::reset() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
  data_ = nullptr;
  size_bytes_ = 0;
}

absl::StatusOr<Mapping> Mapping::Map(int fd, Access access) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || info.st_size <= 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "MAP_FAILED",
                     absl::StrCat("descriptor ", fd, " is not a non-empty file to map"));
  }
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  void* data = mmap(nullptr, static_cast<size_t>(info.st_size), protection, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "MAP_FAILED",
                     absl::StrCat("mapping ", info.st_size, " bytes ",
                                  access == Access::kReadOnly ? "read-only" : "read-write",
                                  " failed: ", ErrnoText(), "; sealed slabs map read-only"));
  }
  madvise(data, static_cast<size_t>(info.st_size), MADV_HUGEPAGE);  // advice only
  Mapping mapping;
  mapping.data_ = static_cast<uint8_t*>(data);
  mapping.size_bytes_ = info.st_size;
  return mapping;
}

absl::StatusOr<UniqueFd> CreateMemfd(absl::string_view name, int64_t size_bytes) {
  UniqueFd fd(memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid() || ftruncate(fd.get(), size_bytes) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return MakeError(absl::StatusCode::kResourceExhausted, "MEMFD_FAILED",
                     absl::StrCat("memfd ", name, " of ", size_bytes, " bytes: ", ErrnoText(),
                                  "; lower the tier's size in the config"));
  }
  return fd;
}

absl::Status SealAgainstWrites(int fd) {
  if (fcntl(fd, F_ADD_SEALS, kSealFutureWrite | F_SEAL_SEAL) == 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInternal, "MEMFD_SEAL_FAILED",
                   absl::StrCat("sealing a memfd against writes: ", ErrnoText(),
                                "; Linux 5.1 or newer is needed"));
}

absl::StatusOr<UniqueFd> ReopenReadOnly(int fd) {
  UniqueFd copy(open(absl::StrCat("/proc/self/fd/", fd).c_str(), O_RDONLY | O_CLOEXEC));
  if (copy.valid()) return copy;
  return MakeError(absl::StatusCode::kInternal, "MEMFD_REOPEN_FAILED",
                   absl::StrCat("opening a memfd read-only: ", ErrnoText(), "; is /proc mounted?"));
}

absl::Status SendWithFds(int socket, absl::string_view bytes, const std::vector<int>& fds) {
  CERTKV_CHECK(
      !bytes.empty() && bytes.size() <= kMessageBytesMaxWithFds && fds.size() <= kFdsPerMessageMax,
      "a message with descriptors is within its limits");
  alignas(cmsghdr) char control[CMSG_SPACE(kFdsPerMessageMax * sizeof(int))] = {};
  size_t sent = 0;
  while (sent < bytes.size()) {
    iovec part{const_cast<char*>(bytes.data()) + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (sent == 0 && !fds.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
    }
    const ssize_t count = sendmsg(socket, &message, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return SocketClosed(absl::StrCat("send failed: ", ErrnoText()));
    sent += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<BytesWithFds> ReceiveWithFds(int socket, int64_t byte_count, int64_t timeout_ms) {
  using Clock = std::chrono::steady_clock;  // the kernel's, for poll; engines use Clock
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  BytesWithFds result;
  while (static_cast<int64_t>(result.bytes.size()) < byte_count) {
    int wait_ms = -1;
    if (timeout_ms != 0) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      wait_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, kPollMsMax));
    }
    pollfd waiting{socket, POLLIN, 0};
    const int ready = poll(&waiting, 1, wait_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0 && wait_ms < kPollMsMax) {
      return SocketClosed(absl::StrCat("no answer in ", timeout_ms, " ms"));
    }
    if (ready == 0) continue;
    char buffer[kMessageBytesMaxWithFds];
    alignas(cmsghdr) char control[CMSG_SPACE(kFdsPerMessageMax * sizeof(int))] = {};
    const size_t wanted =
        std::min(sizeof(buffer), static_cast<size_t>(byte_count) - result.bytes.size());
    iovec part{buffer, wanted};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t count = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return SocketClosed(count == 0 ? "the peer closed it" : ErrnoText());
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const size_t fd_count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < fd_count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
        result.fds.emplace_back(fd);
      }
    }
    if ((message.msg_flags & MSG_CTRUNC) != 0 || result.fds.size() > kFdsPerMessageMax) {
      return SocketClosed(
          absl::StrCat("the peer sent more than ", kFdsPerMessageMax, " descriptors"));
    }
    result.bytes.append(buffer, static_cast<size_t>(count));
  }
  return result;
}

absl::StatusOr<UniqueFd> ConnectUnixSocket(absl::string_view path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "SOCKET_PATH_TOO_LONG",
        absl::StrCat("Unix socket path has ", path.size(), " bytes, must have 1 to ",
                     sizeof(address.sun_path) - 1, "; choose a shorter runtime directory"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return MakeError(
        absl::StatusCode::kUnavailable, "SOCKET_CONNECT_FAILED",
        absl::StrCat("Unix socket ", path, ": ", ErrnoText(), "; is the store running?"));
  }
  return fd;
}

}  // namespace certkv
