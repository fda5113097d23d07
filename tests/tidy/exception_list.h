// Files and functions that are longer than the style allows, and are known to be.
//
// tests/tidy/exceptions.txt has one line for each: "file PATH LINES" or "function PATH NAME LINES".
// An entry holds its lines exactly: growing past it is a finding, and so is shrinking without
// lowering it, so the list only ever gets smaller.
#ifndef CERTKV_TESTS_TIDY_EXCEPTION_LIST_H_
#define CERTKV_TESTS_TIDY_EXCEPTION_LIST_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tests/tidy/finding.h"
#include "tests/tidy/source_file.h"

namespace certkv::tidy {

inline constexpr int kFileLinesMax = 499;
inline constexpr int kFunctionLinesMax = 69;

// Key "PATH" or "PATH NAME" -> its lines.
using ExceptionList = absl::flat_hash_map<std::string, int>;

// Errors: InvalidArgument, a line that is not of the two forms, or a key that stands twice.
absl::StatusOr<ExceptionList> ParseExceptionList(const SourceFile& file);

// Findings for files and functions over the limit and not excepted, and for entries that no longer
// match what they except.
std::vector<Finding> CheckLengths(const ExceptionList& exceptions,
                                  const std::vector<SourceFile>& files);

}  // namespace certkv::tidy

#endif  // CERTKV_TESTS_TIDY_EXCEPTION_LIST_H_
