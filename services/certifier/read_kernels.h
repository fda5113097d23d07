// The operations that a read is made of, as a seam: tests put doubles in their place.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_KERNELS_H_
#define CERTKV_SERVICES_CERTIFIER_READ_KERNELS_H_

#include <functional>

#include "absl/status/status.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/backend.h"
#include "kernels/ops/finish_certificate.h"

namespace certkv::certifier {

struct ReadKernels {
  std::function<absl::Status(const AttendArgs&, const AttendResult&, void*)> attend;
  // By a GPU, of tiles that are resident there; null: the host runs all passes.
  std::function<absl::Status(const AttendArgs&, const AttendResult&, void*)> attend_on_device;
  std::function<absl::Status(const ProgressiveArgs&, const ProgressiveResult&, void*)>
      attend_progressive;
  std::function<absl::Status(const FinishArgs&, FinishWorkspace*, Certificate*)> finish;
  // Recompute the checksums of quantized tiles on every read, not once per generation of a slot: a
  // bit that flips later is found by the next read, not by the store's next scrub.
  bool verify_every_read = false;
};

// All by `backend`.
inline ReadKernels KernelsOf(Backend backend) {
  return {
      .attend = [backend](const AttendArgs& args, const AttendResult& result,
                          void* workspace) { return Attend(backend, args, result, workspace); },
      .attend_on_device = nullptr,
      .attend_progressive =
          [backend](const ProgressiveArgs& args, const ProgressiveResult& result, void* workspace) {
            return AttendProgressive(backend, args, result, workspace);
          },
      .finish =
          [backend](const FinishArgs& args, FinishWorkspace* workspace, Certificate* certificate) {
            return FinishCertificate(backend, args, workspace, certificate);
          },
  };
}

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_KERNELS_H_
