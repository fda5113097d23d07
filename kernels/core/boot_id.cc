#include "kernels/core/boot_id.h"

#include <fstream>
#include <string>

namespace certkv {

BootId CurrentBootId() {
  // 8-4-4-4-12 hexadecimal digits.
  std::string text;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), text);
  BootId id{};
  size_t digits = 0;
  for (const char c : text) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit && !(c >= 'a' && c <= 'f')) continue;
    const auto value = static_cast<uint8_t>(is_digit ? c - '0' : c - 'a' + 10);
    if (digits < 2 * id.size()) {
      id[digits / 2] = static_cast<uint8_t>(id[digits / 2] << 4 | value);
    }
    ++digits;
  }
  return digits == 2 * id.size() ? id : BootId{};
}

}  // namespace certkv
