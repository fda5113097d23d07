#include "tests/tidy/exception_list.h"

#include <cstddef>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/tidy/function_length.h"

namespace certkv::tidy {
namespace {

constexpr char kListPath[] = "tests/tidy/exceptions.txt";

struct Length {
  std::string key;
  std::string what;  // "the file" or "function Name"
  std::string path;
  int line;
  int line_count;
  int line_count_max;
};

std::vector<Length> ListLengths(const SourceFile& file) {
  std::vector<Length> lengths;
  if (!file.IsCpp() && !absl::EndsWith(file.path, ".proto") && file.path != "dev") return lengths;
  lengths.push_back(
      {file.path, "the file", file.path, 0, static_cast<int>(file.lines.size()), kFileLinesMax});
  if (!file.IsCpp()) return lengths;
  for (const FunctionLength& function : ListFunctions(file)) {
    lengths.push_back({absl::StrCat(file.path, " ", function.name),
                       absl::StrCat("function ", function.name), file.path, function.line,
                       function.line_count, kFunctionLinesMax});
  }
  return lengths;
}

}  // namespace

absl::StatusOr<ExceptionList> ParseExceptionList(const SourceFile& file) {
  ExceptionList list;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const absl::string_view line = absl::StripAsciiWhitespace(file.lines[i]);
    if (line.empty() || line[0] == '#') continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    const bool is_file = words.size() == 3 && words[0] == "file";
    const bool is_function = words.size() == 4 && words[0] == "function";
    int line_count = 0;
    if ((!is_file && !is_function) || !absl::SimpleAtoi(words.back(), &line_count)) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.path, ":", i + 1, ": '", line,
          "' must be 'file PATH LINES' or 'function PATH NAME LINES'; repair the line"));
    }
    const std::string key = is_file ? words[1] : absl::StrCat(words[1], " ", words[2]);
    if (!list.emplace(key, line_count).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path, ":", i + 1, ": '", key, "' stands twice; delete one"));
    }
  }
  return list;
}

std::vector<Finding> CheckLengths(const ExceptionList& exceptions,
                                  const std::vector<SourceFile>& files) {
  std::vector<Finding> findings;
  absl::flat_hash_set<std::string> used;
  for (const SourceFile& file : files) {
    for (const Length& length : ListLengths(file)) {
      if (length.line_count <= length.line_count_max) continue;
      const auto exception = exceptions.find(length.key);
      if (exception == exceptions.end()) {
        findings.push_back({length.path, length.line,
                            absl::StrCat(length.what, " has ", length.line_count,
                                         " lines, at most ", length.line_count_max, " are allowed"),
                            "split it at an idea of its own"});
        continue;
      }
      used.insert(length.key);
      if (exception->second != length.line_count) {
        const bool shrank = length.line_count < exception->second;
        findings.push_back({length.path, length.line,
                            absl::StrCat(length.what, " has ", length.line_count, " lines, ",
                                         kListPath, " excepts ", exception->second),
                            shrank ? "lower the number there" : "make it shorter, not longer"});
      }
    }
  }
  for (const auto& [key, line_count] : exceptions) {
    if (used.contains(key)) continue;
    findings.push_back(
        {kListPath, 0, absl::StrCat("the exception for '", key, "' is not needed"), "delete it"});
  }
  return findings;
}

}  // namespace certkv::tidy
