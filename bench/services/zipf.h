// Draws of Zipf's law for generated workloads.
#ifndef CERTKV_BENCH_SERVICES_ZIPF_H_
#define CERTKV_BENCH_SERVICES_ZIPF_H_

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace certkv::bench {

// Item i of [0, count) has a weight of (i + 1)^-exponent.
class Zipf {
 public:
  Zipf(int count, double exponent) : cumulative_(count) {
    double sum = 0;
    for (int i = 0; i < count; ++i) cumulative_[i] = sum += std::pow(i + 1, -exponent);
  }
  int Draw(std::mt19937_64& random) const {
    const double at = std::uniform_real_distribution<double>(0, cumulative_.back())(random);
    return static_cast<int>(std::lower_bound(cumulative_.begin(), cumulative_.end(), at) -
                            cumulative_.begin());
  }

 private:
  std::vector<double> cumulative_;
};

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_SERVICES_ZIPF_H_
