// Where a server has its device tier, as its config says.
#ifndef CERTKV_SERVICES_COMMON_DEVICE_CHOICE_H_
#define CERTKV_SERVICES_COMMON_DEVICE_CHOICE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace certkv {

enum class DeviceChoice : uint8_t {
  kHost,  // host memory alone
  kAuto,  // a GPU too, where there is one
  kCuda,  // a GPU too, or an error
};

inline const std::vector<std::pair<std::string, DeviceChoice>>& DeviceChoiceNames() {
  static const auto* const names = new std::vector<std::pair<std::string, DeviceChoice>>{
      {"host", DeviceChoice::kHost}, {"auto", DeviceChoice::kAuto}, {"cuda", DeviceChoice::kCuda}};
  return *names;
}

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_DEVICE_CHOICE_H_
