// Request::Decide: the ladder for engines that climb it themselves.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/gate/request.h"

namespace certkv::gate {
namespace {

Rung AtLeast(Rung rung, const ReadCertificate& certificate) {
  const int next = std::max(static_cast<int>(certificate.rung) + 1, static_cast<int>(rung));
  return static_cast<Rung>(std::min(next, static_cast<int>(Rung::kLayer)));
}

// The next rung whose reads are exact.
Rung ExactRung(const ReadCertificate& certificate) {
  return certificate.rung >= Rung::kHead ? Rung::kLayer : Rung::kHead;
}

}  // namespace

HeadTerms Request::TermsForDecide(const Policy& policy, const ReadCertificate& certificate,
                                  int64_t now_ms) const {
  PolicyLease lease;
  lease.read_mode = ModeNow(policy);
  lease.tolerances = EffectiveTolerances(policy, terms_);
  lease.head_rules = RulesNow(policy, lease.read_mode, now_ms);
  return TermsOf(lease, certificate.layer, certificate.query_head);
}

std::string Request::WhyNotAccepted(const ReadCertificate& certificate,
                                    const Tolerances& tolerances, Rung* next_rung) {
  if (certificate.failure_probability > 0 && risk_mode_ != RiskMode::kUnion) {
    *next_rung = ExactRung(certificate);
    return absl::StrCat("failure_probability ", certificate.failure_probability,
                        " has no place in ", RiskModeName(risk_mode_));
  }
  const bool is_exact = IsExactOutput(certificate);
  if (!is_exact && !MeetsTvTolerance(certificate, tolerances)) {
    *next_rung = AtLeast(Rung::kKeys, certificate);  // values read again do not move the softmax
    return absl::StrCat("worst_case_tv ", certificate.worst_case_tv, " exceeds tv_tolerance ",
                        tolerances.tv_tolerance);
  }
  if (!is_exact && !MeetsTolerances(certificate, tolerances)) {
    *next_rung = AtLeast(Rung::kValues, certificate);
    return absl::StrCat("value_term ", certificate.value_term, " of radius ",
                        certificate.value_radius, ", output_error_bound ",
                        certificate.output_error_bound, " exceed the tolerances");
  }
  if (budget_ != nullptr && !budget_->Decide(AmountOf(certificate))) {
    *next_rung = ExactRung(certificate);
    return absl::StrCat(AmountOf(certificate), " does not fit what is left of the budget, ",
                        budget_->left(), ", or of the tenant's");
  }
  return "";
}

absl::StatusOr<Decision> Request::Decide(const ReadCertificate& certificate,
                                         const Policy& whole_policy, int64_t now_ms) {
  if (closed_) return ClosedError(name_);
  const Policy& policy = Resolve(whole_policy);
  const HeadTerms terms = TermsForDecide(policy, certificate, now_ms);
  const Tolerances& tolerances = terms.tolerances;
  const ReadMode mode = terms.exact ? ReadMode::kExact : ModeNow(policy);
  Decision decision;
  ReadCertificate accepted = certificate;
  last_use_ms_ = std::max(last_use_ms_, now_ms);
  if (IsExactByArithmetic(certificate)) {
    if (budget_ != nullptr) budget_->ReportExact(AmountOf(certificate));
    decision.accepted = true;
    decision.explanation = "exact";
  } else if (mode == ReadMode::kExact) {
    decision.next_rung = ExactRung(certificate);
    decision.explanation = "the request, the layer or the head reads originals only";
  } else if (mode == ReadMode::kObserve) {
    decision.accepted = true;
    const bool meets = MeetsTolerances(certificate, tolerances);
    accepted.outcome = meets ? Outcome::kCertified : Outcome::kObserved;
    decision.explanation = meets ? "within tolerance" : "outside tolerance, observed only";
    if (budget_ != nullptr) budget_->ReportCertified(AmountOf(certificate));
  } else {
    decision.explanation = WhyNotAccepted(certificate, tolerances, &decision.next_rung);
    decision.accepted = decision.explanation.empty();
    if (decision.accepted) {
      accepted.outcome = Outcome::kCertified;
      decision.explanation = "within tolerance";
    }
  }
  if (decision.accepted) {
    CountRepair(accepted, policy, now_ms);
    account_.Record(accepted, /*outside_tolerance=*/false, now_ms);
    Touch(now_ms);
  }
  return decision;
}

}  // namespace certkv::gate
