// What a FinishWorkspace holds, for the backends.
#ifndef CERTKV_KERNELS_OPS_FINISH_STATE_H_
#define CERTKV_KERNELS_OPS_FINISH_STATE_H_

#include <cstdint>
#include <vector>

#include "kernels/bounds/worst_case_tv.h"
#include "kernels/ops/finish_certificate.h"

namespace certkv {

struct FinishWorkspace::State {
  // The reference's atoms.
  std::vector<double> mass;
  std::vector<double> top_token_mass;
  std::vector<double> half_width;
  std::vector<double> top_half_width;
  // The CPU backend's, padded to whole chunks.
  std::vector<float> float_mass;
  std::vector<float> float_top;  // 0 between reads
  std::vector<float> float_half_width;
  std::vector<float> float_top_half_width;  // where float_top is above 0
  std::vector<float> chunk_mass_max;
  std::vector<float> chunk_half_width_min;
  std::vector<float> chunk_half_width_max;
  std::vector<int64_t> heavy_atoms;  // where float_top isn't 0
  WorstCaseTvWorkspace tv;
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_FINISH_STATE_H_
