// Linked into a program, it makes that the program of another release: of one that speaks the wire
// versions in its environment, "1-2". Without them it speaks those of this release.
//
// The linker takes this definition and leaves supported_wire_versions.cc in its archive.
#include <cstdlib>

#include "kernels/core/check.h"
#include "services/common/wire_version.h"
#include "tests/system/cluster.h"  // kOtherReleaseVersions

namespace certkv {

WireVersions SupportedWireVersions() {
  const char* const text = std::getenv(kOtherReleaseVersions);
  if (text == nullptr || *text == '\0') return {1, 1};
  const auto versions = WireVersionsFromText(text);
  CERTKV_CHECK(versions.ok(), "the test names versions");
  return *versions;
}

}  // namespace certkv
