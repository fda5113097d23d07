// Which versions of CertKV's messages a program speaks, and what it says to one that speaks others.
//
// One number counts what stores, certifiers, gates, clients and the bulk plane say to each other:
// messages of gRPC, and frames and bodies of docs/bulk.md. A release speaks its own version and the
// one before, so that programs of two releases next to each other work together while a cluster is
// restarted node by node.
#ifndef CERTKV_SERVICES_COMMON_WIRE_VERSION_H_
#define CERTKV_SERVICES_COMMON_WIRE_VERSION_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

// Key of gRPC metadata: each call of a client carries its versions as text.
inline constexpr char kWireVersionsKey[] = "certkv-wire-versions";

inline constexpr int32_t kWireVersionMax = 65535;

// All from `min` to `max`; 1 <= min <= max <= kWireVersionMax.
struct WireVersions {
  int32_t min = 1;
  int32_t max = 1;
  bool operator==(const WireVersions&) const = default;
};

// Of this program. In a file of its own (supported_wire_versions.cc), so that a test can link the
// program of another release.
WireVersions SupportedWireVersions();

// "2-3". Errors of the other way: InvalidArgument [WIRE_VERSION], it is no such text.
std::string WireVersionsToText(const WireVersions& versions);
absl::StatusOr<WireVersions> WireVersionsFromText(absl::string_view text);

// The highest version that both speak. Errors: FailedPrecondition [`reason`], there is none; the
// message names both sides' versions, and which of the two is to be upgraded. `them` and `us` say
// who that is: "the client", "the server".
absl::StatusOr<int32_t> ChooseWireVersion(const WireVersions& theirs, absl::string_view them,
                                          const WireVersions& ours, absl::string_view us,
                                          absl::string_view reason = "WIRE_VERSION");

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_WIRE_VERSION_H_
