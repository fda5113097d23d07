#include "services/common/wire_version.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

std::string Spoken(const WireVersions& versions) {
  if (versions.min == versions.max) return absl::StrCat(versions.min);
  return absl::StrCat(versions.min, " to ", versions.max);
}

bool IsNumber(absl::string_view text, int32_t* number) {
  return absl::SimpleAtoi(text, number) && *number >= 1 && *number <= kWireVersionMax;
}

}  // namespace

std::string WireVersionsToText(const WireVersions& versions) {
  return absl::StrCat(versions.min, "-", versions.max);
}

absl::StatusOr<WireVersions> WireVersionsFromText(absl::string_view text) {
  constexpr size_t kTextBytesMax = 11;  // "65535-65535"
  WireVersions versions;
  const size_t dash = text.find('-');
  if (text.size() <= kTextBytesMax && dash != absl::string_view::npos &&
      IsNumber(text.substr(0, dash), &versions.min) &&
      IsNumber(text.substr(dash + 1), &versions.max) && versions.min <= versions.max) {
    return versions;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "WIRE_VERSION",
                   absl::StrCat(kWireVersionsKey, " has ", text.size(),
                                " bytes and is no range of versions such as 1-2, each in [1, ",
                                kWireVersionMax, "]; leave it out, or send such a range"));
}

absl::StatusOr<int32_t> ChooseWireVersion(const WireVersions& theirs, absl::string_view them,
                                          const WireVersions& ours, absl::string_view us,
                                          absl::string_view reason) {
  const int32_t both = std::min(theirs.max, ours.max);
  if (both >= theirs.min && both >= ours.min) return both;
  const bool are_they_older = theirs.max < ours.min;
  const absl::string_view older = are_they_older ? them : us;
  const int32_t needed = are_they_older ? ours.min : theirs.min;
  return MakeError(
      absl::StatusCode::kFailedPrecondition, reason,
      absl::StrCat(them, " speaks wire versions ", Spoken(theirs), ", ", us, " ", Spoken(ours),
                   "; they must be of the same release or of two next to each other: upgrade ",
                   older, " to a release that speaks version ", needed,
                   ", one release after the other"));
}

}  // namespace certkv
