// Which blocks to read again from their originals when a read misses its tolerance (docs/bounds.md,
// section 5). A choice, never a certificate: the kernel certifies the repaired read afresh.
//
// Units: masses on any common scale, half-widths in nats, value errors in value units.
// Errors: none; unknown inputs (NaN, negative) count as +infinity and are repaired first.
// Memory: `order` is overwritten and grows to at most the number of blocks; a caller that reserves
//   it allocates nothing here. Threads: pure but for `order` and the workspace.
#ifndef CERTKV_KERNELS_BOUNDS_REPAIR_ORDER_H_
#define CERTKV_KERNELS_BOUNDS_REPAIR_ORDER_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/bounds/worst_case_tv.h"

namespace certkv {

struct RepairChoice {
  int32_t block_count = 0;    // the first blocks of `order` are to be repaired
  double predicted = 1;       // value term or TV* after the repair, predicted
  bool meets_target = false;  // predicted <= the target; false: even all blocks do not reach it
};

// Rung 1, values. Blocks by descending m_j eta_j (index breaks ties), as few as bring the value
// term sum m eta / sum m down to `value_term_max`. With blocks of equal cost that prefix is the
// smallest set that does.
struct ValueRepairInput {
  absl::Span<const double> block_mass;
  absl::Span<const double> value_error_bound;  // eta; 0: nothing to repair
  double value_term_max = 0;
};
RepairChoice ChooseValueRepairs(const ValueRepairInput& input, std::vector<int32_t>* order);

// Rung 2, keys. Score of a block: what it adds to the dual bound at the worst case found, against
// what is left of it after the repair,
//
//   f(c) = m (lambda h_r(c) - 1)^+ - lambda r m e^{-c},   score = (f(c_j) - f(c'_j)) / bytes_j,
//
// with r and lambda of `found` and c'_j the half-width after the repair. The bound is a sum of f
// over the atoms, so scores add up: they are the exact drop of the bound at that r and lambda.
// Other r take over as blocks are repaired, so the number of blocks is found by trying: doubling,
// then bisecting, with WorstCaseTv of the repaired half-widths. That is not exactly monotone, so
// the result is a prefix that works, not always the shortest.
struct KeyRepairInput {
  TvAtoms<double, double> atoms;                 // one atom per block
  absl::Span<const double> repaired_half_width;  // c', the slack that is left; same size
  absl::Span<const int64_t> repair_bytes;        // cost, > 0; empty = all equal
  WorstCaseTvResult found;                       // of `atoms`
  double tv_max = 0;                             // target, > 0
};
// `scratch` holds the half-widths that are tried; it grows to the number of blocks.
RepairChoice ChooseKeyRepairs(const KeyRepairInput& input, WorstCaseTvWorkspace* workspace,
                              std::vector<double>* scratch, std::vector<int32_t>* order);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_REPAIR_ORDER_H_
