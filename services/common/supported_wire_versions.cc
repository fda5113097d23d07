// Nothing else may stand here: see wire_version.h.
#include "services/common/wire_version.h"

namespace certkv {

// Version 1 is the first.
WireVersions SupportedWireVersions() { return {1, 1}; }

}  // namespace certkv
