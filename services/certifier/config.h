// Settings of the certifier: section "certifier" of a config file.
#ifndef CERTKV_SERVICES_CERTIFIER_CONFIG_H_
#define CERTKV_SERVICES_CERTIFIER_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "services/common/config_reader.h"
#include "services/common/device_choice.h"

namespace certkv {

// What each field is stands in config.cc, where docs/config.md comes from.
struct CertifierConfig {
  std::string store_socket;         // "": DefaultStoreSocket()
  std::string store_token_file;     // "": none
  int64_t store_timeout_ms = 2000;  //
  int32_t view_limit = 4096;        //
  int64_t view_idle_ms = 600'000;   //
  int32_t budget_limit = 65536;     //
  int32_t stream_limit = 1024;      //
  int32_t messages_in_flight = 4;   // of one Attend stream
  int32_t read_threads = 0;         // 0: one per processor
  bool verify_every_read = false;   //
  DeviceChoice device = DeviceChoice::kHost;
  bool pin_originals = false;
  absl::Status device_error = {};  // no setting: why this process has no GPU, where it looked
};

// `config` must live as long as the section is used.
ConfigSection CertifierConfigSection(CertifierConfig* config);

// <runtime directory>/kvstore.sock: where certkv-kvstore listens by default.
std::string DefaultStoreSocket();

}  // namespace certkv

#endif  // CERTKV_SERVICES_CERTIFIER_CONFIG_H_
