// Weights of the token witness, chosen from a trace (kernels/bounds/witness_weights.h).
#ifndef CERTKV_CLIENTS_CLI_WITNESS_WEIGHTS_H_
#define CERTKV_CLIENTS_CLI_WITNESS_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cli/trace.h"

namespace certkv::cli {

// LayerSpec::witness_weights of each layer of the trace: from the queries whose index `chooses`
// accepts, and from what a key format loses of the trace's keys, whole tiles of them.
// Errors: InvalidArgument [TRACE_INVALID], no query is chosen, or there is no tile of 64 tokens;
//         as QuantizeTile, naming layer and KV head.
absl::StatusOr<std::vector<std::vector<float>>> ChooseWeights(
    const Trace& trace, const FormatChoice& format, const std::function<bool(int32_t)>& chooses);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_WITNESS_WEIGHTS_H_
