// The repair ladder of one query head: where it is read from next, when a read missed its
// tolerances (docs/bounds.md, "Repair").
//
//   values  the tiles with the largest sum p^ eta, as many as make the value term fit
//   keys    the tiles that carry the worst case, as many as are predicted to make TV* fit; on a
//           miss at least twice as many
//   head    everything: the result is exact
//
// A prediction only chooses bytes. Whether the head is within its tolerances is decided by reading
// it again; so a poor choice costs time, never soundness.
#ifndef CERTKV_SERVICES_CERTIFIER_REPAIR_LADDER_H_
#define CERTKV_SERVICES_CERTIFIER_REPAIR_LADDER_H_

#include <cstdint>
#include <vector>

#include "kernels/bounds/worst_case_tv.h"
#include "kernels/core/policy.h"

namespace certkv::certifier {

// Rounds of one rung before the next one is taken: passes over the sequence, so the bound of a
// read's time. Counts double from round to round, so that four cover a choice 8 times too small.
inline constexpr int32_t kRepairRoundsMax = 4;

// Tiles that hold tokens of the read: [begin, end).
struct TileSpan {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t size() const { return end - begin; }
};

// What the last read of a head has shown. Arrays are AttendResult's, of this head.
struct LadderEvidence {
  const ReadCertificate& certificate;  // its four bounds
  float rounding_term = 0;
  TileSpan tiles;
  int32_t atoms_per_tile = 1;
  int32_t atom_count = 0;         // A
  float lse_nat = 0;              // nats
  const float* block_lse;         // [A]
  const float* block_max_logit;   // [A]
  const float* logit_half_width;  // [A]
  const float* top_half_width;    // [A]
  const float* tile_value_error;  // [T], indexed by tile
};

// Scratch of one thread.
struct LadderWorkspace {
  void Reserve(int64_t tile_count, int64_t atom_count);

  std::vector<int32_t> order;               // [max(T, A)] the best to repair first
  std::vector<double> tile_mass;            // [T]
  std::vector<double> tile_error;           // [T]
  std::vector<double> atom_mass;            // [A]
  std::vector<double> top_token_mass;       // [A]
  std::vector<double> half_width;           // [A]
  std::vector<double> top_half_width;       // [A]
  std::vector<double> repaired_half_width;  // [A]
  std::vector<double> tried_half_width;     // [A]
  WorstCaseTvWorkspace worst_case_tv;
};

// Invariant: every call adds at least one bit to `sources`, so that the ladder ends. Bits are never
// taken back.
class HeadLadder {
 public:
  void Reset() { *this = HeadLadder(); }

  // Adds to `sources` ([T] kSource bits) what is read from originals next. `evidence` missed
  // `tolerances`.
  void Climb(const LadderEvidence& evidence, const Tolerances& tolerances,
             LadderWorkspace* workspace, uint8_t* sources);
  // Everything from originals.
  void ClimbToHead(TileSpan tiles, uint8_t* sources);

  Rung rung() const { return rung_; }  // the highest so far

 private:
  // Both return how many tiles they added; 0 means that the rung can't reach the target.
  int32_t ClimbValues(const LadderEvidence& evidence, double value_target,
                      LadderWorkspace* workspace, uint8_t* sources);
  int32_t ClimbKeys(const LadderEvidence& evidence, double tv_target, LadderWorkspace* workspace,
                    uint8_t* sources);

  Rung rung_ = Rung::kNone;
  int32_t value_rounds_ = 0;
  int32_t key_rounds_ = 0;
  int32_t value_tiles_ = 0;  // repaired so far
  int32_t key_tiles_ = 0;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_REPAIR_LADDER_H_
