// W3C trace context: the traceparent that a caller sends along, which goes into logs and on to the
// servers that a call makes others call.
#ifndef CERTKV_SERVICES_COMMON_TRACE_CONTEXT_H_
#define CERTKV_SERVICES_COMMON_TRACE_CONTEXT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace certkv {

// Key of gRPC metadata.
inline constexpr char kTraceparentKey[] = "traceparent";

// Is it a traceparent: version, trace id, parent id and flags in lower-case hex, ids not zero?
// One of a later version may have more after the flags, at most 128 bytes in all.
bool IsTraceparent(absl::string_view text);

// `text`, or "" when it is not a traceparent: it is then as if none had been sent.
std::string TraceparentOrNone(absl::string_view text);

// A new trace, not sampled, with random ids.
std::string MakeTraceparent();

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_TRACE_CONTEXT_H_
