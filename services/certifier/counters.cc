#include "services/certifier/counters.h"

#include "kernels/core/status.h"

namespace certkv::certifier {

void CertifierCounters::CountError(const absl::Status& status) {
  std::string reason = ReasonOf(status);
  if (reason.empty()) reason = absl::StatusCodeToString(status.code());
  absl::MutexLock lock(&mutex);
  ++errors_by_reason[reason];
}

std::map<std::string, int64_t> CertifierCounters::ErrorsByReason() const {
  absl::MutexLock lock(&mutex);
  return errors_by_reason;
}

}  // namespace certkv::certifier
