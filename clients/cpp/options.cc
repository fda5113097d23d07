#include "clients/cpp/options.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace certkv::client {

std::string RuntimeDirectory() {
  if (const char* directory = std::getenv("CERTKV_RUNTIME_DIR"); directory && *directory) {
    return directory;
  }
  if (const char* directory = std::getenv("XDG_RUNTIME_DIR"); directory && *directory) {
    return absl::StrCat(directory, "/certkv");
  }
  return absl::StrCat("/tmp/certkv-", getuid());
}

std::string DefaultTarget() { return absl::StrCat("unix:", RuntimeDirectory(), "/certkvd.sock"); }

Options ResolveTargets(const Options& options) {
  Options resolved = options;
  if (resolved.kvstore_target.empty()) resolved.kvstore_target = DefaultTarget();
  if (resolved.certifier_target.empty()) resolved.certifier_target = resolved.kvstore_target;
  if (resolved.gate_target.empty()) resolved.gate_target = resolved.kvstore_target;
  return resolved;
}

}  // namespace certkv::client
