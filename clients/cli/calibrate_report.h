// What `certkv calibrate` says: tables, JSON, a picture, and what servers and clients load.
#ifndef CERTKV_CLIENTS_CLI_CALIBRATE_REPORT_H_
#define CERTKV_CLIENTS_CLI_CALIBRATE_REPORT_H_

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "certkv/gate/v1/gate.pb.h"
#include "clients/cli/calibrate.h"

namespace certkv::cli {

std::string RenderCalibration(const Calibration& calibration);
nlohmann::json CalibrationJson(const Calibration& calibration);

// SVG: what each candidate covers at what capacity, and what each layer takes.
std::string DrawCalibration(const Calibration& calibration);

// `base` with the calibration's tolerances: the largest for all, and for each layer its own as an
// override of this model. At most kLayerOverridesMax layers, the tightest, have one.
inline constexpr size_t kLayerOverridesMax = 32;  // of a policy
gate::v1::Policy CalibratedPolicy(const Calibration& calibration, gate::v1::Policy base);

// What gate takes as a request's model: `model`, or "" where it has other characters than
// [a-zA-Z0-9._/-] or more than 128.
std::string ModelLabel(const std::string& model);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_CALIBRATE_REPORT_H_
