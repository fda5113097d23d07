#include "kernels/core/status.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace certkv {
namespace {

constexpr char kReasonPayload[] = "certkv/reason";

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message) {
  CERTKV_CHECK(code != absl::StatusCode::kOk, "an error has a code other than OK");
  CERTKV_CHECK(!reason.empty() && reason.size() < 64, "a reason has 1 to 63 bytes");
  absl::Status status(code, message);
  status.SetPayload(kReasonPayload, absl::Cord(reason));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonPayload);
  return payload.has_value() ? std::string(*payload) : std::string();
}

absl::Status WithContext(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status result(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&result](absl::string_view url, const absl::Cord& payload) {
    result.SetPayload(url, payload);
  });
  return result;
}

}  // namespace certkv
