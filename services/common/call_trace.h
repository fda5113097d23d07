// The traceparent of an RPC.
#ifndef CERTKV_SERVICES_COMMON_CALL_TRACE_H_
#define CERTKV_SERVICES_COMMON_CALL_TRACE_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/strings/string_view.h"
#include "services/common/trace_context.h"

namespace certkv {

// What the caller sent, or "" when that is no traceparent.
inline std::string TraceparentOf(const grpc::CallbackServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kTraceparentKey);
  if (found == metadata.end()) return "";
  return TraceparentOrNone({found->second.data(), found->second.size()});
}

// Sends it along with a call that is not begun yet; nothing when it is "".
inline void SetTraceparent(absl::string_view traceparent, grpc::ClientContext* context) {
  if (!traceparent.empty()) context->AddMetadata(kTraceparentKey, std::string(traceparent));
}

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CALL_TRACE_H_
