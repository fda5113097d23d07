// What a check of the source tree found, and how to repair it.
#ifndef CERTKV_TESTS_TIDY_FINDING_H_
#define CERTKV_TESTS_TIDY_FINDING_H_

#include <string>
#include <vector>

namespace certkv::tidy {

struct Finding {
  std::string path;  // from the repository root
  int line = 0;      // counted from 1; 0 when the whole file is meant
  std::string message;
  std::string remedy;
};

// One line per finding: "path:line: message; remedy".
std::string FormatFindings(const std::vector<Finding>& findings);

}  // namespace certkv::tidy

#endif  // CERTKV_TESTS_TIDY_FINDING_H_
