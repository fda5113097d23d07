// `certkv health`: what probes of Kubernetes and other supervisors run.
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "clients/cli/commands.h"
#include "clients/cpp/rpc.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace certkv::cli {

int RunHealth(const GlobalOptions& global, const HealthOptions& options) {
  using grpc::health::v1::Health;
  using grpc::health::v1::HealthCheckResponse;
  const std::string target = client::ResolveTargets(global.services).kvstore_target;
  const auto stub = Health::NewStub(client::MakeChannel(target, global.services));
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(options.service);
  HealthCheckResponse response;
  // Not retried: who probes asks again, and wants to know how it is now.
  const absl::Status status = client::CallUnary(
      global.services.rpc_timeout_ms, client::Retry::kNever,
      [&](grpc::ClientContext& context) { return stub->Check(&context, request, &response); });
  if (!status.ok()) return Fail(status);
  const std::string name = HealthCheckResponse::ServingStatus_Name(response.status());
  Print(global, {{"target", target}, {"service", options.service}, {"status", name}},
        absl::StrCat(name, "\n"));
  const bool serves = response.status() == HealthCheckResponse::SERVING;
  return serves || options.alive ? kExitOk : kExitFailed;
}

}  // namespace certkv::cli
