// What reads of the reference are made of: logits, weighted values, radii.
#ifndef CERTKV_KERNELS_REFERENCE_ATTEND_PARTS_H_
#define CERTKV_KERNELS_REFERENCE_ATTEND_PARTS_H_

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/core/limits.h"
#include "kernels/ops/attend.h"

namespace certkv::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Sums of p^ eta and of p^ v^: a term has at most 2^24 tokens * 2^-53 of rounding, and p^ itself
// 2^-40 (see ArithmeticSlackNat, which holds the same rounding of exp).
inline constexpr double kSumInflation = 0x1p-28;

// log sum exp of numbers that arrive one by one; -infinity while there is none.
class LogSumExp {
 public:
  void Add(double logit) {
    if (logit == -kInfinity) return;
    if (logit > max_) {
      sum_ = sum_ * std::exp(max_ - logit) + 1;
      max_ = logit;
    } else {
      sum_ += std::exp(logit - max_);
    }
  }
  double max() const { return max_; }
  double Value() const { return sum_ == 0 ? -kInfinity : max_ + std::log(sum_); }

 private:
  double max_ = -kInfinity;
  double sum_ = 0;
};

// Of head g, nats; -infinity when the read has none.
double SinkLogit(const AttendArgs& args, int g);

// l^ of a token as head g reads it, soft cap included; nats.
double ServedLogit(const AttendArgs& args, int g, int64_t token);

// Weighted values of one head.
struct ValueSums {
  std::array<double, kHeadDimMax> plain{};
  std::array<double, kHeadDimMax> rotated{};
  double magnitude = 0;  // sum p^ ||v^||_2
};

void AddValue(const AttendArgs& args, int g, int64_t token, double weight, ValueSums* sums);

// Rounds the output to float and returns a bound on ||o^ - sum p^ v^||_2. `output` may be null.
double WriteOutput(const AttendArgs& args, ValueSums* sums, float* output);

// Largest ||v||_2 of the originals in the range, from the tiles' headers and the tail itself.
float ValueRadius(const AttendArgs& args);

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_ATTEND_PARTS_H_
