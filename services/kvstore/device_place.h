// Which GPU has copies of the device tier.
#ifndef CERTKV_SERVICES_KVSTORE_DEVICE_PLACE_H_
#define CERTKV_SERVICES_KVSTORE_DEVICE_PLACE_H_

#include "absl/status/statusor.h"
#include "services/kvstore/config.h"
#include "services/kvstore/device_copy.h"

namespace certkv::kvstore {

// What config.device and config.device_index mean here: none (`runtime` null), where the config
// says so or leaves it open and there is no GPU. Errors: FailedPrecondition [DEVICE_MISSING], a GPU
// is asked for and the process has none; [DEVICE_NOT_HERE], not one of that number.
absl::StatusOr<DevicePlace> ChooseDevice(const KvStoreConfig& config);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_DEVICE_PLACE_H_
