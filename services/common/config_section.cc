// ConfigSection: how the types of settings are parsed and shown.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "kernels/core/check.h"
#include "services/common/config_reader.h"

namespace certkv {
namespace {

struct Unit {
  absl::string_view suffix;
  int64_t factor;
};
// Largest first, so that a value is shown in the largest unit that divides it.
constexpr Unit kSizeUnits[] = {{"TiB", int64_t{1} << 40},
                               {"GiB", int64_t{1} << 30},
                               {"MiB", int64_t{1} << 20},
                               {"KiB", int64_t{1} << 10}};
constexpr Unit kDurationUnits[] = {{"h", 3600 * 1000}, {"min", 60 * 1000}, {"s", 1000}, {"ms", 1}};

std::string ShowInUnits(int64_t value, absl::Span<const Unit> units) {
  for (const Unit& unit : units) {
    if (value != 0 && value % unit.factor == 0)
      return absl::StrCat(value / unit.factor, unit.suffix);
  }
  return absl::StrCat(value);
}
std::string ShowSize(int64_t size_bytes) { return ShowInUnits(size_bytes, kSizeUnits); }
std::string ShowDuration(int64_t milliseconds) {
  return milliseconds == 0 ? "0s" : ShowInUnits(milliseconds, kDurationUnits);
}

// Reads "<integer><suffix>"; false when it isn't that or doesn't fit 64 bits.
bool ParseInUnits(absl::string_view text, absl::Span<const Unit> units, bool unit_required,
                  int64_t* value) {
  const size_t digits = text.find_first_not_of("0123456789");
  const absl::string_view number = text.substr(0, digits);
  absl::string_view suffix = digits == absl::string_view::npos ? "" : text.substr(digits);
  suffix = absl::StripLeadingAsciiWhitespace(suffix);
  int64_t count = 0;
  if (number.empty() || !absl::SimpleAtoi(number, &count)) return false;
  if (suffix.empty()) {
    *value = count;
    return !unit_required;
  }
  for (const Unit& unit : units) {
    if (unit.suffix == suffix) return !__builtin_mul_overflow(count, unit.factor, value);
  }
  return false;
}

template <typename Show>
std::string DescribeRange(const IntegerRange& range, const Show& show) {
  const IntegerRange any;
  const bool has_min = range.min != any.min;
  const bool has_max = range.max != any.max;
  if (has_min && has_max) return absl::StrCat("in [", show(range.min), ", ", show(range.max), "]");
  if (has_min) return absl::StrCat(">= ", show(range.min));
  if (has_max) return absl::StrCat("<= ", show(range.max));
  return "";
}

// The shortest text that reads back as the same number.
std::string ShowNumber(double value) {
  if (std::isinf(value)) return value > 0 ? ".inf" : "-.inf";
  std::string text;
  for (int digits = 6; digits <= 17; ++digits) {
    text = absl::StrFormat("%.*g", digits, value);
    if (std::strtod(text.c_str(), nullptr) == value) break;
  }
  return text;
}
std::string ShowFloat(float value) {
  std::string text;
  for (int digits = 1; digits <= 9; ++digits) {
    text = absl::StrFormat("%.*g", digits, value);
    if (std::strtof(text.c_str(), nullptr) == value) break;
  }
  return text;
}

std::string DescribeRange(const NumberRange& range) {
  const NumberRange any;
  const bool has_min = range.min != any.min;
  const bool has_max = range.max != any.max;
  const char* open = range.min_excluded ? "(" : "[";
  if (has_min && has_max) {
    return absl::StrCat("in ", open, ShowNumber(range.min), ", ", ShowNumber(range.max), "]");
  }
  if (has_min) return absl::StrCat(range.min_excluded ? "> " : ">= ", ShowNumber(range.min));
  if (has_max) return absl::StrCat("<= ", ShowNumber(range.max));
  return "finite";
}

bool InRange(double value, const NumberRange& range) {
  const bool above = range.min_excluded ? value > range.min : value >= range.min;
  return above && value <= range.max;
}

std::string Must(absl::string_view kind, absl::string_view range) {
  return range.empty() ? std::string(kind) : absl::StrCat(kind, " ", range);
}

template <typename Integer>
ConfigField IntegerField(Integer* value, IntegerRange range) {
  range.min = std::max<int64_t>(range.min, std::numeric_limits<Integer>::min());
  range.max = std::min<int64_t>(range.max, std::numeric_limits<Integer>::max());
  ConfigField field;
  field.type = "integer";
  field.range = DescribeRange(range, [](int64_t v) { return absl::StrCat(v); });
  field.parse = [=, must = field.range](absl::string_view text, bool quoted) -> std::string {
    int64_t parsed = 0;
    if (quoted || !absl::SimpleAtoi(text, &parsed)) return Must("an integer", must);
    if (!(parsed >= range.min && parsed <= range.max)) return must;
    *value = static_cast<Integer>(parsed);
    return "";
  };
  field.show = [value] { return absl::StrCat(*value); };
  return field;
}

template <typename Number>
ConfigField NumberField(Number* value, NumberRange range) {
  ConfigField field;
  field.type = "number";
  field.range = DescribeRange(range);
  field.parse = [=, must = field.range](absl::string_view text, bool quoted) -> std::string {
    double parsed = 0;
    // ".inf" and ".nan" are YAML's spellings; a plain "inf" or "nan" is text there.
    const bool special = absl::EndsWith(text, ".inf") || absl::EndsWith(text, ".nan");
    if (special) {
      parsed = absl::EndsWith(text, "nan")   ? std::nan("")
               : absl::StartsWith(text, "-") ? -std::numeric_limits<double>::infinity()
                                             : std::numeric_limits<double>::infinity();
    } else if (quoted || text.find_first_not_of("0123456789+-.eE") != absl::string_view::npos ||
               !absl::SimpleAtod(text, &parsed)) {
      return Must("a number", must);
    }
    // A number that is finite but not as a float is out of every range of finite floats.
    const bool fits = std::isfinite(static_cast<Number>(parsed)) || std::isinf(parsed);
    if (!InRange(parsed, range) || !fits) return must;
    *value = static_cast<Number>(parsed);
    return "";
  };
  return field;
}

}  // namespace

ConfigSection::ConfigSection(absl::string_view name, absl::string_view description)
    : name_(name), description_(description) {}

void ConfigSection::AddField(absl::string_view name, absl::string_view unit,
                             absl::string_view description, ConfigField field) {
  field.name = std::string(name);
  field.unit = std::string(unit);
  field.description = std::string(description);
  for (const ConfigField& other : fields_) {
    CERTKV_CHECK(other.name != field.name, "a setting is declared once");
  }
  fields_.push_back(std::move(field));
}

void ConfigSection::AddInteger(absl::string_view name, int32_t* value, IntegerRange range,
                               absl::string_view unit, absl::string_view description) {
  AddField(name, unit, description, IntegerField(value, range));
}

void ConfigSection::AddInteger(absl::string_view name, int64_t* value, IntegerRange range,
                               absl::string_view unit, absl::string_view description) {
  AddField(name, unit, description, IntegerField(value, range));
}

void ConfigSection::AddDouble(absl::string_view name, double* value, NumberRange range,
                              absl::string_view unit, absl::string_view description) {
  ConfigField field = NumberField(value, range);
  field.show = [value] { return ShowNumber(*value); };
  AddField(name, unit, description, std::move(field));
}

void ConfigSection::AddDouble(absl::string_view name, float* value, NumberRange range,
                              absl::string_view unit, absl::string_view description) {
  ConfigField field = NumberField(value, range);
  field.show = [value] { return ShowFloat(*value); };
  AddField(name, unit, description, std::move(field));
}

void ConfigSection::AddBool(absl::string_view name, bool* value, absl::string_view description) {
  ConfigField field;
  field.type = "true or false";
  field.parse = [value](absl::string_view text, bool quoted) -> std::string {
    if (quoted || (text != "true" && text != "false")) return "true or false";
    *value = text == "true";
    return "";
  };
  field.show = [value] { return std::string(*value ? "true" : "false"); };
  AddField(name, "", description, std::move(field));
}

void ConfigSection::AddString(absl::string_view name, std::string* value, size_t bytes_max,
                              absl::string_view description) {
  ConfigField field;
  field.type = "text";
  field.range = absl::StrCat("at most ", bytes_max, " bytes");
  field.parse = [=](absl::string_view text, bool) -> std::string {
    if (text.size() > bytes_max) return absl::StrCat("text of at most ", bytes_max, " bytes");
    for (const char c : text) {
      if (absl::ascii_iscntrl(c)) return "text without control characters";
    }
    *value = std::string(text);
    return "";
  };
  field.show = [value] {
    std::string quoted = "\"";
    for (const char c : *value) {
      if (c == '"' || c == '\\') quoted += '\\';
      quoted += c;
    }
    return quoted + "\"";
  };
  AddField(name, "", description, std::move(field));
}

void ConfigSection::AddSize(absl::string_view name, int64_t* size_bytes, IntegerRange range,
                            absl::string_view description) {
  ConfigField field;
  field.type = "size";
  range.min = std::max<int64_t>(range.min, 0);
  field.range = DescribeRange(range, ShowSize);
  field.parse = [=, must = field.range](absl::string_view text, bool) -> std::string {
    int64_t parsed = 0;
    if (!ParseInUnits(text, kSizeUnits, /*unit_required=*/false, &parsed)) {
      return Must("a size in bytes such as 4096, 64KiB, 512MiB or 4GiB,", must);
    }
    if (!(parsed >= range.min && parsed <= range.max)) return must;
    *size_bytes = parsed;
    return "";
  };
  field.show = [size_bytes] { return ShowSize(*size_bytes); };
  AddField(name, "", description, std::move(field));
}

void ConfigSection::AddDuration(absl::string_view name, int64_t* milliseconds, IntegerRange range,
                                absl::string_view description) {
  ConfigField field;
  field.type = "duration";
  range.min = std::max<int64_t>(range.min, 0);
  field.range = DescribeRange(range, ShowDuration);
  field.parse = [=, must = field.range](absl::string_view text, bool) -> std::string {
    int64_t parsed = 0;
    if (!ParseInUnits(text, kDurationUnits, /*unit_required=*/true, &parsed)) {
      return Must("a duration with its unit such as 500ms, 30s, 5min or 2h,", must);
    }
    if (!(parsed >= range.min && parsed <= range.max)) return must;
    *milliseconds = parsed;
    return "";
  };
  field.show = [milliseconds] { return ShowDuration(*milliseconds); };
  AddField(name, "", description, std::move(field));
}

void ConfigSection::AddChoice(absl::string_view name, const std::vector<std::string>& texts,
                              std::function<void(size_t)> store, std::function<std::string()> show,
                              absl::string_view description) {
  ConfigField field;
  field.type = "choice";
  field.range = absl::StrCat("one of ", absl::StrJoin(texts, ", "));
  field.parse = [texts, store = std::move(store), must = field.range](absl::string_view text,
                                                                      bool) -> std::string {
    const auto found = std::find(texts.begin(), texts.end(), text);
    if (found == texts.end()) return must;
    store(found - texts.begin());
    return "";
  };
  field.show = std::move(show);
  AddField(name, "", description, std::move(field));
}

void ConfigSection::AddCheck(std::function<absl::Status()> check) {
  checks_.push_back(std::move(check));
}

}  // namespace certkv
