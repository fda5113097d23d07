// The files of services/gate/dashboard, as they were when this was built.
#ifndef CERTKV_SERVICES_GATE_DASHBOARD_FILES_H_
#define CERTKV_SERVICES_GATE_DASHBOARD_FILES_H_

#include "absl/strings/string_view.h"

namespace certkv::gate {

// `path` is "dashboard/index.html"; "" when there is no such file.
absl::string_view DashboardFile(absl::string_view path);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_DASHBOARD_FILES_H_
