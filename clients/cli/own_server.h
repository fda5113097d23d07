// A certkvd that a command starts for itself.
#ifndef CERTKV_CLIENTS_CLI_OWN_SERVER_H_
#define CERTKV_CLIENTS_CLI_OWN_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/options.h"

namespace certkv::cli {

// In a fresh runtime directory, which goes with it. The program lies beside this one.
class OwnServer {
 public:
  // Starts it with that configuration (YAML), waits until it serves, and names its socket in
  // `services`. Errors: Internal [SPAWN_FAILED]; Unavailable [CHILD_ENDED]; those of the store.
  static absl::StatusOr<std::unique_ptr<OwnServer>> Start(absl::string_view config,
                                                          client::Options* services);
  ~OwnServer();
  OwnServer(const OwnServer&) = delete;
  OwnServer& operator=(const OwnServer&) = delete;

  // Ends it and waits. Errors: Internal [CHILD_FAILED].
  absl::Status Stop() { return process_->Stop(); }

 private:
  OwnServer() = default;
  absl::Status WaitUntilServing(const client::Options& services);

  std::string directory_;
  std::unique_ptr<ChildProcess> process_;
};

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_OWN_SERVER_H_
