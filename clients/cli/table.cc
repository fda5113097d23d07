#include "clients/cli/table.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/core/check.h"

namespace certkv::cli {
namespace {

// Characters of a UTF-8 string (none of ours is wider than one cell).
int64_t DisplayWidth(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
}

std::string Repeat(const char* text, int64_t count) {
  std::string result;
  for (int64_t i = 0; i < count; ++i) result += text;
  return result;
}

}  // namespace

void Table::AddColumn(std::string title, Align align) {
  titles_.push_back(std::move(title));
  aligns_.push_back(align);
}

void Table::AddRow(std::vector<std::string> cells) {
  CERTKV_CHECK(cells.size() == titles_.size(), "a row has as many cells as there are columns");
  rows_.push_back(std::move(cells));
}

std::string Table::Render() const {
  std::vector<int64_t> widths(titles_.size());
  std::vector<std::vector<std::string>> title_lines(1);  // the last one lies on the rule
  for (size_t i = 0; i < titles_.size(); ++i) {
    const std::vector<std::string> lines = absl::StrSplit(titles_[i], '\n');
    while (title_lines.size() < lines.size()) title_lines.insert(title_lines.begin(), {{}});
    for (auto& cells : title_lines) cells.resize(titles_.size());
    for (size_t k = 0; k < lines.size(); ++k) {
      title_lines[title_lines.size() - lines.size() + k][i] = lines[k];
      widths[i] = std::max(widths[i], DisplayWidth(lines[k]));
    }
  }
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], DisplayWidth(row[i]));
  }
  std::string text;
  const auto add_line = [&](const std::vector<std::string>& cells) {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i) {
      const std::string padding(widths[i] - DisplayWidth(cells[i]), ' ');
      absl::StrAppend(&line, i == 0 ? "" : "  ", aligns_[i] == Align::kRight ? padding : "",
                      cells[i], aligns_[i] == Align::kLeft ? padding : "");
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  };
  for (const auto& cells : title_lines) add_line(cells);
  for (size_t i = 0; i < widths.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : "  ", Repeat("─", widths[i]));
  }
  text += "\n";
  for (const auto& row : rows_) add_line(row);
  return text;
}

std::string FormatCount(int64_t count) {
  const std::string digits = absl::StrCat(std::abs(count));
  std::string text = count < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text.push_back(',');
    text.push_back(digits[i]);
  }
  return text;
}

std::string FormatBytes(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, units[unit]);
}

std::string FormatBound(double bound) {
  if (std::isnan(bound)) return "nan";
  if (std::isinf(bound)) return "inf";
  return bound == 0 ? "0" : absl::StrFormat("%.3g", bound);
}

std::string FormatNanoseconds(double nanoseconds) {
  if (nanoseconds < 1e3) return absl::StrFormat("%.0f ns", nanoseconds);
  if (nanoseconds < 1e6) return absl::StrFormat("%.1f us", nanoseconds / 1e3);
  if (nanoseconds < 1e9) return absl::StrFormat("%.1f ms", nanoseconds / 1e6);
  return absl::StrFormat("%.1f s", nanoseconds / 1e9);
}

std::string FormatPercent(double share) { return absl::StrFormat("%.1f %%", share * 100); }

std::string FormatAge(int64_t milliseconds) {
  return FormatNanoseconds(static_cast<double>(std::max<int64_t>(milliseconds, 0)) * 1e6);
}

std::string Bar(double share, int width) {
  const char* const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  if (!(share > 0)) return "";
  const auto filled = static_cast<int>(std::lround(std::min(share, 1.0) * width * 8));
  const std::string bar = Repeat("█", filled / 8) + eighths[filled % 8];
  return bar.empty() ? "▏" : bar;
}

}  // namespace certkv::cli
