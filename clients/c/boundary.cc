#include "clients/c/boundary.h"

#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"

namespace certkv::capi {
namespace {

constexpr size_t kReasonBytes = 64;  // MakeError's limit and a zero
constexpr size_t kMessageBytes = 1024;
constexpr size_t kStructBytesMax = 65536;  // beyond it struct_size was not set at all

struct LastError {
  char reason[kReasonBytes];
  char message[kMessageBytes];
  int64_t retry_delay_ms;
};
thread_local LastError last_error;

}  // namespace

void CopyText(absl::string_view text, char* to, size_t size) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

certkv_status KeepText(certkv_status code, const char* reason, const char* message) {
  CopyText(reason, last_error.reason, kReasonBytes);
  CopyText(message, last_error.message, kMessageBytes);
  last_error.retry_delay_ms = 0;
  return code;
}

certkv_status Keep(const absl::Status& status) {
  if (status.ok()) return KeepText(CERTKV_OK, "", "");
  const std::string reason = ReasonOf(status);
  CopyText(reason, last_error.reason, kReasonBytes);
  CopyText(status.message(), last_error.message, kMessageBytes);
  last_error.retry_delay_ms = RetryDelayMsOf(status);
  return static_cast<certkv_status>(status.code());
}

absl::Status RequirePointer(const void* pointer, absl::string_view name) {
  if (pointer != nullptr) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "ARGUMENT_MISSING",
                   absl::StrCat(name, " is NULL, and must point at something"));
}

absl::Status CheckStructSize(const void* from, size_t first, size_t known, absl::string_view name) {
  size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  if (!(size >= first && size <= kStructBytesMax)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "STRUCT_SIZE_INVALID",
                     absl::StrCat(name, " has struct_size ", size, ", must be its sizeof, in [",
                                  first, ", ", kStructBytesMax, "]"));
  }
  const auto* bytes = static_cast<const unsigned char*>(from);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] == 0) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, "STRUCT_SIZE_INVALID",
                     absl::StrCat(name, " has struct_size ", size, " and something set at byte ", i,
                                  "; this library knows the first ", known,
                                  " bytes: use a newer one, or leave the rest zero"));
  }
  return absl::OkStatus();
}

}  // namespace certkv::capi

const char* certkv_version() { return CERTKV_C_VERSION; }

const char* certkv_status_name(certkv_status status) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(status);
  return index < std::size(kNames) ? kNames[index] : "?";
}

const char* certkv_error_message() { return certkv::capi::last_error.message; }
const char* certkv_error_reason() { return certkv::capi::last_error.reason; }
int64_t certkv_error_retry_delay_ms() { return certkv::capi::last_error.retry_delay_ms; }
