// What every decoder of outside bytes promises, checked.
#ifndef CERTKV_TESTS_FUZZ_FUZZ_CHECKS_H_
#define CERTKV_TESTS_FUZZ_FUZZ_CHECKS_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv {

// Aborts unless a refusal has a reason and a message that fits into an answer.
inline void CheckRefusal(const absl::Status& status) {
  if (status.ok()) return;
  CERTKV_CHECK(!ReasonOf(status).empty(), "every refusal has a reason");
  CERTKV_CHECK(status.message().size() < (1 << 16), "messages stay short");
}

// An input taken apart from its front; zeros after its end.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <typename T>
  T Take() {
    T value{};
    const size_t count = size_ < sizeof(T) ? size_ : sizeof(T);
    if (count == 0) return value;  // data_ may be null
    std::memcpy(&value, data_, count);
    data_ += count;
    size_ -= count;
    return value;
  }
  bool empty() const { return size_ == 0; }
  std::string Rest() const { return std::string(reinterpret_cast<const char*>(data_), size_); }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_FUZZ_FUZZ_CHECKS_H_
