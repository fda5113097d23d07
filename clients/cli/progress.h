// A progress line on standard error: a bar on a terminal, a line per tenth elsewhere.
#ifndef CERTKV_CLIENTS_CLI_PROGRESS_H_
#define CERTKV_CLIENTS_CLI_PROGRESS_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace certkv::cli {

class ProgressLine {
 public:
  explicit ProgressLine(std::string title);
  ~ProgressLine();  // ends the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Update(int64_t done, int64_t total);

 private:
  const std::string title_;
  const bool terminal_;
  const absl::Time start_;
  absl::Time last_;
  int last_tenth_ = -1;
  bool shown_ = false;
};

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_PROGRESS_H_
