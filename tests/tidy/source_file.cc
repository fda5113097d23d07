#include "tests/tidy/source_file.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace certkv::tidy {
namespace {

namespace fs = std::filesystem;

bool IsWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Whether the quote at `position` separates digits, as in 1'000.
bool IsDigitSeparator(absl::string_view text, size_t position) {
  size_t begin = position;
  while (begin > 0 && (IsWordCharacter(text[begin - 1]) || text[begin - 1] == '\'')) --begin;
  return begin < position && std::isdigit(static_cast<unsigned char>(text[begin]));
}

void Blank(std::string* text, size_t begin, size_t end) {
  for (size_t i = begin; i < std::min(end, text->size()); ++i) {
    if ((*text)[i] != '\n') (*text)[i] = ' ';
  }
}

// End of the literal that is opened at `begin` by `quote`; the position after the closing quote.
size_t EndOfLiteral(absl::string_view text, size_t begin, char quote) {
  size_t i = begin + 1;
  while (i < text.size() && text[i] != quote && text[i] != '\n') i += text[i] == '\\' ? 2 : 1;
  return std::min(i + 1, text.size());
}

// End of the raw literal whose opening quote is at `begin`: R"delimiter( ... )delimiter".
size_t EndOfRawLiteral(absl::string_view text, size_t begin) {
  const size_t open = text.find('(', begin);
  if (open == absl::string_view::npos) return text.size();
  const std::string close = absl::StrCat(")", text.substr(begin + 1, open - begin - 1), "\"");
  const size_t end = text.find(close, open);
  return end == absl::string_view::npos ? text.size() : end + close.size();
}

std::string BlankCommentsAndLiterals(absl::string_view text) {
  std::string code(text);
  size_t i = 0;
  while (i < text.size()) {
    const absl::string_view rest = text.substr(i);
    size_t end = i + 1;
    if (absl::StartsWith(rest, "//")) {
      end = std::min(text.find('\n', i), text.size());
      Blank(&code, i, end);
    } else if (absl::StartsWith(rest, "/*")) {
      end = text.find("*/", i + 2);
      end = end == absl::string_view::npos ? text.size() : end + 2;
      Blank(&code, i, end);
    } else if (rest[0] == '"') {
      const bool raw = i > 0 && text[i - 1] == 'R' && (i < 2 || !IsWordCharacter(text[i - 2]));
      end = raw ? EndOfRawLiteral(text, i) : EndOfLiteral(text, i, '"');
      Blank(&code, i + 1, end - 1);
    } else if (rest[0] == '\'' && !IsDigitSeparator(text, i)) {
      end = EndOfLiteral(text, i, '\'');
      Blank(&code, i + 1, end - 1);
    }
    i = end;
  }
  return code;
}

std::vector<std::string> SplitLines(absl::string_view text) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

bool HasEnding(absl::string_view path, std::initializer_list<const char*> endings) {
  return std::any_of(endings.begin(), endings.end(),
                     [path](const char* ending) { return absl::EndsWith(path, ending); });
}

bool IsTextFile(absl::string_view path) {
  return path == "dev" || path == ".ci/run" ||
         HasEnding(path, {".cc", ".h", ".cu", ".cuh", ".proto", ".py", ".md", ".txt", ".cmake",
                          ".json", ".yaml", ".yml", ".sh", ".in", ".clang-tidy", ".clang-format"});
}

bool IsSkippedFolder(absl::string_view path) {
  const absl::string_view name = path.substr(path.rfind('/') + 1);
  return absl::StartsWith(path, "build") || path == "tests/data" || path == "tests/golden" ||
         name == "__pycache__" || (absl::StartsWith(name, ".") && path != ".ci");
}

}  // namespace

bool SourceFile::IsCpp() const { return HasEnding(path, {".cc", ".h", ".cu", ".cuh"}); }
bool SourceFile::IsHeader() const { return HasEnding(path, {".h", ".cuh"}); }
bool SourceFile::IsBuild() const {
  return path == "dev" || path == ".ci/run" ||
         HasEnding(path, {"CMakeLists.txt", ".cmake", "CMakePresets.json", ".sh"});
}
bool SourceFile::IsTest() const {
  return absl::EndsWith(path, "_test.cc") || absl::StartsWith(path, "tests/");
}
bool SourceFile::IsTidy() const { return absl::StartsWith(path, "tests/tidy/"); }
absl::string_view SourceFile::FileName() const {
  return absl::string_view(path).substr(path.rfind('/') + 1);
}

SourceFile MakeSourceFile(absl::string_view path, absl::string_view text) {
  SourceFile file;
  file.path = std::string(path);
  file.lines = SplitLines(text);
  file.code = file.IsCpp() ? SplitLines(BlankCommentsAndLiterals(text)) : file.lines;
  return file;
}

absl::StatusOr<std::vector<SourceFile>> ReadSourceTree(const std::string& root) {
  if (!fs::exists(fs::path(root) / "CMakePresets.json")) {
    return absl::NotFoundError(absl::StrCat(fs::absolute(root).string(),
                                            " has no CMakePresets.json; run the test from the "
                                            "root of the repository"));
  }
  std::vector<SourceFile> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(root, error), end; !error && it != end;
       it.increment(error)) {
    const std::string path = fs::path(it->path()).lexically_relative(root).generic_string();
    if (it->is_directory()) {
      if (IsSkippedFolder(path)) it.disable_recursion_pending();
      continue;
    }
    if (!it->is_regular_file() || !IsTextFile(path)) continue;
    std::ifstream stream(it->path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) return absl::InternalError(absl::StrCat("cannot read ", path));
    files.push_back(MakeSourceFile(path, text));
  }
  if (error) return absl::InternalError(absl::StrCat("cannot list ", root, ": ", error.message()));
  std::sort(files.begin(), files.end(),
            [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
  return files;
}

}  // namespace certkv::tidy
