#include "tests/tidy/finding.h"

#include "absl/strings/str_cat.h"

namespace certkv::tidy {

std::string FormatFindings(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    absl::StrAppend(&text, finding.path, ":", finding.line, ": ", finding.message, "; ",
                    finding.remedy, "\n");
  }
  return text;
}

}  // namespace certkv::tidy
