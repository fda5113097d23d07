#include "services/common/random_id.h"

#include <sys/random.h>
#include <sys/types.h>

#include <cerrno>
#include <cstring>

#include "kernels/core/check.h"

namespace certkv {

std::string RandomBytes(size_t byte_count) {
  // getrandom gives up to 256 bytes whole and uninterrupted.
  CERTKV_CHECK(byte_count >= 1 && byte_count <= 256, "RandomBytes gives 1 to 256 bytes");
  std::string bytes(byte_count, '\0');
  ssize_t got = -1;
  do {
    got = getrandom(bytes.data(), bytes.size(), 0);
  } while (got < 0 && errno == EINTR);
  CERTKV_CHECK(got == static_cast<ssize_t>(byte_count), "the kernel gives random bytes");
  return bytes;
}

int64_t RandomId() {
  uint64_t value = 0;
  while (value == 0) {
    const std::string bytes = RandomBytes(sizeof(value));
    std::memcpy(&value, bytes.data(), sizeof(value));
    value >>= 1;
  }
  return static_cast<int64_t>(value);
}

}  // namespace certkv
