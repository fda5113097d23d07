#include "tests/tidy/style_rules.h"

#include <cctype>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace certkv::tidy {
namespace {

// Carries errors to Python, whose bindings want exceptions.
constexpr char kThrowingFile[] = "clients/python/native/status_error.cc";

// CUDA's words for a compiler without CUDA, and the annotations of functions that run on both.
constexpr const char* kMacroFiles[] = {"kernels/core/host_device.h", "kernels/cuda/device.h",
                                       "kernels/cuda/on_cpu/cuda_language.h"};

bool IsWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Position of `word` in `line` with no letter, digit or underscore at its sides; npos without.
// With `open_end`, only its beginning counts.
size_t FindWord(absl::string_view line, absl::string_view word, bool open_end = false) {
  for (size_t at = line.find(word); at != absl::string_view::npos; at = line.find(word, at + 1)) {
    const size_t end = at + word.size();
    const bool begins = at == 0 || !IsWordCharacter(line[at - 1]);
    const bool ends = open_end || end == line.size() || !IsWordCharacter(line[end]);
    if (begins && ends) return at;
  }
  return absl::string_view::npos;
}

bool HasWord(absl::string_view line, absl::string_view word) {
  return FindWord(line, word) != absl::string_view::npos;
}

// Whether `line` calls `name`: the word, then an opening parenthesis.
bool HasCall(absl::string_view line, absl::string_view name) {
  const size_t at = FindWord(line, name);
  return at != absl::string_view::npos &&
         absl::StartsWith(absl::StripLeadingAsciiWhitespace(line.substr(at + name.size())), "(");
}

// "#  define A" -> "define A"; empty when the line is not a directive.
absl::string_view Directive(absl::string_view line) {
  line = absl::StripAsciiWhitespace(line);
  return absl::ConsumePrefix(&line, "#") ? absl::StripLeadingAsciiWhitespace(line)
                                         : absl::string_view();
}

std::string ExpectedGuard(absl::string_view path) {
  std::string guard = "CERTKV_";
  for (char c : path) guard += IsWordCharacter(c) ? absl::ascii_toupper(c) : '_';
  return guard + "_";
}

using LineTest = std::function<std::string(absl::string_view line)>;  // message; empty = fine

std::vector<Finding> CheckLines(const SourceFile& file, const std::vector<std::string>& lines,
                                absl::string_view remedy, const LineTest& test) {
  std::vector<Finding> findings;
  for (size_t i = 0; i < lines.size(); ++i) {
    std::string message = test(lines[i]);
    if (message.empty()) continue;
    findings.push_back(
        {file.path, static_cast<int>(i) + 1, std::move(message), std::string(remedy)});
  }
  return findings;
}

void Append(std::vector<Finding> more, std::vector<Finding>* findings) {
  for (Finding& finding : more) findings->push_back(std::move(finding));
}

// The two arguments of TEST(a, b) and its kin when the line opens one and has both.
std::vector<std::string> TestArguments(absl::string_view line) {
  if (!absl::ConsumePrefix(&line, "TEST") && !absl::ConsumePrefix(&line, "TYPED_TEST")) return {};
  if (!absl::ConsumePrefix(&line, "_F")) absl::ConsumePrefix(&line, "_P");
  if (!absl::ConsumePrefix(&line, "(")) return {};
  const size_t close = line.find(')');
  if (close == absl::string_view::npos) return {};
  std::vector<std::string> arguments = absl::StrSplit(line.substr(0, close), ',');
  for (std::string& argument : arguments) absl::StripAsciiWhitespace(&argument);
  return arguments;
}

// Whether the camel-case `name` holds `word`: "ItWorksNow" has "Works", "WorkspaceIsClean" has not.
bool HasCamelWord(absl::string_view name, absl::string_view word) {
  for (size_t at = name.find(word); at != absl::string_view::npos; at = name.find(word, at + 1)) {
    const size_t end = at + word.size();
    if (end == name.size() || !absl::ascii_islower(name[end])) return true;
  }
  return false;
}

std::string CheckTestName(absl::string_view line) {
  const std::vector<std::string> arguments = TestArguments(line);
  if (arguments.size() != 2) return "";
  if (absl::StrContains(line, "DISABLED_")) return "the test is disabled";
  if (!absl::EndsWith(arguments[0], "Test")) {
    return absl::StrCat("the suite ", arguments[0], " does not end in Test");
  }
  if (HasCamelWord(arguments[1], "Works")) {
    return absl::StrCat("the name ", arguments[1], " does not say what is expected");
  }
  return "";
}

std::string CheckCommentedTest(absl::string_view line) {
  if (absl::StartsWith(Directive(line), "if 0")) return "code is taken out of the build";
  absl::string_view comment = absl::StripLeadingAsciiWhitespace(line);
  if (!absl::ConsumePrefix(&comment, "//")) return "";
  comment = absl::StripLeadingAsciiWhitespace(comment);
  for (const char* macro : {"TEST(", "TEST_F(", "TEST_P(", "TYPED_TEST(", "INSTANTIATE_TEST"}) {
    if (absl::StartsWith(comment, macro)) return "a test is commented out";
  }
  return "";
}

std::string CheckCommentedBuildLine(absl::string_view line) {
  if (!absl::ConsumePrefix(&line, "#")) return "";
  line = absl::StripLeadingAsciiWhitespace(line);
  for (const char* command : {"certkv_test(", "add_test(", "add_subdirectory("}) {
    if (absl::StartsWith(line, command)) return "a test or folder is commented out of the build";
  }
  return "";
}

}  // namespace

