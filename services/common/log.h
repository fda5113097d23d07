// Logs: one line of key=value to stderr per event, at the boundary that decides. Engines return
// Status and do not log.
//
//   Log(LogLevel::kWarning, "lease_expired", {{"worker", name}, {"lease", lease_id}});
//   2026-03-01T12:00:00.123Z level=warning event=lease_expired worker=w0 lease=42
#ifndef CERTKV_SERVICES_COMMON_LOG_H_
#define CERTKV_SERVICES_COMMON_LOG_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace certkv {

enum class LogLevel : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

const char* LogLevelName(LogLevel level);  // "debug", "info", "warning", "error"

struct LogField {
  // `value` is text or a number, as for absl::StrCat.
  LogField(absl::string_view key, const absl::AlphaNum& value) : key(key), value(value.Piece()) {}
  std::string key;  // [a-z0-9_]+
  std::string value;
};

// Writes one line, whole, when `level` is at least the least level. Values with spaces, quotes, '='
// or control characters are quoted and escaped, so that a line stays one line whatever a client
// sent. Threads: safe; lines are never mixed. Blocks as long as stderr does.
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// Lines below `level` are dropped from now on; kInfo at start. Threads: safe.
void SetLeastLogLevel(LogLevel level);

// The line without its time and newline; for tests.
std::string FormatLogLine(LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_LOG_H_
