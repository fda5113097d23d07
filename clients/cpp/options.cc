#include "clients/cpp/options.h"

#include "absl/strings/str_cat.h"
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

}  // namespace certkv::client
