#include "clients/cli/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "clients/cli/table.h"

namespace certkv::cli {

ProgressLine::ProgressLine(std::string title)
    : title_(std::move(title)),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(absl::Now()),
      last_(absl::InfinitePast()) {}

ProgressLine::~ProgressLine() {
  if (!shown_) return;
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start_);
  if (terminal_) {
    absl::FPrintF(stderr, "\r\033[K%s: %.1f s\n", title_, seconds);
  } else {
    absl::FPrintF(stderr, "%s: done in %.1f s\n", title_, seconds);
  }
}

void ProgressLine::Update(int64_t done, int64_t total) {
  const double share = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1.0;
  const absl::Time now = absl::Now();
  if (terminal_) {
    if (now - last_ < absl::Milliseconds(50) && done < total) return;
    const std::string bar = Bar(share, 30);
    absl::FPrintF(stderr, "\r\033[K%s  %3.0f %%  %s", title_, share * 100, bar);
  } else {
    const int tenth = static_cast<int>(share * 10);
    if (tenth == last_tenth_ || now - last_ < absl::Seconds(2)) return;
    last_tenth_ = tenth;
    absl::FPrintF(stderr, "%s: %.0f %%\n", title_, share * 100);
  }
  std::fflush(stderr);
  last_ = now;
  shown_ = true;
}

}  // namespace certkv::cli
