#include "services/certifier/counters.h"

#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

std::string NameOf(const absl::Status& status) {
  std::string reason = ReasonOf(status);
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

}  // namespace

void CertifierCounters::CountError(const absl::Status& status) {
  absl::MutexLock lock(&mutex);
  ++errors_by_reason[NameOf(status)];
}

void CertifierCounters::CountDeviceFallback(const absl::Status& status) {
  absl::MutexLock lock(&mutex);
  ++device_fallbacks_by_reason[NameOf(status)];
}

std::map<std::string, int64_t> CertifierCounters::DeviceFallbacksByReason() const {
  absl::MutexLock lock(&mutex);
  return device_fallbacks_by_reason;
}

std::map<std::string, int64_t> CertifierCounters::ErrorsByReason() const {
  absl::MutexLock lock(&mutex);
  return errors_by_reason;
}

}  // namespace certkv::certifier
