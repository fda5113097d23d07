// The truth about reads, for tests: attention of the originals in double, and the total variation
// between it and the distribution that a read really served.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_CHECKER_H_
#define CERTKV_SERVICES_CERTIFIER_READ_CHECKER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/core/policy.h"
#include "services/certifier/fake_cache.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/read_kernels.h"
#include "services/certifier/read_plan.h"

namespace certkv::certifier {

// Attention of one query head over the originals, in double.
struct ExactAttention {
  std::vector<double> weights;  // p of tokens 0 .. query_position; 0 outside the window
  std::vector<double> output;   // [d_v]
  double value_norm_max = 0;    // largest ||v|| in the range
};
ExactAttention ExactAttentionOf(const FakeCache& fake, const ReadRequest& request,
                                int32_t query_head);

// Total variation between what `args` serves for head `g` of a pass and `exact`, in double. The
// tiles are those of `plan`; `sub_blocks_read` [tiles] has a bit for each sub-block that the head
// read, null = all.
double ServedTotalVariation(const AttendArgs& args, int32_t g, const ReadPlan& plan,
                            const ExactAttention& exact, const uint8_t* sub_blocks_read);

// One read of everything, checked.
class ReadChecker {
 public:
  // Reads through `kernels`, and looks at every pass.
  ReadChecker(FakeCache* fake, ReadKernels kernels);

  // Reads, and checks every head. Returns the read's own status.
  absl::Status Read(const View& view, const ReadRequest& request, int64_t now_ms = 0);

  // What was wrong, one line each: a true total variation or output error above its bound, a
  // CERTIFIED head out of tolerance, an EXACT one with an error, any other outcome.
  const std::vector<std::string>& violations() const { return violations_; }
  const std::vector<ReadCertificate>& certificates() const { return certificates_; }
  const std::vector<float>& outputs() const { return outputs_; }
  const std::vector<double>& true_tv() const { return true_tv_; }            // [query heads]
  const std::vector<double>& output_error() const { return output_error_; }  // [query heads]
  CertifierCounters& counters() { return counters_; }
  // Called after each pass of Attend.
  std::function<void()> after_attend;

 private:
  void CheckHead(const ReadPlan& plan, int32_t query_head);

  FakeCache* const fake_;
  const ReadKernels kernels_;
  CertifierCounters counters_;
  ReadWorkspace workspace_;
  const ReadPlan* plan_ = nullptr;     // of the read that runs
  std::vector<ExactAttention> exact_;  // [query heads]
  std::vector<double> true_tv_;        // of each head's last pass
  std::vector<double> output_error_;
  std::vector<ReadCertificate> certificates_;
  std::vector<float> outputs_;
  std::vector<std::string> violations_;
};

// [query heads][d], normal times `scale`.
std::vector<float> RandomQueries(const CacheSpec& spec, float scale, std::mt19937_64* random);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_CHECKER_H_
