// The dashboard: a page (services/gate/dashboard), and what it asks for as JSON.
//
// Texts of clients, such as labels, go out as JSON strings; the page makes text nodes of them.
#ifndef CERTKV_SERVICES_GATE_DASHBOARD_H_
#define CERTKV_SERVICES_GATE_DASHBOARD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "services/common/clock.h"
#include "services/common/http_server.h"
#include "services/gate/request_registry.h"

namespace certkv::gate {

// What the dashboard shows of the store.
struct StoreSummary {
  struct Cache {
    std::string description;
    int64_t device_used_bytes = 0;
    int64_t device_capacity_bytes = 0;
    int64_t device_block_bytes = 0;
    int64_t backing_used_bytes = 0;
    int64_t backing_capacity_bytes = 0;
    int64_t backing_block_bytes = 0;
    int64_t blocks_leased = 0;
    int64_t blocks_pinned = 0;
  };
  bool known = false;
  std::string error;  // why it is not known
  std::vector<Cache> caches;
  int64_t disk_bytes = -1;  // -1 = no tier on disk
  int64_t session_count = 0;
  int64_t lease_count = 0;
  int64_t blocks_asked = 0;  // by lookups
  int64_t blocks_found = 0;
};

// Pages and answers: "/", "/app.js", ..., "/api/overview", "/api/requests", "/api/requests/{id}",
// "/api/events". Errors are {"error": "..."} with a status of HTTP. The pointers outlive the
// routes; `store` is called by any thread and doesn't block.
std::vector<HttpRoute> DashboardRoutes(const RequestRegistry* registry, const Clock* clock,
                                       std::function<StoreSummary()> store);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_DASHBOARD_H_
