#include "kernels/ops/finish_certificate.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/skipping.h"
#include "kernels/core/status.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ops/device.h"
#include "kernels/reference/reference.h"

namespace certkv {
namespace {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return MakeError(absl::StatusCode::kInvalidArgument, "FINISH_ARGS_INVALID",
                   absl::StrCat("FinishArgs.", parts...));
}

absl::Status CheckArgs(const FinishArgs& args) {
  if (args.atom_count < 1) {
    return Invalid("atom_count is ", args.atom_count, ", must be at least 1");
  }
  if (args.block_lse == nullptr || args.block_max_logit == nullptr ||
      args.logit_half_width == nullptr) {
    return Invalid(
        "block_lse, block_max_logit or logit_half_width is null; pass what Attend wrote");
  }
  if (args.sink_index < -1 || args.sink_index >= args.atom_count) {
    return Invalid("sink_index is ", args.sink_index, ", must be in [-1, ", args.atom_count - 1,
                   "]");
  }
  if (!(args.tv_tolerance >= 0 && args.tv_tolerance <= 1)) {
    return Invalid("tv_tolerance is ", args.tv_tolerance, ", must be in [0, 1]");
  }
  if (std::isnan(args.skipped_lse_nat)) {
    return Invalid("skipped_lse_nat is NaN; pass what AttendProgressive wrote, or -infinity");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FinishCertificate(Backend backend, const FinishArgs& args, FinishWorkspace* workspace,
                               Certificate* certificate) {
  CERTKV_RETURN_IF_ERROR(CheckArgs(args));
  if (workspace == nullptr) {
    return MakeError(absl::StatusCode::kInvalidArgument, "FINISH_ARGS_INVALID",
                     "the workspace of FinishCertificate is null; pass one per thread");
  }
  if (backend == Backend::kCuda) {
    CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
    return device->finish_certificate(args, certificate);
  }
  const double share = reference::SkippedShareOf(args);
  FinishArgs kept = args;  // the tokens that were read
  kept.tv_tolerance = static_cast<float>(TvLeftBySkipping(args.tv_tolerance, share));
  double tv = -1;
  if (backend != Backend::kReference) {
    CERTKV_ASSIGN_OR_RETURN(const CpuIsa isa, SelectedCpuIsa());
    tv = cpu::BoundTv(isa, kept, workspace);
  } else {
    kept.tv_tolerance = 0;  // as tight as it can
  }
  bool masses_known = tv >= 0;  // the CPU's bound has looked
  const bool left_to_reference = backend == Backend::kCpu && !masses_known;
  if (!masses_known) {
    masses_known = reference::MassesAreKnown(args);
    tv = reference::BoundTv(kept, workspace);
  }
  reference::CompleteCertificate(args, masses_known, share,
                                 share > 0 ? MixWithSkipped(share, tv) : tv, certificate);
  certificate->left_to_reference = left_to_reference;
  return absl::OkStatus();
}

}  // namespace certkv
