// docs/errors.md against the code: every reason is in the table, and every row is a reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "tests/tidy/source_file.h"

namespace certkv::tidy {
namespace {

// Words of the same shape that are no reasons of errors: environment variables, a format, names of
// codes and of Python's constants, and what gate writes into its events.
const std::set<std::string> kNotReasons = {
    "BUDGET_EXHAUSTED",    "BUDGET_OVERRUN",     "CANARY_MISMATCH",   "CERTKV_CPU",
    "CERTKV_RUNTIME_DIR",  "FP8_E4M3",           "OUTSIDE_TOLERANCE", "HEAD_LIMIT",
    "XDG_RUNTIME_DIR",     "GRPC_TRACE",         "NO_COLOR",          "SLICE_OVERSPENT",
    "CERTKV_CA_FILE",      "CERTKV_CERT_FILE",   "CERTKV_KEY_FILE",   "CERTKV_TENANT",
    "CERTKV_TOKEN_FILE",   "CERTKV_CERTKVD",     "CERTIFICATE_DTYPE", "INVALID_ARGUMENT",
    "CERTKV_ANY_VERSION",  "NOT_FOUND",          "DATA_LOSS",         "PERMISSION_DENIED",
    "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "FORCED_EXACT",
    "LEDGER_LOST",         "CERTKV_PYTHON",      "CERTKV_SGLANG",     "ALREADY_EXISTS",
    "OUT_OF_RANGE",        "CERTKV_DEVICES",
};

// Every match of `pattern`'s first group.
std::set<std::string> Matches(const std::string& text, const std::regex& pattern) {
  std::set<std::string> found;
  for (std::sregex_iterator match(text.begin(), text.end(), pattern), end; match != end; ++match) {
    found.insert((*match)[1].str());
  }
  return found;
}

// "UPPER_SNAKE" literals of code.
std::set<std::string> ReasonsIn(const std::string& text) {
  static const std::regex literal("\"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\"");
  return Matches(text, literal);
}

// First column of the table's rows.
std::set<std::string> RowsOf(const std::string& text) {
  static const std::regex row("\\n\\| `([A-Z0-9_]+)` \\|");
  return Matches(text, row);
}

bool IsProductCode(const SourceFile& file) {
  const bool in_product = absl::StartsWith(file.path, "kernels/") ||
                          absl::StartsWith(file.path, "services/") ||
                          absl::StartsWith(file.path, "clients/");
  return in_product && (file.IsCpp() || absl::EndsWith(file.path, ".py")) && !file.IsTest();
}

TEST(ErrorTableTest, TableAndCodeNameTheSameReasons) {
  const auto files = ReadSourceTree(".");
  ASSERT_TRUE(files.ok()) << files.status();
  std::set<std::string> rows;
  std::map<std::string, std::string> reasons;  // to the file that says it first
  for (const SourceFile& file : *files) {
    const std::string text = absl::StrJoin(file.lines, "\n");
    if (file.path == "docs/errors.md") rows = RowsOf(text);
    if (!IsProductCode(file)) continue;
    for (const std::string& reason : ReasonsIn(text)) reasons.emplace(reason, file.path);
  }
  ASSERT_GT(rows.size(), 50u) << "docs/errors.md was not read";
  for (const auto& [reason, path] : reasons) {
    EXPECT_TRUE(rows.count(reason) + kNotReasons.count(reason) > 0)
        << path << ": reason " << reason << " is not in docs/errors.md; add a row";
  }
  for (const std::string& row : rows) {
    EXPECT_TRUE(reasons.count(row) > 0)
        << "docs/errors.md: no code gives reason " << row << "; take the row out";
  }
}

TEST(ErrorTableTest, ReasonsAndRowsAreFound) {
  EXPECT_THAT(ReasonsIn("MakeError(code, \"STORE_FULL\", \"a B_C d\"); \"lower_case\"; \"NAN\";"),
              testing::ElementsAre("STORE_FULL"));
  EXPECT_THAT(RowsOf("\n| reason | code |\n| `STORE_FULL` | X |\n| none |"),
              testing::ElementsAre("STORE_FULL"));
}

}  // namespace
}  // namespace certkv::tidy
