// Configuration: a schema that is declared once and read strictly.
//
// A section binds names to the fields of a config struct, whose values are the defaults:
//
//   ConfigSection GateConfigSection(GateConfig* config) {
//     ConfigSection section("gate", "Decides what reads must satisfy.");
//     section.AddDouble("tv_tolerance", &config->tv_tolerance, {.min = 0, .max = 1}, "",
//                       "largest worst_case_tv of a read");
//     section.AddDuration("lease_duration", &config->lease_duration_ms, {.min = 100, .max =
//     3600000},
//                         "how long a policy lease holds");
//     section.AddCheck([config] { return CheckGateConfig(*config); });
//     return section;
//   }
//
// The same schema reads a YAML file, prints the effective config as YAML with comments, and writes
// docs/config.md. Every defect of a file is reported at once, one per line:
//
//   gate.yaml:14: gate.tv_tolerance is 1.4, must be in [0, 1]; largest worst_case_tv of a read
//
// Threads: not safe; configs are read once, at start.
#ifndef CERTKV_SERVICES_COMMON_CONFIG_READER_H_
#define CERTKV_SERVICES_COMMON_CONFIG_READER_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

// Both ends are allowed values. For sizes the unit is bytes, for durations milliseconds.
struct IntegerRange {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};
// NaN is in no range; infinity only where `max` is.
struct NumberRange {
  double min = std::numeric_limits<double>::lowest();
  double max = std::numeric_limits<double>::max();
  bool min_excluded = false;
};

// One setting: how it is called, explained, parsed and shown.
struct ConfigField {
  std::string name;         // [a-z][a-z0-9_]*
  std::string type;         // "integer", "number", "size", "duration", "text", "true or false", ...
  std::string range;        // "in [0, 1]", for messages and docs; "" = any
  std::string unit;         // "" = none
  std::string description;  // what it is; no capital, no full stop
  // Takes the text of a scalar; `quoted` tells "5" from 5. Returns what it must be ("in [0, 1]",
  // "a number") when the text isn't that, else "". Only an accepted value is stored.
  std::function<std::string(absl::string_view text, bool quoted)> parse;
  std::function<std::string()> show;  // the value now, as YAML
};

// Descriptions are what follows "; " in an error and what stands in docs/config.md. The pointers
// must live as long as the section is used.
class ConfigSection {
 public:
  ConfigSection(absl::string_view name, absl::string_view description);

  void AddInteger(absl::string_view name, int32_t* value, IntegerRange range,
                  absl::string_view unit, absl::string_view description);
  void AddInteger(absl::string_view name, int64_t* value, IntegerRange range,
                  absl::string_view unit, absl::string_view description);
  void AddDouble(absl::string_view name, double* value, NumberRange range, absl::string_view unit,
                 absl::string_view description);
  void AddDouble(absl::string_view name, float* value, NumberRange range, absl::string_view unit,
                 absl::string_view description);
  void AddBool(absl::string_view name, bool* value, absl::string_view description);
  // At most `bytes_max` bytes of UTF-8 without control characters.
  void AddString(absl::string_view name, std::string* value, size_t bytes_max,
                 absl::string_view description);
  // Bytes; written "4096", "64KiB", "512MiB", "4GiB" or "2TiB".
  void AddSize(absl::string_view name, int64_t* size_bytes, IntegerRange range,
               absl::string_view description);
  // Milliseconds; written "500ms", "30s", "5min" or "2h". The unit is required.
  void AddDuration(absl::string_view name, int64_t* milliseconds, IntegerRange range,
                   absl::string_view description);
  // One of a few names, as {{"threshold", RiskMode::kThreshold}, ...}.
  template <typename Enum>
  void AddEnum(absl::string_view name, Enum* value,
               const std::vector<std::pair<std::string, Enum>>& names,
               absl::string_view description) {
    std::vector<std::string> texts;
    for (const auto& entry : names) texts.push_back(entry.first);
    AddChoice(
        name, texts, [value, names](size_t index) { *value = names[index].second; },
        [value, names] {
          for (const auto& entry : names) {
            if (entry.second == *value) return entry.first;
          }
          return std::string("?");
        },
        description);
  }
  // Runs after all sections are read, for rules between fields.
  void AddCheck(std::function<absl::Status()> check);

  const std::string& name() const { return name_; }
  const std::string& description() const { return description_; }
  const std::vector<ConfigField>& fields() const { return fields_; }
  const std::vector<std::function<absl::Status()>>& checks() const { return checks_; }

 private:
  void AddChoice(absl::string_view name, const std::vector<std::string>& texts,
                 std::function<void(size_t)> store, std::function<std::string()> show,
                 absl::string_view description);
  void AddField(absl::string_view name, absl::string_view unit, absl::string_view description,
                ConfigField field);

  std::string name_;
  std::string description_;
  std::vector<ConfigField> fields_;
  std::vector<std::function<absl::Status()>> checks_;
};

// A list of a file: a map of the same settings for each element. An element is of the owner's
// making.
struct ConfigList {
  std::string name;
  std::string description;
  int32_t count_max = 0;
  std::function<void()> clear;                           // drops all elements
  std::function<ConfigSection()> add;                    // one more element, with defaults
  std::function<std::vector<ConfigSection>()> elements;  // those there are
  ConfigSection sample;                                  // an element with defaults, for docs
};

// The sections of one program. A file is a map from section names to maps of settings; what it
// leaves out keeps its default.
class ConfigReader {
 public:
  void AddSection(ConfigSection section);
  // A list that a file has replaces the elements there are. Checks of elements are the owner's.
  void AddList(ConfigList list);

  // Reads YAML text; `file_name` is for messages. On error some fields may have been stored.
  // Errors: InvalidArgument [CONFIG_INVALID]: not YAML, several documents, an unknown or repeated
  // key, a value of the wrong type or out of range, a failed check.
  absl::Status ReadText(absl::string_view file_name, const std::string& text);
  // Errors: as ReadText; NotFound [CONFIG_UNREADABLE], with errno's text; InvalidArgument
  // [CONFIG_INVALID], over kConfigFileBytesMax.
  absl::Status ReadFile(const std::string& path);
  // Only the checks between fields, after flags changed something.
  absl::Status Check(absl::string_view file_name) const;

  // YAML of the values now, each with its description, range and unit; ReadText reads it back.
  std::string ToYaml() const;
  // One heading and table per section, with the values now as defaults.
  std::string ToMarkdown() const;

 private:
  std::vector<ConfigSection> sections_;
  std::vector<ConfigList> lists_;
};

// The text of a config file. Errors: as ConfigReader::ReadFile, but for those of the text.
absl::StatusOr<std::string> ReadConfigText(const std::string& path);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CONFIG_READER_H_
