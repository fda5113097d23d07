// The text of one file as the checks see it, and the walk that collects them.
#ifndef CERTKV_TESTS_TIDY_SOURCE_FILE_H_
#define CERTKV_TESTS_TIDY_SOURCE_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv::tidy {

struct SourceFile {
  std::string path;                // from the repository root, with '/'
  std::vector<std::string> lines;  // as written, without line ends
  // C++ only (otherwise equal to `lines`): comments and the insides of literals are blanks, so that
  // every position is the same as in `lines`.
  std::vector<std::string> code;

  bool IsCpp() const;     // .cc, .h, .cu, .cuh
  bool IsHeader() const;  // .h, .cuh
  bool IsBuild() const;   // what decides compiler options: CMake files, presets, scripts
  bool IsTest() const;    // *_test.cc, or anything below tests/
  // tests/tidy: its samples and messages quote what the checks forbid.
  bool IsTidy() const;
  absl::string_view FileName() const;
};

// Makes a SourceFile out of a text.
SourceFile MakeSourceFile(absl::string_view path, absl::string_view text);

// Reads every text file below `root` in order of path, without build folders, hidden folders (but
// .ci), tests/data and tests/golden.
// Errors: NotFound, `root` is not the root of the repository; Internal, a file cannot be read.
absl::StatusOr<std::vector<SourceFile>> ReadSourceTree(const std::string& root);

}  // namespace certkv::tidy

#endif  // CERTKV_TESTS_TIDY_SOURCE_FILE_H_
