// Errors across gRPC: the code goes 1:1, the reason travels in the status details as a serialized
// certkv.type.ErrorDetail.
#ifndef CERTKV_SERVICES_COMMON_ERRORS_H_
#define CERTKV_SERVICES_COMMON_ERRORS_H_

#include <grpcpp/support/status.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace grpc {
class CallbackServerContext;
}  // namespace grpc

namespace certkv {

// Longest message that goes over the wire; the rest is cut. gRPC carries messages in HTTP/2
// trailers, and a peer refuses trailers over 8 KiB.
inline constexpr size_t kErrorMessageBytesMax = 2048;

// `domain` names the service, for example "gate.certkv".
grpc::Status ToGrpcStatus(const absl::Status& status, absl::string_view domain);

// The other way. An error that gRPC itself made (a dead server, a passed deadline) has no reason.
absl::Status FromGrpcStatus(const grpc::Status& status);

// Errors: INVALID_ARGUMENT [DEADLINE_REQUIRED], the call has no deadline. A unary method calls this
// first: a call without a deadline outlives its caller's interest.
grpc::Status RequireDeadline(const grpc::CallbackServerContext& context,
                             absl::string_view domain = "certkv");

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_ERRORS_H_
