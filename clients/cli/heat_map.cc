#include "clients/cli/heat_map.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "clients/cli/table.h"

namespace certkv::cli {
namespace {

constexpr int kShadeCount = 5;
constexpr const char* kShades[kShadeCount] = {"░", "▒", "▓", "█", "█"};
// 256-colour codes from cold to hot, readable on dark and light.
constexpr int kColors[kShadeCount] = {24, 37, 143, 208, 196};
constexpr int kLabelColumns = 7;  // "layer n"

// 0 for a value up to 2^-9, then one more for every two octaves.
int ShadeOf(double tv) {
  if (!(tv > 0)) return 0;
  return std::clamp(static_cast<int>(std::floor((std::log2(tv) + 11) / 2)), 0, kShadeCount - 1);
}

std::string Cell(double tv, bool color) {
  const int shade = ShadeOf(tv);
  if (!color) return kShades[shade];
  return absl::StrFormat("\x1b[38;5;%dm%s\x1b[0m", kColors[shade], kShades[shade]);
}

}  // namespace

std::string HeatMap(const gate::v1::RequestRisk& risk, bool color, int width) {
  std::map<std::pair<int, int>, double> cells;
  int head_count = 0;
  for (const auto& head : risk.heads()) {
    cells[{head.layer(), head.query_head()}] = head.max_worst_case_tv();
    head_count = std::max(head_count, head.query_head() + 1);
  }
  if (cells.empty()) return "no reads yet\n";
  const int shown = std::min(head_count, std::max(1, width - kLabelColumns));
  std::string text =
      absl::StrFormat("%*s query heads 0 to %d\n", kLabelColumns - 1, "layer", shown - 1);
  int layer = -1;
  for (const auto& [place, unused] : cells) {
    if (place.first == layer) continue;
    layer = place.first;
    absl::StrAppendFormat(&text, "%*d ", kLabelColumns - 1, layer);
    for (int head = 0; head < shown; ++head) {
      const auto cell = cells.find({layer, head});
      text += cell == cells.end() ? "·" : Cell(cell->second, color);
    }
    text += "\n";
  }
  absl::StrAppend(&text, std::string(kLabelColumns, ' '));
  for (int shade = 0; shade < kShadeCount; ++shade) {
    // The top of each shade; the last has none.
    const double top = std::exp2(2 * shade - 9);
    absl::StrAppend(
        &text, Cell(top * 0.9, color),
        shade + 1 < kShadeCount ? absl::StrCat(" < ", FormatBound(top), "  ") : " above");
  }
  text += "  (largest worst_case_tv of a served read)\n";
  if (shown < head_count) {
    absl::StrAppend(&text, head_count - shown,
                    " more heads do not fit; widen the terminal, or use "
                    "--json\n");
  }
  return text;
}

bool WantsColor() { return isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr; }

}  // namespace certkv::cli
