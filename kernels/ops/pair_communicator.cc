#include "kernels/ops/pair_communicator.h"

#include "absl/strings/str_cat.h"

namespace certkv {

std::string CommunicatorVersionText(int32_t version) {
  // NCCL's own rule: up to 2.8 the minor version had one digit less.
  const int32_t unit = version < 10'000 ? 1'000 : 10'000;
  return absl::StrCat(version / unit, ".", version % unit / 100, ".", version % 100);
}

}  // namespace certkv
