#include "clients/cli/gate_policy.h"

#include "clients/cpp/rpc.h"
#include "google/protobuf/util/json_util.h"

namespace certkv::cli {

namespace v1 = certkv::gate::v1;

std::unique_ptr<v1::Gate::Stub> GateStub(const client::Options& services) {
  return v1::Gate::NewStub(
      client::MakeChannel(client::ResolveTargets(services).gate_target, services));
}

absl::StatusOr<v1::Policy> PolicyInForce(const client::Options& services, v1::Gate::Stub& stub) {
  v1::Policy policy;
  const absl::Status status = client::CallUnary(
      services.rpc_timeout_ms, client::Retry::kIdempotent, [&](grpc::ClientContext& context) {
        return stub.GetPolicy(&context, v1::GetPolicyRequest(), &policy);
      });
  if (!status.ok()) return status;
  return policy;
}

std::string ToJsonText(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  return status.ok() ? text : "{}\n";
}

}  // namespace certkv::cli
