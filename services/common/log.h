// Logs: one line to stderr per event, at the boundary that decides. Engines return Status and do
// not log. A line is key=value for people, or a JSON object for programs (server.log_format).
//
//   Log(LogLevel::kWarning, "lease_expired", {{"worker", name}, {"lease", lease_id}});
//   2026-03-01T12:00:00.123Z level=warning event=lease_expired worker=w0 lease=42
//   {"time":"2026-03-01T12:00:00.123Z","level":"warning","service":"certkvd",
//    "event":"lease_expired","worker":"w0","lease":42}                     (one line)
//
// Keys that mean the same everywhere: request ("requests/{request}"), traceparent (W3C), method.
#ifndef CERTKV_SERVICES_COMMON_LOG_H_
#define CERTKV_SERVICES_COMMON_LOG_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace certkv {

enum class LogLevel : uint8_t { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

const char* LogLevelName(LogLevel level);  // "debug", "info", "warning", "error"

// How lines look; kText at start.
enum class LogFormat : uint8_t { kText, kJson };

struct LogField {
  LogField(absl::string_view key, absl::string_view value) : key(key), value(value) {}
  LogField(absl::string_view key, const char* value) : key(key), value(value) {}
  LogField(absl::string_view key, const std::string& value) : key(key), value(value) {}
  template <typename Number>
  requires std::is_arithmetic_v<Number> LogField(absl::string_view key, Number value)
      : key(key), value(absl::StrCat(value)), is_number(true) {}
  std::string key;  // [a-z0-9_]+
  std::string value;
  bool is_number = false;
};

// Writes one line, whole, when `level` is at least the least level. Values with spaces, quotes, '='
// or control characters are quoted and escaped, so that a line stays one line whatever a client
// sent. Threads: safe; lines are never mixed. Blocks as long as stderr does.
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// Lines below `level` are dropped from now on; kInfo at start. Threads: safe.
void SetLeastLogLevel(LogLevel level);

// What a JSON line says under "service", and the format, from now on. Threads: safe, but for
// `service`: it is set before other threads log.
void SetLogService(absl::string_view service);
void SetLogFormat(LogFormat format);

// Lines written so far of that level.
int64_t LogLineCount(LogLevel level);

// A JSON line without its newline; for tests. Bytes that are not UTF-8 are replaced.
std::string FormatLogJson(absl::string_view time, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);
// The text line without its time and newline; for tests.
std::string FormatLogLine(LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_LOG_H_
