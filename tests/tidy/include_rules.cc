#include "tests/tidy/include_rules.h"

#include <algorithm>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace certkv::tidy {
namespace {

constexpr char kFolderHeader[] =
    "| folder | may include folders | may include libraries | wire code in |";
constexpr char kLibraryHeader[] = "| library | its headers begin with |";
constexpr char kDocument[] = "docs/architecture.md, section 7";

struct Include {
  int line;
  std::string target;
  bool quoted;
};

// The rows below `header` and its rule, each split into trimmed cells; empty when not found.
std::vector<std::vector<std::string>> ReadRows(const SourceFile& document,
                                               absl::string_view header) {
  std::vector<std::vector<std::string>> rows;
  auto line = std::find(document.lines.begin(), document.lines.end(), header);
  if (line == document.lines.end()) return rows;
  for (line += 1; line != document.lines.end() && absl::StartsWith(*line, "|"); ++line) {
    if (absl::StartsWith(*line, "|---")) continue;
    const absl::string_view inside =
        absl::StripSuffix(absl::StripPrefix(absl::StripAsciiWhitespace(*line), "|"), "|");
    std::vector<std::string> cells = absl::StrSplit(inside, '|');
    for (std::string& cell : cells) absl::StripAsciiWhitespace(&cell);
    rows.push_back(std::move(cells));
  }
  return rows;
}

// "`a`, `b`" -> {"a", "b"}.
std::vector<std::string> SplitCell(absl::string_view cell) {
  std::vector<std::string> items;
  for (absl::string_view item : absl::StrSplit(cell, ',', absl::SkipWhitespace())) {
    item = absl::StripAsciiWhitespace(item);
    items.emplace_back(absl::StripSuffix(absl::StripPrefix(item, "`"), "`"));
  }
  return items;
}

bool Contains(const std::vector<std::string>& list, absl::string_view item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

bool IsBelow(absl::string_view path, absl::string_view folder) {
  return absl::StartsWith(path, absl::StrCat(folder, "/"));
}

const FolderRule* FindRule(const IncludeTable& table, absl::string_view path) {
  const FolderRule* best = nullptr;
  for (const FolderRule& rule : table.folders) {
    if (IsBelow(path, rule.folder) && (!best || rule.folder.size() > best->folder.size())) {
      best = &rule;
    }
  }
  return best;
}

std::vector<Include> ListIncludes(const SourceFile& file) {
  std::vector<Include> includes;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    absl::string_view line = absl::StripLeadingAsciiWhitespace(file.lines[i]);
    if (!absl::ConsumePrefix(&line, "#")) continue;
    line = absl::StripLeadingAsciiWhitespace(line);
    if (!absl::ConsumePrefix(&line, "include")) continue;
    line = absl::StripLeadingAsciiWhitespace(line);
    if (line.empty() || (line[0] != '"' && line[0] != '<')) continue;
    const bool quoted = line[0] == '"';
    const size_t end = line.find(quoted ? '"' : '>', 1);
    if (end == absl::string_view::npos) continue;
    includes.push_back({static_cast<int>(i) + 1, std::string(line.substr(1, end - 1)), quoted});
  }
  return includes;
}

// The library whose prefix is the longest one that `target` begins with; empty when there is none.
std::string FindLibrary(const IncludeTable& table, absl::string_view target) {
  std::string library;
  size_t longest = 0;
  for (const auto& [prefix, name] : table.library_prefixes) {
    if (absl::StartsWith(target, prefix) && prefix.size() > longest) {
      library = name;
      longest = prefix.size();
    }
  }
  return library;
}

bool IsOurFolder(absl::string_view target) {
  for (const char* folder : {"kernels", "services", "clients", "proto", "tests", "bench"}) {
    if (IsBelow(target, folder)) return true;
  }
  return false;
}

// <vector>, <sys/mman.h>: no folder, or one of the operating system's.
bool IsSystemHeader(absl::string_view target) {
  if (!absl::StrContains(target, "/")) return true;
  for (const char* folder : {"sys", "linux", "netinet", "arpa", "net", "asm", "experimental"}) {
    if (IsBelow(target, folder)) return true;
  }
  return false;
}

bool MayHoldWireCode(const FolderRule& rule, const SourceFile& file) {
  for (absl::string_view pattern : rule.wire_files) {
    if (absl::ConsumeSuffix(&pattern, "*") ? absl::StartsWith(file.FileName(), pattern)
                                           : file.FileName() == pattern) {
      return true;
    }
  }
  return false;
}

bool MayIncludeFolder(const FolderRule& rule, const SourceFile& file, absl::string_view target) {
  if (IsBelow(target, rule.folder)) return true;
  if (file.IsTest() && IsBelow(target, "tests/support")) return true;
  return std::any_of(
      rule.folders.begin(), rule.folders.end(), [target](const std::string& allowed) {
        return absl::EndsWith(allowed, ".h") ? target == allowed : IsBelow(target, allowed);
      });
}

// Why `include` is not allowed, and the remedy; an empty message when it is.
Finding CheckInclude(const IncludeTable& table, const FolderRule& rule, const SourceFile& file,
                     const Include& include) {
  const bool generated = absl::EndsWith(include.target, ".pb.h");
  const std::string library = generated ? "Protobuf" : FindLibrary(table, include.target);
  Finding finding{file.path, include.line, "", ""};
  if (absl::StartsWith(include.target, "absl/log/") ||
      absl::StartsWith(include.target, "absl/check")) {
    finding.message = absl::StrCat(include.target, " does not exist in Debian 12's Abseil");
    finding.remedy = "use CERTKV_CHECK of kernels/core/check.h, or return a Status";
  } else if ((library == "gRPC" || library == "Protobuf") && !MayHoldWireCode(rule, file)) {
    finding.message = absl::StrCat(file.FileName(), " includes wire code (", include.target, ")");
    finding.remedy = absl::StrCat(
        "convert to core types in a file that the column 'wire code in' "
        "of ",
        rule.folder, " names (", kDocument, ")");
  } else if (generated || IsOurFolder(include.target)) {
    const std::string path = generated ? absl::StrCat("proto/", include.target) : include.target;
    if (MayIncludeFolder(rule, file, path)) return finding;
    finding.message = absl::StrCat(rule.folder, " may not include ", path);
    finding.remedy =
        absl::StrCat("move the code, or pass what it needs in; the rule is the row of ",
                     rule.folder, " in ", kDocument);
  } else if (!library.empty()) {
    if (Contains(rule.libraries, library) || (file.IsTest() && library == "GoogleTest")) {
      return finding;
    }
    finding.message =
        absl::StrCat(rule.folder, " may not use ", library, " (", include.target, ")");
    finding.remedy = absl::StrCat("move the code to a folder that may, or add ", library,
                                  " to the row of ", rule.folder, " in ", kDocument);
  } else if (include.quoted) {
    finding.message = absl::StrCat("\"", include.target, "\" does not begin at the root");
    finding.remedy = "write the path from the repository root, as in \"kernels/core/ids.h\"";
  } else if (!IsSystemHeader(include.target)) {
    finding.message = absl::StrCat("<", include.target, "> belongs to an unknown library");
    finding.remedy = absl::StrCat("add it to the table of libraries in ", kDocument);
  }
  return finding;
}

absl::Status CheckTable(const IncludeTable& table) {
  if (table.folders.empty() || table.library_prefixes.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        kDocument, ": no rows below '", table.folders.empty() ? kFolderHeader : kLibraryHeader,
        "'; keep the header line as it is, the check looks for it"));
  }
  for (const FolderRule& rule : table.folders) {
    const auto same_folder = [&rule](const FolderRule& other) {
      return other.folder == rule.folder;
    };
    if (std::count_if(table.folders.begin(), table.folders.end(), same_folder) != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(kDocument, ": ", rule.folder, " has two rows; keep one"));
    }
    for (const std::string& library : rule.libraries) {
      const auto same_name = [&library](const auto& entry) { return entry.second == library; };
      if (std::none_of(table.library_prefixes.begin(), table.library_prefixes.end(), same_name)) {
        return absl::InvalidArgumentError(
            absl::StrCat(kDocument, ": the row of ", rule.folder, " names the library '", library,
                         "', which is not in the table of libraries; add it there"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<IncludeTable> ParseIncludeTable(const SourceFile& document) {
  IncludeTable table;
  for (const std::vector<std::string>& cells : ReadRows(document, kFolderHeader)) {
    if (cells.size() != 4) {
      return absl::InvalidArgumentError(absl::StrCat(kDocument, ": the row of ", cells[0], " has ",
                                                     cells.size(), " columns, must be 4"));
    }
    const std::vector<std::string> folder = SplitCell(cells[0]);
    if (folder.size() != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(kDocument, ": the row '", cells[0], "' must name one folder"));
    }
    table.folders.push_back(
        {folder[0], SplitCell(cells[1]), SplitCell(cells[2]), SplitCell(cells[3])});
  }
  for (const std::vector<std::string>& cells : ReadRows(document, kLibraryHeader)) {
    if (cells.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat(kDocument, ": the row of ", cells[0], " has ",
                                                     cells.size(), " columns, must be 2"));
    }
    for (std::string& prefix : SplitCell(cells[1])) {
      table.library_prefixes.emplace_back(std::move(prefix), cells[0]);
    }
  }
  absl::Status status = CheckTable(table);
  if (!status.ok()) return status;
  return table;
}

std::vector<Finding> CheckIncludes(const IncludeTable& table, const SourceFile& file) {
  std::vector<Finding> findings;
  if (!file.IsCpp()) return findings;
  if (!IsBelow(file.path, "kernels") && !IsBelow(file.path, "services") &&
      !IsBelow(file.path, "clients")) {
    return findings;
  }
  const FolderRule* rule = FindRule(table, file.path);
  if (rule == nullptr) {
    findings.push_back({file.path, 0, "its folder has no row in the include table",
                        absl::StrCat("add one in ", kDocument)});
    return findings;
  }
  for (const Include& include : ListIncludes(file)) {
    Finding finding = CheckInclude(table, *rule, file, include);
    if (!finding.message.empty()) findings.push_back(std::move(finding));
  }
  return findings;
}

}  // namespace certkv::tidy
