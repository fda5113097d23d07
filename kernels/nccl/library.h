// NCCL as it is installed on this machine, opened when the program runs.
#ifndef CERTKV_KERNELS_NCCL_LIBRARY_H_
#define CERTKV_KERNELS_NCCL_LIBRARY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/ops/pair_communicator.h"

namespace certkv::nccl {

// Opens `path` as dlopen does: a name alone is looked for where the system's loader looks. The
// library stays in the process, for NCCL has threads and handlers of its own. Needs no GPU.
// Errors: FailedPrecondition [NCCL_MISSING], it isn't there, or isn't NCCL; [NCCL_VERSION], it is
// older than 2.14.
absl::StatusOr<std::unique_ptr<PairCommunicatorLibrary>> OpenLibrary(const std::string& path);

}  // namespace certkv::nccl

#endif  // CERTKV_KERNELS_NCCL_LIBRARY_H_
