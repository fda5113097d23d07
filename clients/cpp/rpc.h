// Deadlines and retries of unary calls.
#ifndef CERTKV_CLIENTS_CPP_RPC_H_
#define CERTKV_CLIENTS_CPP_RPC_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "clients/cpp/retry_plan.h"
#include "kernels/core/limits.h"
#include "services/common/errors.h"
#include "services/common/random_id.h"

namespace certkv::client {

inline std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  // A service that was restarted should be found again within a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

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
    const absl::Status status = FromGrpcStatus(method(context));
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
