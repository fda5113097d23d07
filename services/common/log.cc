#include "services/common/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"

namespace certkv {
namespace {

std::atomic<LogLevel> least_level = LogLevel::kInfo;
std::atomic<LogFormat> log_format = LogFormat::kText;
std::atomic<int64_t> line_counts[4] = {};

std::string& ServiceName() {
  static auto* name = new std::string("certkv");
  return *name;
}

std::string JsonText(absl::string_view text) {
  return nlohmann::json(std::string(text))
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// "nan" and "inf" are no numbers of JSON.
bool IsJsonNumber(const LogField& field) {
  return field.is_number && (absl::ascii_isdigit(field.value.back()) != 0);
}

bool NeedsQuotes(absl::string_view value) {
  return value.empty() || std::any_of(value.begin(), value.end(), [](char c) {
           return absl::ascii_isspace(c) || absl::ascii_iscntrl(c) || c == '"' || c == '=' ||
                  c == '\\';
         });
}

std::string TimeNow() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const int milliseconds = static_cast<int>(
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[64];
  const size_t length = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof(text) - length, ".%03dZ", milliseconds);
  return text;
}

}  // namespace

const char* LogLevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
  }
  return "?";
}

std::string FormatLogLine(LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields) {
  std::string line = absl::StrCat("level=", LogLevelName(level), " event=", event);
  for (const LogField& field : fields) {
    if (NeedsQuotes(field.value)) {
      // Utf8SafeCEscape keeps letters of any language and escapes what would break the line.
      absl::StrAppend(&line, " ", field.key, "=\"", absl::Utf8SafeCEscape(field.value), "\"");
    } else {
      absl::StrAppend(&line, " ", field.key, "=", field.value);
    }
  }
  return line;
}

std::string FormatLogJson(absl::string_view time, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields) {
  std::string line =
      absl::StrCat("{\"time\":", JsonText(time), ",\"level\":\"", LogLevelName(level),
                   "\",\"service\":", JsonText(ServiceName()), ",\"event\":", JsonText(event));
  for (const LogField& field : fields) {
    absl::StrAppend(&line, ",", JsonText(field.key), ":",
                    IsJsonNumber(field) ? field.value : JsonText(field.value));
  }
  return line + "}";
}

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  if (level < least_level.load(std::memory_order_relaxed)) return;
  line_counts[static_cast<int>(level)].fetch_add(1, std::memory_order_relaxed);
  const std::string line =
      log_format.load(std::memory_order_relaxed) == LogFormat::kJson
          ? FormatLogJson(TimeNow(), level, event, fields) + "\n"
          : absl::StrCat(TimeNow(), " ", FormatLogLine(level, event, fields), "\n");
  // One write per line keeps lines of several threads and processes apart. A log that can't be
  // written has nowhere to be reported.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

void SetLeastLogLevel(LogLevel level) { least_level.store(level, std::memory_order_relaxed); }

void SetLogService(absl::string_view service) { ServiceName() = std::string(service); }

void SetLogFormat(LogFormat format) { log_format.store(format, std::memory_order_relaxed); }

int64_t LogLineCount(LogLevel level) {
  return line_counts[static_cast<int>(level)].load(std::memory_order_relaxed);
}

}  // namespace certkv
