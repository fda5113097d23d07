#include "tests/tidy/include_rules.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace certkv::tidy {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kDocument[] = R"(
| folder | may include folders | may include libraries | wire code in |
|---|---|---|---|
| `kernels/core` | | Abseil | |
| `kernels/ops` | `kernels/core`, `kernels/cpu/cpu.h` | Abseil | |
| `services/gate` | `kernels/core`, `proto/certkv/gate` | Abseil, gRPC, Protobuf | `service*` |

| library | its headers begin with |
|---|---|
| Abseil | `absl/` |
| gRPC | `grpcpp/`, `grpc/` |
| Protobuf | `google/protobuf/` |
| GoogleTest | `gmock/` |
| Boost | `boost/` |
)";

absl::StatusOr<IncludeTable> Parse(absl::string_view document) {
  return ParseIncludeTable(MakeSourceFile("docs/architecture.md", document));
}

std::string Check(absl::string_view path, absl::string_view include) {
  const auto table = Parse(kDocument);
  EXPECT_TRUE(table.ok()) << table.status();
  const SourceFile file = MakeSourceFile(path, absl::StrCat("\n#include ", include, "\n"));
  return FormatFindings(CheckIncludes(*table, file));
}

TEST(IncludeRulesTest, AllowsWhatTheTableNames) {
  EXPECT_THAT(Check("kernels/core/a.cc", "\"kernels/core/b.h\""), IsEmpty());
  EXPECT_THAT(Check("kernels/core/a.cc", "\"absl/status/status.h\""), IsEmpty());
  EXPECT_THAT(Check("kernels/core/a.cc", "<vector>"), IsEmpty());
  EXPECT_THAT(Check("kernels/core/a.cc", "<sys/mman.h>"), IsEmpty());
  EXPECT_THAT(Check("kernels/ops/a.cc", "\"kernels/cpu/cpu.h\""), IsEmpty());
  EXPECT_THAT(Check("services/gate/service.cc", "\"certkv/gate/v1/gate.grpc.pb.h\""), IsEmpty());
  EXPECT_THAT(Check("services/gate/service.cc", "<grpcpp/grpcpp.h>"), IsEmpty());
  EXPECT_THAT(Check("kernels/core/a_test.cc", "<gmock/gmock.h>"), IsEmpty());
  EXPECT_THAT(Check("kernels/core/a_test.cc", "\"tests/support/golden.h\""), IsEmpty());
  EXPECT_THAT(Check("bench/kernels/a.cc", "\"services/gate/ledger.h\""), IsEmpty());
}

TEST(IncludeRulesTest, FindsAFolderThatIsNotAllowed) {
  EXPECT_THAT(Check("kernels/core/a.cc", "\"kernels/ops/attend.h\""),
              HasSubstr("kernels/core/a.cc:2: kernels/core may not include kernels/ops/attend.h"));
  EXPECT_THAT(Check("services/gate/service.cc", "\"services/kvstore/service.h\""),
              HasSubstr("may not include"));
  EXPECT_THAT(Check("kernels/core/a.cc", "\"tests/support/golden.h\""),
              HasSubstr("may not include"));
  EXPECT_THAT(Check("kernels/core/a.cc", "\"kernels/core_more/b.h\""),
              HasSubstr("may not include"));
}

TEST(IncludeRulesTest, FindsAnotherHeaderOfAFolderThatGivesOneHeader) {
  EXPECT_THAT(Check("kernels/ops/a.cc", "\"kernels/cpu/dispatch.h\""),
              HasSubstr("may not include kernels/cpu/dispatch.h"));
}

TEST(IncludeRulesTest, FindsALibraryThatIsNotAllowed) {
  EXPECT_THAT(Check("kernels/core/a.cc", "<boost/asio.hpp>"), HasSubstr("may not use Boost"));
  EXPECT_THAT(Check("kernels/core/a.cc", "<gmock/gmock.h>"), HasSubstr("may not use GoogleTest"));
  EXPECT_THAT(Check("kernels/core/a.cc", "<fmt/format.h>"), HasSubstr("unknown library"));
}

TEST(IncludeRulesTest, FindsWireCodeInAnEngine) {
  EXPECT_THAT(Check("services/gate/ledger.cc", "\"certkv/gate/v1/gate.pb.h\""),
              HasSubstr("ledger.cc includes wire code"));
  EXPECT_THAT(Check("services/gate/ledger.h", "<grpcpp/grpcpp.h>"), HasSubstr("wire code"));
  EXPECT_THAT(Check("kernels/core/a.cc", "\"google/protobuf/message.h\""), HasSubstr("wire code"));
}

TEST(IncludeRulesTest, FindsTheProtoOfAnotherService) {
  EXPECT_THAT(Check("services/gate/service.cc", "\"certkv/kvstore/v1/kvstore.pb.h\""),
              HasSubstr("may not include proto/certkv/kvstore/v1/kvstore.pb.h"));
}

TEST(IncludeRulesTest, FindsPathsThatDoNotBeginAtTheRoot) {
  EXPECT_THAT(Check("kernels/core/a.cc", "\"b.h\""), HasSubstr("does not begin at the root"));
  EXPECT_THAT(Check("kernels/core/a.cc", "\"../ops/b.h\""), HasSubstr("does not begin"));
}

TEST(IncludeRulesTest, FindsAbseilHeadersThatDebianLacks) {
  EXPECT_THAT(Check("kernels/core/a.cc", "\"absl/log/log.h\""), HasSubstr("does not exist"));
}

TEST(IncludeRulesTest, FindsAFolderWithoutARow) {
  EXPECT_THAT(Check("kernels/cuda/a.cu", "<vector>"), HasSubstr("no row"));
}

TEST(IncludeRulesTest, RefusesADocumentWithoutUsableTables) {
  const std::string document = kDocument;
  for (const std::string& broken :
       {std::string(), absl::StrReplaceAll(document, {{"| folder | may", "| folder | can"}}),
        absl::StrReplaceAll(document, {{"| library | its", "| library | the"}}),
        absl::StrReplaceAll(document, {{"| `kernels/core` | | Abseil | |", "| `kernels/core` |"}}),
        absl::StrReplaceAll(document, {{"| `kernels/ops`", "| `kernels/core`"}}),
        absl::StrReplaceAll(document, {{"| | Abseil | |", "| | Absail | |"}})}) {
    EXPECT_EQ(Parse(broken).status().code(), absl::StatusCode::kInvalidArgument) << broken;
  }
}

}  // namespace
}  // namespace certkv::tidy
