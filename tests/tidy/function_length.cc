#include "tests/tidy/function_length.h"

#include <cctype>
#include <cstddef>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace certkv::tidy {
namespace {

enum class BraceKind { kScope, kFunction, kOther };  // kScope: a namespace or a type

struct Brace {
  BraceKind kind;
  std::string head;  // the statement before the brace
  int head_line;     // of the first character of `head`
};

// Code without preprocessor lines, with the same line numbers.
std::string JoinCode(const SourceFile& file) {
  std::string code;
  bool continues = false;
  for (const std::string& line : file.code) {
    const bool directive =
        continues || absl::StartsWith(absl::StripLeadingAsciiWhitespace(line), "#");
    continues = directive && absl::EndsWith(line, "\\");
    absl::StrAppend(&code, directive ? "" : line, "\n");
  }
  return code;
}

BraceKind Classify(absl::string_view head, bool at_scope) {
  if (!at_scope) return BraceKind::kOther;
  // A ")" alone is the rest of a statement that was cut at an initializer's brace.
  if (absl::StrContains(head, "(") && absl::StrContains(head, ")")) return BraceKind::kFunction;
  for (absl::string_view word :
       absl::StrSplit(head, absl::ByAnyChar(" \n\t<>"), absl::SkipEmpty())) {
    for (const char* scope : {"namespace", "class", "struct", "union", "extern"}) {
      if (word == scope) return BraceKind::kScope;
    }
  }
  return BraceKind::kOther;
}

std::string FunctionName(absl::string_view head) {
  const size_t open = head.find('(');
  size_t begin = open;
  while (begin > 0) {
    const char c = head[begin - 1];
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_' && c != ':' && c != '~') break;
    --begin;
  }
  const std::string name(head.substr(begin, open - begin));
  if (!absl::StartsWith(name, "TEST") && !absl::StartsWith(name, "TYPED_TEST")) return name;
  std::vector<std::string> arguments =
      absl::StrSplit(head.substr(open + 1, head.find(')', open) - open - 1), ',');
  for (std::string& argument : arguments) absl::StripAsciiWhitespace(&argument);
  return absl::StrCat(name, ":", absl::StrJoin(arguments, "."));
}

// Follows the braces of one file.
class BraceReader {
 public:
  explicit BraceReader(std::string code) : code_(std::move(code)) {}

  std::vector<FunctionLength> Read() {
    for (position_ = 0; position_ < code_.size(); ++position_) {
      const char c = code_[position_];
      if (c == '{') {
        Open();
      } else if (c == '}') {
        Close();
      } else if (c == ';' && parenthesis_depth_ == 0) {
        head_.clear();
      } else {
        if (c == '(') ++parenthesis_depth_;
        if (c == ')') --parenthesis_depth_;
        if (c == '\n') ++line_;
        Extend(c);
      }
    }
    return std::move(functions_);
  }

 private:
  void Extend(char c) {
    if (head_.empty()) {
      if (std::isspace(static_cast<unsigned char>(c))) return;
      head_line_ = line_;
    }
    head_ += c;
    // A label of a class is not part of the declaration after it.
    for (const char* label : {"public:", "private:", "protected:"}) {
      if (head_ == label) head_.clear();
    }
  }

  void Open() {
    const bool at_scope = braces_.empty() || braces_.back().kind == BraceKind::kScope;
    const BraceKind kind = Classify(head_, at_scope);
    braces_.push_back({kind, std::move(head_), head_line_});
    head_.clear();
  }

  void Close() {
    head_.clear();
    if (braces_.empty()) return;
    Brace brace = std::move(braces_.back());
    braces_.pop_back();
    // A member initialized with braces (": count_{1}, size_{2} {") or a default argument does not
    // end the declaration.
    size_t next = position_ + 1;
    while (next < code_.size() && std::isspace(static_cast<unsigned char>(code_[next]))) ++next;
    const bool declaration_goes_on =
        next < code_.size() && absl::StrContains(",{)", code_.substr(next, 1));
    if (brace.kind != BraceKind::kScope && declaration_goes_on) {
      head_ = std::move(brace.head);
      head_line_ = brace.head_line;
      return;
    }
    if (brace.kind == BraceKind::kFunction) {
      functions_.push_back(
          {FunctionName(brace.head), brace.head_line, line_ - brace.head_line + 1});
    }
  }

  const std::string code_;
  size_t position_ = 0;
  int line_ = 1;
  int parenthesis_depth_ = 0;
  std::string head_;  // the statement so far
  int head_line_ = 1;
  std::vector<Brace> braces_;
  std::vector<FunctionLength> functions_;
};

}  // namespace

std::vector<FunctionLength> ListFunctions(const SourceFile& file) {
  return BraceReader(JoinCode(file)).Read();
}

}  // namespace certkv::tidy
