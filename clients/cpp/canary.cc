// What an engine used, against exact attention.
//
// The served output o^ and the recomputed one o' both have a bound on their distance from the exact
// output o of real arithmetic, so |o^ - o'| <= bound(o^) + bound(o'). What was used and lies
// farther from o' was not o^.
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/cpp/attention.h"
#include "kernels/core/status.h"

namespace certkv::client {

absl::StatusOr<std::vector<CanaryFinding>> CompareWithExact(const Worker& worker,
                                                            const Sequence& sequence,
                                                            const ReadRequest& read,
                                                            const ReadResult& result,
                                                            absl::Span<const float> used) {
  const CacheSpec& spec = worker.spec();
  const auto heads = static_cast<size_t>(spec.query_head_count());
  const auto value_dim = static_cast<size_t>(spec.value_dim);
  if (!result.status.ok() || result.certificates.size() != heads ||
      used.size() != heads * value_dim) {
    return MakeError(absl::StatusCode::kInvalidArgument, "READ_INVALID",
                     absl::StrCat("a canary of layer ", read.layer, " has ",
                                  result.certificates.size(), " certificates and ", used.size(),
                                  " numbers, must be of a read that succeeded, ", heads, " and ",
                                  heads * value_dim));
  }
  CERTKV_ASSIGN_OR_RETURN(const ReadResult exact, AttendExactInProcess(worker, sequence, read));
  std::vector<CanaryFinding> findings;
  for (size_t head = 0; head < heads; ++head) {
    double sum = 0;
    for (size_t i = head * value_dim; i < (head + 1) * value_dim; ++i) {
      const double difference = double{used[i]} - exact.outputs[i];
      sum += difference * difference;
    }
    // The sum of value_dim squares loses at most value_dim + 2 roundings of 2^-53.
    const double slack = 1 + static_cast<double>(value_dim + 8) * 0x1p-52;
    findings.push_back({.layer = read.layer,
                        .query_head = static_cast<int32_t>(head),
                        .query_position = read.query_position,
                        .error = std::sqrt(sum),
                        .bound = slack * (double{result.certificates[head].output_error_bound} +
                                          exact.certificates[head].output_error_bound)});
  }
  return findings;
}

}  // namespace certkv::client
