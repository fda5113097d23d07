// What reads must satisfy, and what is known about a read afterwards: the vocabulary that gate,
// certifier and clients share. The wire has the same in proto/certkv/type/certificate.proto.
#ifndef CERTKV_KERNELS_CORE_POLICY_H_
#define CERTKV_KERNELS_CORE_POLICY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace certkv {

// What a read must satisfy. Defaults are the product's.
struct Tolerances {
  float tv_tolerance = 0.2f;      // largest worst_case_tv, [0, 1]
  float value_tolerance = 0.1f;   // largest value_term / value_radius, >= 0
  float output_tolerance = 0.0f;  // largest output_error_bound, value units; 0 = no limit
  // Part of tv_tolerance that a read may spend on not reading tokens in full, [0, 1); at most half
  // of tv_tolerance is used. 0 = read everything (docs/bounds.md, section 9).
  float skip_tolerance = 0.0f;
};
// Errors: InvalidArgument [TOLERANCE_INVALID], naming field, value and range. NaN fails.
absl::Status ValidateTolerances(const Tolerances& tolerances);

enum class ReadMode : uint8_t {
  kEnforce = 1,  // repair, then certified or exact or an error
  kObserve = 2,  // measure only; outputs say so
  kExact = 3,    // originals only
};
enum class RiskMode : uint8_t {
  kThreshold = 1,   // each read within tv_tolerance
  kCumulative = 2,  // also the sum of worst_case_tv within a budget
  kUnion = 3,       // also the sum of failure_probability within a budget
  kAnytime = 4,     // also losses within a limit at every moment, but for a small probability
};
// Is a lease's slice an amount of worst_case_tv? In kUnion it is one of failure_probability.
inline bool SpendsTv(RiskMode mode) {
  return mode == RiskMode::kCumulative || mode == RiskMode::kAnytime;
}
// kUnion: what each query head of a dithered layer takes of a lease's slice of failure_probability,
// whatever its read comes to: 2^-16 of the slice, at least 2^-40, one unit of the accounts. Not
// above the exact share. 0 for a slice that has none.
float FailureShare(double budget_slice);
// How far up the repair ladder a read went. Ordered.
enum class Rung : uint8_t { kNone = 1, kValues = 2, kKeys = 3, kHead = 4, kLayer = 5 };
enum class Outcome : uint8_t {
  kCertified = 1,  // within every tolerance of its policy lease
  kExact = 2,      // computed from originals alone
  kObserved = 3,   // kObserve only: measured, outside tolerance, not repaired
};

const char* ReadModeName(ReadMode mode);   // "ENFORCE", ...
const char* RiskModeName(RiskMode mode);   // "THRESHOLD", ...
const char* RungName(Rung rung);           // "none", "values", ...
const char* OutcomeName(Outcome outcome);  // "certified", ...

// Other terms for one layer or one head of it.
struct HeadRule {
  int32_t layer = 0;             // in [0, kLayersMax)
  int32_t query_head = -1;       // -1 = all of the layer
  bool exact = false;            // read from originals only
  float tv_tolerance = -1.0f;    // instead of the lease's; < 0 = the lease's
  float skip_tolerance = -1.0f;  // the same
  friend bool operator==(const HeadRule&, const HeadRule&) = default;
};
inline constexpr int32_t kHeadRulesMax = 64;  // of one lease

// Gate's permission to decide reads of one request without asking, until it expires.
struct PolicyLease {
  std::string request;   // "requests/{request}"
  int64_t lease_id = 0;  // > 0
  ReadMode read_mode = ReadMode::kEnforce;
  Tolerances tolerances;
  RiskMode risk_mode = RiskMode::kThreshold;
  // kCumulative, kAnytime: how much the sum of worst_case_tv may grow under it; kUnion: the sum of
  // failure_probability.
  double budget_slice = 0;
  int64_t expire_time_ms = 0;  // Unix epoch
  int64_t policy_version = 0;
  int64_t sequence = 0;  // rises with every lease of the request
  // Where several say something of a head: exact if one does, and the smallest tolerance.
  std::vector<HeadRule> head_rules = {};  // at most kHeadRulesMax
  // Share of reads whose used outputs are to be compared with exact attention, [0, 1].
  float canary_share = 0;
};
// What one head must satisfy under a lease.
struct HeadTerms {
  Tolerances tolerances;
  bool exact = false;
};
HeadTerms TermsOf(const PolicyLease& lease, int32_t layer, int32_t query_head);
// Errors: InvalidArgument [POLICY_LEASE_INVALID | TOLERANCE_INVALID].
absl::Status ValidatePolicyLease(const PolicyLease& lease);

// The record of one read: one query head at one position of one layer.
struct ReadCertificate {
  int32_t layer = 0;
  int32_t query_head = 0;
  int64_t query_position = 0;
  float worst_case_tv = 1.0f;       // [0, 1]
  float value_term = 0.0f;          // sum p^ eta, value units
  float output_error_bound = 0.0f;  // value units, may be +infinity
  float value_radius = 0.0f;        // value units
  Rung rung = Rung::kNone;
  Outcome outcome = Outcome::kObserved;
  float first_worst_case_tv = 1.0f;  // of the first read, before any repair
  int64_t repair_bytes = 0;          // originals re-read for this head
  // Chance that the bounds above do not hold, [0, 1]. 0: the deterministic tier, they hold for
  // sure. Above 0: the dither tier (K8D keys); what the read took of a kUnion budget before it was
  // known what it comes to, so an exact output may have it too.
  float failure_probability = 0.0f;
  // Of the layer's blocks; 0 = not said. Values of KeyFormat and ValueFormat.
  uint8_t key_format = 0;
  uint8_t value_format = 0;
  // How much was read for it, in the pass that was accepted.
  int64_t read_tokens = 0;     // in full: keys and values
  int64_t skipped_tokens = 0;  // of their keys the coarse half alone, of their values nothing
  int64_t read_bytes = 0;      // of records, originals and tail
  float skipped_share = 0.0f;  // [0, 1] the part of worst_case_tv that the skipped tokens cost
};

// Do the bounds of `certificate` meet `tolerances`? A limited bound that is NaN or infinite never
// does. The one place where this is decided.
bool MeetsTolerances(const ReadCertificate& certificate, const Tolerances& tolerances);
// The same for the tv alone, and for the value and output parts.
bool MeetsTvTolerance(const ReadCertificate& certificate, const Tolerances& tolerances);
bool MeetsValueTolerance(const ReadCertificate& certificate, const Tolerances& tolerances);
bool MeetsOutputTolerance(const ReadCertificate& certificate, const Tolerances& tolerances);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_POLICY_H_
