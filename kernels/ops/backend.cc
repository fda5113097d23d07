#include "kernels/ops/backend.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/status.h"
#include "kernels/cpu/cpu.h"

namespace certkv {
namespace {

constexpr char kVariable[] = "CERTKV_CPU";

// 0 until ForceCpuIsa is called.
std::atomic<uint8_t> forced_isa{0};

std::string SupportedNames() {
  return absl::StrJoin(SupportedCpuIsas(), ", ",
                       [](std::string* out, CpuIsa isa) { absl::StrAppend(out, CpuIsaName(isa)); });
}

absl::Status CheckSupported(CpuIsa isa) {
  const std::vector<CpuIsa> supported = SupportedCpuIsas();
  if (std::find(supported.begin(), supported.end(), isa) != supported.end()) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "CPU_ISA_UNSUPPORTED",
                   absl::StrCat("instruction set ", CpuIsaName(isa),
                                " isn't available on this machine, which has ", SupportedNames(),
                                "; choose one of these or unset ", kVariable));
}

absl::StatusOr<CpuIsa> SelectFromEnvironment() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return SupportedCpuIsas().back();
  for (const CpuIsa isa : {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512Vnni}) {
    if (absl::string_view(text) != CpuIsaName(isa)) continue;
    CERTKV_RETURN_IF_ERROR(CheckSupported(isa));
    return isa;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "CPU_ISA_UNKNOWN",
                   absl::StrCat(kVariable, " is \"", text,
                                "\", must be portable, avx2 or avx512, or unset for the best of ",
                                SupportedNames()));
}

}  // namespace

const char* BackendName(Backend backend) {
  switch (backend) {
    case Backend::kReference:
      return "reference";
    case Backend::kCpu:
      return "cpu";
    case Backend::kCuda:
      return "cuda";
  }
  return "?";
}

const char* CpuIsaName(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kPortable:
      return "portable";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512Vnni:
      return "avx512";
  }
  return "?";
}

std::vector<CpuIsa> SupportedCpuIsas() { return cpu::SupportedIsas(); }

absl::StatusOr<CpuIsa> SelectedCpuIsa() {
  const uint8_t forced = forced_isa.load(std::memory_order_relaxed);
  if (forced != 0) return static_cast<CpuIsa>(forced);
  static const auto* const selected = new absl::StatusOr<CpuIsa>(SelectFromEnvironment());
  return *selected;
}

absl::Status ForceCpuIsa(CpuIsa isa) {
  CERTKV_RETURN_IF_ERROR(CheckSupported(isa));
  forced_isa.store(static_cast<uint8_t>(isa), std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace certkv
