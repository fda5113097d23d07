// Fuzzes the texts that come with requests: HTTP targets, and what the dashboard makes of their
// queries; trace contexts; bearer tokens and identities' scopes are in `access`.
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "services/common/http_target.h"
#include "services/common/trace_context.h"
#include "services/gate/request_registry.h"
#include "tests/fuzz/fuzz_checks.h"
#include "tests/support/fake_clock.h"

namespace certkv {
namespace {

std::string Encode(absl::string_view text) {
  std::string encoded;
  for (const char byte : text) {
    absl::StrAppend(&encoded, "%", absl::Hex(static_cast<uint8_t>(byte), absl::kZeroPad2));
  }
  return encoded;
}

struct Gate {
  Gate() {
    for (int i = 0; i < 5; ++i) {
      CERTKV_CHECK(registry.OpenRequest(absl::StrCat("r", i), "label", {}).ok(), "it opens");
    }
  }
  FakeClock clock;
  gate::RequestRegistry registry{GateConfig(), &clock};
};

void AskFor(const Gate& gate, absl::string_view target) {
  HttpRequest request;
  if (!ParseHttpTarget(target, &request)) return;
  CERTKV_CHECK(!request.path.empty() && request.path[0] == '/', "a path begins at the root");
  CERTKV_CHECK(request.path.size() <= target.size(), "nothing grows");
  HttpRequest again;
  const absl::string_view below_root = absl::string_view(request.path).substr(1);
  std::string text = absl::StrCat("/", Encode(below_root));
  const char* lead = "?";
  for (const auto& [name, value] : request.query) {
    absl::StrAppend(&text, lead, Encode(name), "=", Encode(value));
    lead = "&";
  }
  CERTKV_CHECK(
      ParseHttpTarget(text, &again) && again.path == request.path && again.query == request.query,
      "what is decoded is encoded and decoded as the same");
  gate::RiskQuery query;
  if (!absl::SimpleAtoi(request.query["page_size"], &query.page_size)) query.page_size = -1;
  query.page_token = request.query["page_token"];
  query.filter.label_part = request.query["label"];
  query.filter.tenant = request.query["tenant"];
  query.filter.include_closed = request.query["closed"] == "1";
  CheckRefusal(gate.registry.ListRisks(query).status());
  CheckRefusal(gate.registry.GetRisk(below_root).status());
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* gate = new certkv::Gate;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  certkv::AskFor(*gate, text);
  const std::string trace = certkv::TraceparentOrNone(text);
  CERTKV_CHECK(trace.empty() || (trace == text && trace.size() <= 128),
               "as it came, or not at all");
  return 0;
}
