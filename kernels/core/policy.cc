#include "kernels/core/policy.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

absl::Status InvalidTolerance(absl::string_view field, float seen, absl::string_view range) {
  return MakeError(absl::StatusCode::kInvalidArgument, "TOLERANCE_INVALID",
                   absl::StrCat(field, " is ", seen, ", must be ", range));
}

absl::Status InvalidLease(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "POLICY_LEASE_INVALID", message);
}

}  // namespace

absl::Status ValidateTolerances(const Tolerances& tolerances) {
  if (!(tolerances.tv_tolerance >= 0 && tolerances.tv_tolerance <= 1)) {
    return InvalidTolerance("tv_tolerance", tolerances.tv_tolerance, "in [0, 1]");
  }
  if (!(tolerances.value_tolerance >= 0 && std::isfinite(tolerances.value_tolerance))) {
    return InvalidTolerance("value_tolerance", tolerances.value_tolerance, "finite and >= 0");
  }
  if (!(tolerances.output_tolerance >= 0 && std::isfinite(tolerances.output_tolerance))) {
    return InvalidTolerance("output_tolerance", tolerances.output_tolerance,
                            "finite and >= 0 (0 = no limit)");
  }
  if (!(tolerances.skip_tolerance >= 0 && tolerances.skip_tolerance < 1)) {
    return InvalidTolerance("skip_tolerance", tolerances.skip_tolerance,
                            "in [0, 1) (0 = read everything)");
  }
  return absl::OkStatus();
}

const char* ReadModeName(ReadMode mode) {
  switch (mode) {
    case ReadMode::kEnforce:
      return "ENFORCE";
    case ReadMode::kObserve:
      return "OBSERVE";
    case ReadMode::kExact:
      return "EXACT";
  }
  return "?";
}

const char* RiskModeName(RiskMode mode) {
  switch (mode) {
    case RiskMode::kThreshold:
      return "THRESHOLD";
    case RiskMode::kCumulative:
      return "CUMULATIVE";
    case RiskMode::kUnion:
      return "UNION";
    case RiskMode::kAnytime:
      return "ANYTIME";
  }
  return "?";
}

float FailureShare(double budget_slice) {
  constexpr double kShareMin = 0x1p-40;
  if (!(budget_slice >= kShareMin)) return 0;
  const double share = std::max(std::min(budget_slice, 1.0) * 0x1p-16, kShareMin);
  const auto rounded = static_cast<float>(share);
  return rounded <= share ? rounded : std::nextafter(rounded, 0.0f);
}

const char* RungName(Rung rung) {
  switch (rung) {
    case Rung::kNone:
      return "none";
    case Rung::kValues:
      return "values";
    case Rung::kKeys:
      return "keys";
    case Rung::kHead:
      return "head";
    case Rung::kLayer:
      return "layer";
  }
  return "?";
}

const char* OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kCertified:
      return "certified";
    case Outcome::kExact:
      return "exact";
    case Outcome::kObserved:
      return "observed";
  }
  return "?";
}

HeadTerms TermsOf(const PolicyLease& lease, int32_t layer, int32_t query_head) {
  HeadTerms terms{lease.tolerances, lease.read_mode == ReadMode::kExact};
  float ruled = -1;
  float ruled_skip = -1;
  for (const HeadRule& rule : lease.head_rules) {
    if (rule.layer != layer || (rule.query_head >= 0 && rule.query_head != query_head)) continue;
    terms.exact = terms.exact || rule.exact;
    if (rule.tv_tolerance >= 0)
      ruled = ruled < 0 ? rule.tv_tolerance : std::min(ruled, rule.tv_tolerance);
    if (rule.skip_tolerance >= 0) {
      ruled_skip = ruled_skip < 0 ? rule.skip_tolerance : std::min(ruled_skip, rule.skip_tolerance);
    }
  }
  if (ruled >= 0) terms.tolerances.tv_tolerance = ruled;
  if (ruled_skip >= 0) terms.tolerances.skip_tolerance = ruled_skip;
  return terms;
}

absl::Status ValidatePolicyLease(const PolicyLease& lease) {
  if (lease.request.empty() || lease.request.size() > 256) {
    return InvalidLease(absl::StrCat("policy lease's request has ", lease.request.size(),
                                     " bytes, must have 1 to 256"));
  }
  if (lease.lease_id <= 0) {
    return InvalidLease(absl::StrCat("policy lease id is ", lease.lease_id, ", must be > 0"));
  }
  if (absl::string_view(ReadModeName(lease.read_mode)) == "?" ||
      absl::string_view(RiskModeName(lease.risk_mode)) == "?") {
    return InvalidLease(absl::StrCat("policy lease has read_mode ",
                                     static_cast<int>(lease.read_mode), " and risk_mode ",
                                     static_cast<int>(lease.risk_mode), ", must be known modes"));
  }
  if (!(lease.budget_slice >= 0 && std::isfinite(lease.budget_slice))) {
    return InvalidLease(absl::StrCat("policy lease's budget_slice is ", lease.budget_slice,
                                     ", must be finite and >= 0"));
  }
  if (lease.head_rules.size() > kHeadRulesMax) {
    return InvalidLease(absl::StrCat("policy lease has ", lease.head_rules.size(),
                                     " head_rules, at most ", kHeadRulesMax));
  }
  for (const HeadRule& rule : lease.head_rules) {
    if (!(rule.layer >= 0 && rule.layer < kLayersMax) || rule.query_head < -1 ||
        !(rule.tv_tolerance <= 1) || !(rule.skip_tolerance < 1)) {
      return InvalidLease(absl::StrCat(
          "policy lease has a head rule of layer ", rule.layer, ", query head ", rule.query_head,
          ", tv_tolerance ", rule.tv_tolerance, ", skip_tolerance ", rule.skip_tolerance,
          "; must be a layer in [0, ", kLayersMax, "), a head or -1, at most 1, and below 1"));
    }
  }
  return ValidateTolerances(lease.tolerances);
}

bool MeetsTvTolerance(const ReadCertificate& certificate, const Tolerances& tolerances) {
  return certificate.worst_case_tv <= tolerances.tv_tolerance;
}

bool MeetsValueTolerance(const ReadCertificate& certificate, const Tolerances& tolerances) {
  // A radius of zero or infinity says nothing about the scale of values: only a zero term passes.
  if (certificate.value_term == 0) return true;
  // The product is exact in double; in float it could overflow and admit an infinite term.
  return std::isfinite(certificate.value_term) && std::isfinite(certificate.value_radius) &&
         certificate.value_term <= double{tolerances.value_tolerance} * certificate.value_radius;
}

bool MeetsOutputTolerance(const ReadCertificate& certificate, const Tolerances& tolerances) {
  if (tolerances.output_tolerance == 0) return true;
  return certificate.output_error_bound <= tolerances.output_tolerance;
}

bool MeetsTolerances(const ReadCertificate& certificate, const Tolerances& tolerances) {
  return MeetsTvTolerance(certificate, tolerances) &&
         MeetsValueTolerance(certificate, tolerances) &&
         MeetsOutputTolerance(certificate, tolerances);
}

}  // namespace certkv
