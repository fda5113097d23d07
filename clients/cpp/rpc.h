// Deadlines and retries of unary calls.
#ifndef CERTKV_CLIENTS_CPP_RPC_H_
#define CERTKV_CLIENTS_CPP_RPC_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "kernels/core/limits.h"
#include "services/common/errors.h"

namespace certkv::client {

// May a call be made again when the first answer is UNAVAILABLE?
enum class Retry : uint8_t { kNever, kIdempotent };

inline constexpr int kAttemptsMax = 4;
inline constexpr std::chrono::milliseconds kFirstBackoff{20};

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
template <typename Method>
absl::Status CallUnary(int64_t timeout_ms, Retry retry, const Method& method) {
  const auto deadline = std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms);
  auto backoff = kFirstBackoff;
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;
    context.set_deadline(deadline);
    const absl::Status status = FromGrpcStatus(method(context));
    if (!absl::IsUnavailable(status) || retry == Retry::kNever || attempt == kAttemptsMax ||
        std::chrono::system_clock::now() + backoff >= deadline) {
      return status;
    }
    std::this_thread::sleep_for(backoff);
    backoff *= 2;
  }
}

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_RPC_H_
