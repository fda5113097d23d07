#include "clients/cli/own_server.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "clients/cli/commands.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/status.h"

namespace certkv::cli {

OwnServer::~OwnServer() {
  process_.reset();
  if (directory_.empty()) return;
  // Only what we made: the directory and what certkvd and we put into it.
  for (const char* name : {"certkvd.yaml", "certkvd.sock", "certkvd.sock.fd", "certkvd.sock.lock",
                           "kvstore-fd.sock", "log"}) {
    unlink(absl::StrCat(directory_, "/", name).c_str());
  }
  rmdir(directory_.c_str());
}

absl::StatusOr<std::unique_ptr<OwnServer>> OwnServer::Start(absl::string_view config,
                                                            client::Options* services) {
  char directory[] = "/tmp/certkv-own-XXXXXX";
  if (mkdtemp(directory) == nullptr) {
    return MakeError(absl::StatusCode::kInternal, "SPAWN_FAILED",
                     "no directory could be made in /tmp for the server's sockets");
  }
  std::unique_ptr<OwnServer> server(new OwnServer);
  server->directory_ = directory;
  const std::string socket = absl::StrCat(directory, "/certkvd.sock");
  const std::string path = absl::StrCat(directory, "/certkvd.yaml");
  CERTKV_RETURN_IF_ERROR(WriteTextFile(path, std::string(config)));
  CERTKV_ASSIGN_OR_RETURN(
      server->process_,
      ChildProcess::Start(
          {absl::StrCat(ProgramDirectory(), "/certkvd"), "--socket", socket, "--config", path},
          {absl::StrCat("CERTKV_RUNTIME_DIR=", directory)}, absl::StrCat(directory, "/log")));
  services->kvstore_target = absl::StrCat("unix:", socket);
  services->certifier_target = services->gate_target = services->kvstore_target;
  CERTKV_RETURN_IF_ERROR(server->WaitUntilServing(*services));
  return server;
}

absl::Status OwnServer::WaitUntilServing(const client::Options& services) {
  client::Options probe = client::ResolveTargets(services);
  probe.rpc_timeout_ms = 500;
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  for (;;) {
    client::StoreClient store(probe);
    const absl::Status status = store.GetStats().status();
    if (status.ok()) return status;
    CERTKV_RETURN_IF_ERROR(process_->CheckRunning());
    if (absl::Now() > deadline) return WithContext(status, "certkvd didn't serve within 20 s");
    absl::SleepFor(absl::Milliseconds(20));
  }
}

}  // namespace certkv::cli
