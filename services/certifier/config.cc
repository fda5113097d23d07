#include "services/certifier/config.h"

#include "absl/strings/str_cat.h"
#include "services/common/runtime_directory.h"

namespace certkv {

ConfigSection CertifierConfigSection(CertifierConfig* config) {
  ConfigSection section("certifier",
                        "Computes attention over stored blocks with a certificate for each read.");
  section.AddString("store_socket", &config->store_socket, 107,
                    "path of the Unix socket at which the store's gRPC service listens; empty "
                    "means kvstore.sock in the runtime directory, or in certkvd its own socket");
  section.AddString("store_token_file", &config->store_token_file, 4096,
                    "file of the token that it shows to the store, where that asks for one at its "
                    "Unix socket: with the scope read, for all tenants; empty means none");
  section.AddDuration("store_timeout", &config->store_timeout_ms, {100, 60'000},
                      "how long a call to the store may take before opening a view fails");
  section.AddInteger("view_limit", &config->view_limit, {1, 1 << 20}, "views",
                     "sequences that may be open at a time");
  section.AddDuration("view_idle", &config->view_idle_ms, {1000, 86'400'000},
                      "a view that nobody has read or updated for so long is closed");
  section.AddInteger("budget_limit", &config->budget_limit, {1, 1 << 24}, "leases",
                     "unexpired policy leases with a budget whose spending is remembered");
  section.AddInteger("stream_limit", &config->stream_limit, {1, 65536}, "streams",
                     "Attend streams that may be open at a time");
  section.AddInteger("messages_in_flight", &config->messages_in_flight, {1, 1024}, "messages",
                     "messages of one Attend stream that are read before the first is answered");
  section.AddInteger("read_threads", &config->read_threads, {0, 1024}, "threads",
                     "threads of server.io_threads that work on one message together; 0 means one "
                     "per processor");
  section.AddBool("verify_every_read", &config->verify_every_read,
                  "recompute the checksums of quantized blocks on every read, not only on the "
                  "first one after they were sealed or came back");
  section.AddEnum<DeviceChoice>("device", &config->device, DeviceChoiceNames(),
                                "whether a GPU reads the device tier of caches that have a copy "
                                "there (kvstore.device): host, "
                                "no; auto, where the process sees a GPU; cuda, always, or the "
                                "certifier doesn't start. What a "
                                "GPU can't or fails to do the host does");
  section.AddBool("pin_originals", &config->pin_originals,
                  "with a GPU: pin the backing tier of caches that have a copy there, so that "
                  "repairs gather originals over the bus in one launch. All of backing_memory is "
                  "then in memory and locked, and the first view of a cache waits for that; where "
                  "it can't be pinned, originals are copied");
  return section;
}

std::string DefaultStoreSocket() { return absl::StrCat(RuntimeDirectory(), "/kvstore.sock"); }

}  // namespace certkv