std::vector<Finding> CheckHeaderGuard(const SourceFile& file) {
  if (!file.IsHeader()) return {};
  const std::string guard = ExpectedGuard(file.path);
  std::vector<std::pair<int, absl::string_view>> directives;  // (line, text)
  for (size_t i = 0; i < file.code.size(); ++i) {
    const absl::string_view directive = Directive(file.code[i]);
    if (!directive.empty()) directives.emplace_back(static_cast<int>(i) + 1, directive);
  }
  const std::string remedy = absl::StrCat("begin with '#ifndef ", guard, "' and '#define ", guard,
                                          "', end with '#endif  // ", guard, "'");
  if (directives.size() < 3 || directives[0].second != absl::StrCat("ifndef ", guard)) {
    const int line = directives.empty() ? 0 : directives[0].first;
    return {{file.path, line, "the header has no guard named after its path", remedy}};
  }
  if (directives[1].second != absl::StrCat("define ", guard)) {
    return {{file.path, directives[1].first, "the guard is not defined after its #ifndef", remedy}};
  }
  const int last_line = static_cast<int>(file.lines.size());
  if (directives.back().first != last_line ||
      file.lines.back() != absl::StrCat("#endif  // ", guard)) {
    return {{file.path, last_line, "the guard does not close on the last line", remedy}};
  }
  return {};
}

std::vector<Finding> CheckFloatingPoint(const SourceFile& file) {
  if ((!file.IsCpp() && !file.IsBuild()) || file.IsTidy()) return {};
  return CheckLines(
      file, file.lines, "remove it: the bounds hold for the roundings that the source states",
      [](absl::string_view line) -> std::string {
        for (const char* option :
             {"fast-math", "-Ofast", "unsafe-math", "finite-math-only", "associative-math",
              "reciprocal-math", "no-signed-zeros", "fp-contract=fast", "GCC optimize",
              "float_control", "fp reassociate"}) {
          if (absl::StrContains(line, option)) {
            return absl::StrCat("'", option, "' lets the compiler change values");
          }
        }
        return "";
      });
}

std::vector<Finding> CheckForbiddenWords(const SourceFile& file) {
  std::vector<Finding> findings;
  if (!file.IsCpp()) return findings;
  if (!file.IsTest() && !absl::StartsWith(file.FileName(), "clock") &&
      !absl::StartsWith(file.path, "clients/")) {
    Append(CheckLines(file, file.code, "wait on a condition, or take time from the Clock passed in",
                      [](absl::string_view line) -> std::string {
                        for (const char* name : {"sleep", "usleep", "nanosleep", "SleepFor",
                                                 "sleep_for", "sleep_until", "clock_nanosleep"}) {
                          if (HasCall(line, name)) return absl::StrCat(name, " outside the clock");
                        }
                        return "";
                      }),
           &findings);
  }
  Append(CheckLines(file, file.code, "return an absl::Status",
                    [&file](absl::string_view line) {
                      const bool may = file.path == kThrowingFile;
                      return HasWord(line, "throw") && !may ? "an exception is thrown" : "";
                    }),
         &findings);
  Append(CheckLines(file, file.code, "use CERTKV_CHECK, which stays on in release",
                    [](absl::string_view line) {
                      return HasCall(line, "assert") ? "assert is off in release" : "";
                    }),
         &findings);
  Append(CheckLines(file, file.code, "call a number of things x_count, a size x_bytes",
                    [](absl::string_view line) {
                      const bool found =
                          FindWord(line, "num_", /*open_end=*/true) != absl::string_view::npos;
                      return found ? "a name begins with num_" : "";
                    }),
         &findings);
  return findings;
}

