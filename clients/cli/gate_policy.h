// Gate's policy as the command line reads and writes it.
#ifndef CERTKV_CLIENTS_CLI_GATE_POLICY_H_
#define CERTKV_CLIENTS_CLI_GATE_POLICY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cpp/options.h"
#include "google/protobuf/message.h"

namespace certkv::cli {

std::unique_ptr<gate::v1::Gate::Stub> GateStub(const client::Options& services);

// Errors: those of the call.
absl::StatusOr<gate::v1::Policy> PolicyInForce(const client::Options& services,
                                               gate::v1::Gate::Stub& stub);

// A message as JSON text; the fields have the names of the proto, and all are there.
std::string ToJsonText(const google::protobuf::Message& message);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_GATE_POLICY_H_
