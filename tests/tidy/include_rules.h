// The tables "what may include what" of docs/architecture.md, and the check of files against them.
#ifndef CERTKV_TESTS_TIDY_INCLUDE_RULES_H_
#define CERTKV_TESTS_TIDY_INCLUDE_RULES_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/tidy/finding.h"
#include "tests/tidy/source_file.h"

namespace certkv::tidy {

// One row: what the files below `folder` may include.
struct FolderRule {
  std::string folder;                   // "kernels/ops"
  std::vector<std::string> folders;     // "kernels/core", or one header "kernels/cpu/cpu.h"
  std::vector<std::string> libraries;   // "Abseil"
  std::vector<std::string> wire_files;  // file name, or its beginning and '*': "service*"
};

struct IncludeTable {
  std::vector<FolderRule> folders;
  std::vector<std::pair<std::string, std::string>> library_prefixes;  // ("absl/", "Abseil")
};

// Reads both tables out of the document.
// Errors: InvalidArgument, a table is missing or empty, a row has the wrong number of columns, a
// folder stands twice, or a folder's row names a library that the second table does not have.
absl::StatusOr<IncludeTable> ParseIncludeTable(const SourceFile& document);

// Findings for every include of `file` that the table does not allow, and for a file in kernels/,
// services/ or clients/ whose folder has no row. Other files may include anything.
std::vector<Finding> CheckIncludes(const IncludeTable& table, const SourceFile& file);

}  // namespace certkv::tidy

#endif  // CERTKV_TESTS_TIDY_INCLUDE_RULES_H_
