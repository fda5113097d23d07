#include "services/certifier/config.h"

namespace certkv {

ConfigSection CertifierConfigSection(CertifierConfig* config) {
  ConfigSection section("certifier",
                        "Computes attention over stored blocks with a certificate per read, and "
                        "repairs reads that are out of tolerance.");
  section.AddString("store_target", &config->store_target, 1024,
                    "gRPC address of the store on this host; empty means the server's own socket "
                    "in certkvd, and kvstore.sock in the runtime directory elsewhere");
  section.AddDuration("store_timeout", &config->store_timeout_ms, {.min = 100, .max = 600'000},
                      "longest wait for the store when a cache or a worker's staging memory is "
                      "mapped");
  section.AddInteger("view_limit", &config->view_limit, {.min = 1, .max = 1 << 20}, "views",
                     "open views (sequences) at a time");
  section.AddDuration("view_idle", &config->view_idle_ms, {.min = 1000, .max = 86'400'000},
                      "a view that is not read for so long is closed");
  section.AddInteger("budget_limit", &config->budget_limit, {.min = 1, .max = 1 << 24}, "leases",
                     "unexpired policy leases with a budget that are remembered at a time");
  section.AddInteger("stream_limit", &config->stream_limit, {.min = 1, .max = 65536}, "streams",
                     "Attend streams at a time");
  return section;
}

}  // namespace certkv
