// Channels, and deadlines and retries of unary calls.
#ifndef CERTKV_CLIENTS_CPP_RPC_H_
#define CERTKV_CLIENTS_CPP_RPC_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "clients/cpp/options.h"
#include "clients/cpp/retry_plan.h"
#include "kernels/core/limits.h"
#include "services/common/errors.h"
#include "services/common/random_id.h"

namespace certkv::client {

// What else a channel may be.
struct ChannelTraits {
  bool balance = false;     // calls go to the target's addresses in turn; else to one of them
  std::string server_name;  // in the server's certificate; "" = the target's
};

// With the protection that `options` name: TLS to a TCP target where there is a ca_file, and the
// token in each call where there is a token_file; both are read again when they change.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, const Options& options = {},
                                           const ChannelTraits& traits = {});

// What `status` says about a connection that never came to be, with a reason and what to do; any
// other status as it is.
absl::Status ExplainConnection(const absl::Status& status);

// Calls `method(context)`, which returns a grpc::Status, with a deadline; all attempts share it.
// What RetryPlan says is done; waits for room are at most pressure_wait_ms together.
template <typename Method>
absl::Status CallUnary(int64_t timeout_ms, Retry retry, const Method& method,
                       int64_t pressure_wait_ms = 0) {
  const auto deadline = std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms);
  RetryPlan plan(retry, pressure_wait_ms, static_cast<uint64_t>(RandomId()));
  while (true) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    const absl::Status status = ExplainConnection(FromGrpcStatus(method(context)));
    if (status.ok()) return status;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::system_clock::now());
    const std::optional<int64_t> delay_ms = plan.NextDelayMs(status, left.count());
    if (!delay_ms.has_value()) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(*delay_ms));
  }
}

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_RPC_H_
