#include "services/common/errors.h"

#include <grpcpp/server_context.h>

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "certkv/type/cache.pb.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"

namespace certkv {
namespace {

constexpr char kCut[] = "... (cut)";

// gRPC's and Abseil's codes have the same names and numbers.
static_assert(static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT) ==
              static_cast<int>(absl::StatusCode::kInvalidArgument));
static_assert(static_cast<int>(grpc::StatusCode::UNAUTHENTICATED) ==
              static_cast<int>(absl::StatusCode::kUnauthenticated));

std::string CutMessage(absl::string_view message) {
  if (message.size() <= kErrorMessageBytesMax) return std::string(message);
  return absl::StrCat(message.substr(0, kErrorMessageBytesMax - sizeof(kCut)), kCut);
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status, absl::string_view domain) {
  if (status.ok()) return grpc::Status::OK;
  type::ErrorDetail detail;
  detail.set_reason(ReasonOf(status));
  detail.set_domain(std::string(domain));
  detail.set_retry_delay_ms(RetryDelayMsOf(status));
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), CutMessage(status.message()),
                      detail.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = status.error_code();
  // A peer may send any number; an unknown one is kUnknown, never OK.
  const bool known = code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  const auto absl_code = known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
  type::ErrorDetail detail;
  // The length of a reason is checked because the peer may not be ours.
  if (detail.ParseFromString(status.error_details()) && !detail.reason().empty() &&
      detail.reason().size() < 64) {
    const absl::Status error = MakeError(absl_code, detail.reason(), status.error_message());
    return detail.retry_delay_ms() > 0 ? WithRetryDelay(error, detail.retry_delay_ms()) : error;
  }
  return absl::Status(absl_code, status.error_message());
}

grpc::Status RequireDeadline(const grpc::CallbackServerContext& context, absl::string_view domain) {
  if (context.deadline() != std::chrono::system_clock::time_point::max()) return grpc::Status::OK;
  return ToGrpcStatus(
      MakeError(absl::StatusCode::kInvalidArgument, "DEADLINE_REQUIRED",
                "the call has no deadline; set one (ClientContext::set_deadline, timeout=)"),
      domain);
}

}  // namespace certkv
