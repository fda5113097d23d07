// Shared memory between the store and its readers: memfds, mappings, and file descriptors over Unix
// sockets (Linux).
#ifndef CERTKV_KERNELS_CORE_SHARED_MEMORY_H_
#define CERTKV_KERNELS_CORE_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

// Owns a file descriptor; closes it. Movable.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Owns a mapping of a file descriptor; unmaps it. Movable. The bytes live as long as the mapping,
// also after the descriptor is closed.
class Mapping {
 public:
  enum class Access : uint8_t { kReadOnly, kReadWrite };

  Mapping() = default;
  ~Mapping() { reset(); }
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  // Maps the whole of `fd`, MAP_SHARED, with huge pages advised.
  // Errors: FailedPrecondition [MAP_FAILED], with errno's text, size and access (a sealed memfd
  // can't be mapped kReadWrite).
  static absl::StatusOr<Mapping> Map(int fd, Access access);

  uint8_t* data() const { return data_; }  // writing to a kReadOnly mapping dies with SIGSEGV
  int64_t size_bytes() const { return size_bytes_; }
  void reset();

 private:
  uint8_t* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

// Makes a memfd of `size_bytes` > 0 (zero pages, not yet resident), close-on-exec, sealed against
// shrinking and growing, so that no holder can make another fault.
// Errors: ResourceExhausted [MEMFD_FAILED] with errno's text.
absl::StatusOr<UniqueFd> CreateMemfd(absl::string_view name, int64_t size_bytes);

// Seals a memfd for good: mappings made before stay writable, no other can be made, and write(2)
// fails, for every holder of any descriptor of it.
// Errors: Internal [MEMFD_SEAL_FAILED].
absl::Status SealAgainstWrites(int fd);

// A second descriptor of the same memfd that can only be read and mapped read-only.
// Errors: Internal [MEMFD_REOPEN_FAILED].
absl::StatusOr<UniqueFd> ReopenReadOnly(int fd);

// Sends `bytes` (1 to 4096) with `fds` (at most 8) over a connected Unix stream socket, blocking.
// Errors: Unavailable [SOCKET_CLOSED].
absl::Status SendWithFds(int socket, absl::string_view bytes, const std::vector<int>& fds);

struct BytesWithFds {
  std::string bytes;
  std::vector<UniqueFd> fds;
};
// Receives exactly `byte_count` bytes and the descriptors that came with them, blocking.
// Errors: Unavailable [SOCKET_CLOSED], the peer closed, `timeout_ms` passed in all (0 = wait for
// ever), or the peer sent more than 8 descriptors; those received are closed.
absl::StatusOr<BytesWithFds> ReceiveWithFds(int socket, int64_t byte_count, int64_t timeout_ms);

// Connects to a Unix stream socket. Errors: InvalidArgument [SOCKET_PATH_TOO_LONG], a path that is
// empty or doesn't fit an address; Unavailable [SOCKET_CONNECT_FAILED] with path and errno.
absl::StatusOr<UniqueFd> ConnectUnixSocket(absl::string_view path);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_SHARED_MEMORY_H_
