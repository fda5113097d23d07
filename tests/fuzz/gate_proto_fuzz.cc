// Fuzzes gate's messages, from wire bytes to the ledger: each is refused with a reason or counted,
// and no risk leaves its range. The first byte says which.
#include <cmath>

#include "certkv/gate/v1/gate.pb.h"
#include "kernels/core/check.h"
#include "services/common/convert.h"
#include "services/gate/convert.h"
#include "services/gate/request_registry.h"
#include "tests/fuzz/fuzz_checks.h"
#include "tests/support/fake_clock.h"

namespace certkv::gate {
namespace {

struct LedgerUnderTest {
  static GateConfig Config() {
    GateConfig config;
    config.request_limit = 64;
    config.tenant_limit = 64;
    return config;
  }
  FakeClock clock;
  RequestRegistry registry{Config(), &clock};
};

void CheckRisks(const LedgerUnderTest& ledger) {
  RiskQuery query;
  query.filter.include_closed = true;
  const auto page = ledger.registry.ListRisks(query);
  CERTKV_CHECK(page.ok(), "the plain list is always told");
  for (const RequestRisk& risk : page->risks) {
    v1::RequestRisk proto;
    RequestRiskToProto(risk, &proto);
    CERTKV_CHECK(proto.risk_score() >= 0 && proto.risk_score() <= 1, "a score is in [0, 1]");
    CERTKV_CHECK(proto.sum_worst_case_tv() >= 0 && !std::isnan(proto.budget_committed()),
                 "sums are numbers");
    CERTKV_CHECK(proto.budget() <= 0 || proto.budget_committed() <= proto.budget() * (1 + 1e-6),
                 "no budget is overspent");
  }
}

void Open(LedgerUnderTest& ledger, const std::string& bytes) {
  v1::OpenRequestRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto terms = TermsFromProto(request);
  CheckRefusal(terms.status());
  if (!terms.ok()) return;
  const auto lease = ledger.registry.OpenRequest(request.request_id(), request.label(), *terms);
  CheckRefusal(lease.status());
  if (!lease.ok()) return;
  CERTKV_CHECK(PolicyLeaseFromProto(PolicyLeaseToProto(*lease, 0), 0).ok(), "a lease can be used");
}

void Report(LedgerUnderTest& ledger, const std::string& bytes) {
  v1::ReportRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto certificates = CertificatesFromProto(request);
  CheckRefusal(certificates.status());
  const auto returned = ReturnedSlicesFromProto(request);
  CheckRefusal(returned.status());
  if (!certificates.ok() || !returned.ok()) return;
  const auto answer =
      ledger.registry.Report(request.request(), {.reporter_id = request.reporter_id(),
                                                 .batch_number = request.batch_number(),
                                                 .lease_id = request.lease_id(),
                                                 .certificates = *certificates,
                                                 .failed_read_count = request.failed_read_count(),
                                                 .returned = *returned,
                                                 .is_last = request.is_last()});
  CheckRefusal(answer.status());
}

void SetPolicy(LedgerUnderTest& ledger, const std::string& bytes) {
  v1::UpdatePolicyRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto policy = PolicyFromProto(request.policy());
  CheckRefusal(policy.status());
  if (!policy.ok()) return;
  CheckRefusal(ledger.registry.TryPolicy(*policy).status());
  const auto updated = ledger.registry.UpdatePolicy(*policy, "fuzz");
  CheckRefusal(updated.status());
  if (updated.ok()) {
    CERTKV_CHECK(PolicyFromProto(PolicyToProto(*updated)).ok(), "a policy in force is one");
  }
}

void List(const LedgerUnderTest& ledger, const std::string& bytes) {
  v1::ListRequestRisksRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto query = RiskQueryFromProto(request);
  CheckRefusal(query.status());
  if (query.ok()) CheckRefusal(ledger.registry.ListRisks(*query).status());
}

void Decide(LedgerUnderTest& ledger, const std::string& bytes) {
  v1::DecideRequest request;
  if (!request.ParseFromString(bytes)) return;
  const auto certificate = ReadCertificateFromProto(request.certificate());
  CheckRefusal(certificate.status());
  if (!certificate.ok()) return;
  CheckRefusal(ledger.registry.Decide(request.request(), *certificate).status());
  CheckRefusal(ledger.registry.CloseRequest(request.request()).status());
}

}  // namespace
}  // namespace certkv::gate

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* ledger = new certkv::gate::LedgerUnderTest;
  certkv::FuzzInput input(data, size);
  const auto kind = input.Take<uint8_t>();
  const std::string bytes = input.Rest();
  switch (kind % 5) {
    case 0:
      certkv::gate::Open(*ledger, bytes);
      break;
    case 1:
      certkv::gate::Report(*ledger, bytes);
      break;
    case 2:
      certkv::gate::SetPolicy(*ledger, bytes);
      break;
    case 3:
      certkv::gate::List(*ledger, bytes);
      break;
    default:
      certkv::gate::Decide(*ledger, bytes);
  }
  ledger->clock.AdvanceMs(kind);
  certkv::gate::CheckRisks(*ledger);
  return 0;
}
