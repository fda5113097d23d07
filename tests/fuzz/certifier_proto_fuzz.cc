// Fuzzes the certifier's messages, from wire bytes to views and reads of a small cache: each is
// refused with a reason, or gives certificates within their bounds. The first byte says which.
#include "certkv/certifier/v1/certifier.pb.h"
#include "kernels/core/check.h"
#include "services/certifier/convert.h"
#include "services/certifier/read_fixture.h"
#include "services/common/convert.h"
#include "tests/fuzz/fuzz_checks.h"

namespace certkv::certifier {
namespace {

struct Reader {
  ReadFixture fixture{SmallSpec(2, 1, 2, 64), 64 * 2 + 9,
                      TestLease({.tv_tolerance = 0.2f, .value_tolerance = 0.5f})};
};

// A view on what was asked for, in the memory that is there.
void Open(Reader& reader, const v1::OpenViewRequest& request) {
  FakeCache& fake = reader.fixture.fake;
  const auto policy = PolicyLeaseFromProto(request.policy(), 0);
  CheckRefusal(policy.status());
  const auto blocks = BlockHandlesFromProto(request.blocks());
  CheckRefusal(blocks.status());
  if (!policy.ok() || !blocks.ok()) return;
  const auto tail =
      MakeTail(*fake.cache(), request.tail().staging_id() == 0 ? nullptr : fake.staging(),
               request.tail().staging_slot(), request.tail().token_count());
  CheckRefusal(tail.status());
  if (!tail.ok()) return;
  BudgetBook book(4);
  const auto view = View::Create(fake.cache(), *blocks, *tail, *policy, &book, 0);
  CheckRefusal(view.status());
}

void ReadAll(Reader& reader, const v1::CertifyRequest& request) {
  const auto reads = ReadsFromProto(request.reads());
  CheckRefusal(reads.status());
  if (!reads.ok()) return;
  for (const BatchRead& one : *reads) {
    CheckRefusal(one.status);
    if (!one.status.ok()) continue;
    ReadRequest read;
    read.layer = one.layer;
    read.query_position = one.query_position;
    read.queries = one.queries;
    read.sink_logits = one.sink_logits;
    ReadChecker& checker = reader.fixture.checker;
    const absl::Status status = checker.Read(*reader.fixture.view, read);
    CheckRefusal(status);
    if (!status.ok()) continue;
    for (const ReadCertificate& certificate : checker.certificates()) {
      CERTKV_CHECK(certificate.worst_case_tv >= 0 && certificate.worst_case_tv <= 1,
                   "a total variation is in [0, 1]");
    }
    CERTKV_CHECK(checker.violations().empty(), "every bound holds, whatever the queries are");
  }
}

}  // namespace
}  // namespace certkv::certifier

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* reader = new certkv::certifier::Reader;
  certkv::FuzzInput input(data, size);
  const auto kind = input.Take<uint8_t>();
  if (kind % 2 == 0) {
    certkv::certifier::v1::OpenViewRequest request;
    if (request.ParseFromString(input.Rest())) certkv::certifier::Open(*reader, request);
  } else {
    certkv::certifier::v1::CertifyRequest request;
    if (request.ParseFromString(input.Rest())) certkv::certifier::ReadAll(*reader, request);
  }
  return 0;
}