std::vector<Finding> CheckMacros(const SourceFile& file) {
  if (!file.IsCpp()) return {};
  for (const char* path : kMacroFiles) {
    if (file.path == path) return {};
  }
  const std::string guard = ExpectedGuard(file.path);
  return CheckLines(file, file.code, "use a function, a constant or a template",
                    [&guard](absl::string_view line) -> std::string {
                      absl::string_view directive = Directive(line);
                      if (!absl::ConsumePrefix(&directive, "define ")) return "";
                      const std::vector<std::string> words =
                          absl::StrSplit(directive, absl::ByAnyChar(" ("), absl::SkipEmpty());
                      if (words.empty() || words[0] == guard || words[0] == "_GNU_SOURCE")
                        return "";
                      for (const char* allowed : {"CERTKV_CHECK", "CERTKV_RETURN_IF_ERROR",
                                                  "CERTKV_ASSIGN_OR_RETURN", "CERTKV_STATUS_"}) {
                        if (absl::StartsWith(words[0], allowed)) return "";
                      }
                      return absl::StrCat("macro ", words[0]);
                    });
}

std::vector<Finding> CheckMachinePaths(const SourceFile& file) {
  if (file.IsTidy()) return {};
  return CheckLines(
      file, file.lines, "say it in the project's own words, with paths from the repository root",
      [](absl::string_view line) -> std::string {
        for (const char* path : {"/work", "/root/", "/home/"}) {
          const size_t at = line.find(path);
          if (at == absl::string_view::npos) continue;
          const size_t end = at + std::string(path).size();
          const bool begins = at == 0 || !(IsWordCharacter(line[at - 1]) ||
                                           absl::StrContains(".~-}*/>)", line.substr(at - 1, 1)));
          const bool ends = line[end - 1] == '/' || end == line.size() ||
                            !(IsWordCharacter(line[end]) || line[end] == '-');
          if (begins && ends) return absl::StrCat("'", path, "' is a path of one machine");
        }
        for (const char* folder : {"shared/design", "shared/style", "shared/golden",
                                   "shared/traces", "shared/examples", "shared/hooks"}) {
          if (absl::StrContains(line, folder)) {
            return absl::StrCat("'", folder, "' is not in the repository");
          }
        }
        return "";
      });
}

std::vector<Finding> CheckTodos(const SourceFile& file) {
  if (file.IsTidy()) return {};
  return CheckLines(
      file, file.lines, "write 'TODO: what is missing, and what it waits for', or do it now",
      [](absl::string_view line) -> std::string {
        for (const char* mark : {"FIXME", "XXX", "HACK"}) {
          if (HasCall(line, mark) || absl::StrContains(line, absl::StrCat(mark, ":"))) {
            return absl::StrCat(mark, " instead of a TODO");
          }
        }
        const size_t at = FindWord(line, "TODO");
        if (at == absl::string_view::npos) return "";
        const absl::string_view rest = line.substr(at);
        const size_t colon = rest.find(':');
        constexpr size_t kExplanationCharactersMin = 20;
        const bool explained =
            colon != absl::string_view::npos &&
            absl::StripAsciiWhitespace(rest.substr(colon + 1)).size() >= kExplanationCharactersMin;
        return explained ? "" : "a TODO without an explanation";
      });
}

std::vector<Finding> CheckTests(const SourceFile& file) {
  std::vector<Finding> findings;
  if (file.FileName() == "CMakeLists.txt") {
    return CheckLines(file, file.lines, "build it, or delete it", CheckCommentedBuildLine);
  }
  if (!file.IsCpp()) return findings;
  Append(CheckLines(file, file.code, "name it SubjectTest.BehaviourUnderCondition, and let it run",
                    CheckTestName),
         &findings);
  Append(CheckLines(file, file.code, "say what the test needs: GTEST_SKIP() << \"needs AVX-512\"",
                    [](absl::string_view line) {
                      return absl::StrContains(line, "GTEST_SKIP();") ? "a skip without a reason"
                                                                      : "";
                    }),
         &findings);
  if (!file.IsTidy()) {
    Append(CheckLines(file, file.lines, "let it run, or delete it", CheckCommentedTest), &findings);
  }
  return findings;
}

std::vector<Finding> CheckStyle(const SourceFile& file) {
  std::vector<Finding> findings;
  for (auto* check : {CheckHeaderGuard, CheckFloatingPoint, CheckForbiddenWords, CheckMacros,
                      CheckMachinePaths, CheckTodos, CheckTests}) {
    Append(check(file), &findings);
  }
  return findings;
}

}  // namespace certkv::tidy
