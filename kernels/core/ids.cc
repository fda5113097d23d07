#include "kernels/core/ids.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

template <typename Id>
absl::StatusOr<Id> FromBytes(absl::string_view bytes, absl::string_view what) {
  Id id;
  if (bytes.size() != id.bytes.size()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "DIGEST_SIZE",
                     absl::StrCat(what, " has ", bytes.size(),
                                  " bytes, must have exactly 32; send the whole SHA-256 value"));
  }
  std::memcpy(id.bytes.data(), bytes.data(), id.bytes.size());
  return id;
}

}  // namespace

std::string ToHex(absl::string_view bytes, size_t byte_count) {
  return absl::BytesToHexString(bytes.substr(0, std::min(byte_count, bytes.size())));
}

absl::StatusOr<SpecDigest> SpecDigestFromBytes(absl::string_view bytes) {
  return FromBytes<SpecDigest>(bytes, "CacheSpec digest");
}

absl::StatusOr<BlockKey> BlockKeyFromBytes(absl::string_view bytes) {
  return FromBytes<BlockKey>(bytes, "block key");
}

}  // namespace certkv
