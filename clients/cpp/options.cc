#include "clients/cpp/options.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "services/common/runtime_directory.h"

namespace certkv::client {

std::string DefaultTarget() { return absl::StrCat("unix:", RuntimeDirectory(), "/certkvd.sock"); }

Options ResolveTargets(const Options& options) {
  Options resolved = options;
  if (resolved.kvstore_target.empty()) resolved.kvstore_target = DefaultTarget();
  if (resolved.certifier_target.empty()) resolved.certifier_target = resolved.kvstore_target;
  if (resolved.gate_target.empty()) resolved.gate_target = resolved.kvstore_target;
  return resolved;
}

bool IsReplicated(absl::string_view target) {
  if (absl::StartsWith(target, "dns:") || absl::StartsWith(target, "xds:")) return true;
  const bool is_list = absl::StartsWith(target, "unix:") || absl::StartsWith(target, "ipv4:") ||
                       absl::StartsWith(target, "ipv6:");
  return is_list && absl::StrContains(target, ",");
}

std::string StartAnywhere(const std::string& target, uint64_t random) {
  if (!IsReplicated(target) || !absl::StrContains(target, ",")) return target;
  const size_t scheme_end = target.find(':') + 1;
  std::vector<std::string> addresses = absl::StrSplit(target.substr(scheme_end), ',');
  std::rotate(addresses.begin(),
              addresses.begin() + static_cast<ptrdiff_t>(random % addresses.size()),
              addresses.end());
  return absl::StrCat(target.substr(0, scheme_end), absl::StrJoin(addresses, ","));
}

}  // namespace certkv::client
