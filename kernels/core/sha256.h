// SHA-256 over a little-endian byte stream (OpenSSL underneath).
#ifndef CERTKV_KERNELS_CORE_SHA256_H_
#define CERTKV_KERNELS_CORE_SHA256_H_

#include <array>
#include <cstdint>
#include <memory>

#include "absl/strings/string_view.h"

namespace certkv {

// Feed values, then Finish() once; anything after it aborts. Not thread-safe. Aborts if OpenSSL has
// no SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void AddBytes(absl::string_view bytes);  // the bytes alone
  void AddSized(absl::string_view bytes);  // u32 length, then the bytes
  void AddU32(uint32_t value);
  void AddU64(uint64_t value);
  void AddF32(float value);  // its bits

  std::array<uint8_t, 32> Finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_SHA256_H_
