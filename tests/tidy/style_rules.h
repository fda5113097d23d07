// Rules of docs/style.md that a line of text can break.
#ifndef CERTKV_TESTS_TIDY_STYLE_RULES_H_
#define CERTKV_TESTS_TIDY_STYLE_RULES_H_

#include <vector>

#include "tests/tidy/finding.h"
#include "tests/tidy/source_file.h"

namespace certkv::tidy {

// Headers: guard CERTKV_FOLDER_FILE_H_ around everything, no #pragma once.
std::vector<Finding> CheckHeaderGuard(const SourceFile& file);

// C++ and build files: no option or pragma that lets the compiler change floating point values.
std::vector<Finding> CheckFloatingPoint(const SourceFile& file);

// C++: no sleep outside tests, clients and the clock, no throw but one file's, no assert, no count
// called num_.
std::vector<Finding> CheckForbiddenWords(const SourceFile& file);

// C++: no macro but header guards and the three of kernels/core (and their
// helpers CERTKV_STATUS_...).
std::vector<Finding> CheckMacros(const SourceFile& file);

// All text: no path of one developer's machine, and nothing that only exists there.
std::vector<Finding> CheckMachinePaths(const SourceFile& file);

// All text: a TODO says what is missing and why.
std::vector<Finding> CheckTodos(const SourceFile& file);

// Tests: none commented out, disabled, or skipped without a reason; names say what is expected.
std::vector<Finding> CheckTests(const SourceFile& file);

// All of the above.
std::vector<Finding> CheckStyle(const SourceFile& file);

}  // namespace certkv::tidy

#endif  // CERTKV_TESTS_TIDY_STYLE_RULES_H_
