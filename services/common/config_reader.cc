#include "services/common/config_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <numeric>
#include <sstream>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "kernels/core/check.h"
#include "kernels/core/limits.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

// A file with more defects than this isn't a config of ours.
constexpr size_t kDefectsMax = 20;

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID", message);
}

// Levenshtein distance, to guess what a misspelt key was meant to be.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

std::string Suggestion(absl::string_view seen, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = 1 + seen.size() / 3;
  for (const std::string& name : known) {
    if (seen.size() > 128) break;
    const size_t distance = EditDistance(seen, name);
    if (distance <= best_distance) {
      best_distance = distance - 1;
      best = name;
      if (distance == 0) break;
    }
  }
  const std::string all = absl::StrJoin(known, ", ");
  return best.empty() ? absl::StrCat("; known are ", all)
                      : absl::StrCat("; did you mean ", best, "? Known are ", all);
}

// What a node is, for messages; long text is cut.
std::string Describe(const YAML::Node& node) {
  if (node.IsMap()) return "a map";
  if (node.IsSequence()) return "a list";
  if (node.IsNull()) return "empty";
  std::string text = node.Scalar();
  if (text.size() > 64) text.replace(61, std::string::npos, "...");
  // yaml-cpp tags quoted scalars "!", plain ones "?".
  return node.Tag() == "!" ? absl::StrCat("the text \"", text, "\"") : text;
}

// Hears of a document and keeps nothing of it.
class IgnoreEvents final : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

// Is there something after the first document? Throws as yaml-cpp does. Not by YAML::LoadAll: where
// no document can begin, as at a comma, its parser finds an empty one without going on, for ever.
bool HasSecondDocument(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  IgnoreEvents ignore;
  return parser.HandleNextDocument(ignore) && parser.HandleNextDocument(ignore);
}

// Collects the defects of one file.
class FileReader {
 public:
  FileReader(absl::string_view file_name, const std::vector<ConfigSection>& sections,
             const std::vector<ConfigList>& lists)
      : file_name_(file_name), sections_(sections), lists_(lists) {}

  void ReadDocument(const YAML::Node& document) {
    if (document.IsNull()) return;  // an empty file sets nothing
    if (!document.IsMap()) {
      Defect(document, absl::StrCat("the file is ", Describe(document),
                                    ", must be a map of sections: ", Names(sections_)));
      return;
    }
    ForEachKey(document, "",
               [this](const std::string& name, const YAML::Node& key, const YAML::Node& value) {
                 for (const ConfigSection& section : sections_) {
                   if (section.name() == name) return ReadSection(section, key, value);
                 }
                 for (const ConfigList& list : lists_) {
                   if (list.name == name) return ReadList(list, key, value);
                 }
                 std::vector<std::string> known;
                 for (const ConfigSection& section : sections_) known.push_back(section.name());
                 for (const ConfigList& list : lists_) known.push_back(list.name);
                 Defect(key, absl::StrCat("unknown section ", name, Suggestion(name, known)));
               });
  }

  absl::Status status() const {
    return defects_.empty() ? absl::OkStatus() : Invalid(absl::StrJoin(defects_, "\n"));
  }

 private:
  static std::string Names(const std::vector<ConfigSection>& sections) {
    return absl::StrJoin(sections, ", ", [](std::string* out, const ConfigSection& section) {
      out->append(section.name());
    });
  }

  void Defect(const YAML::Node& node, absl::string_view message) {
    if (defects_.size() >= kDefectsMax) return;
    defects_.push_back(absl::StrCat(file_name_, ":", node.Mark().line + 1, ": ", message));
  }

  // Calls `visit(name, key, value)` for each key of a map that is text and not repeated. yaml-cpp
  // keeps repeated keys and would answer with the first.
  template <typename Visit>
  void ForEachKey(const YAML::Node& map, absl::string_view prefix, const Visit& visit) {
    absl::flat_hash_map<std::string, int> lines;
    for (const auto& entry : map) {
      if (!entry.first.IsScalar()) {
        Defect(entry.first, absl::StrCat("a key is ", Describe(entry.first), ", must be text"));
        continue;
      }
      const std::string& name = entry.first.Scalar();
      const auto [first, is_new] = lines.emplace(name, entry.first.Mark().line + 1);
      if (!is_new) {
        Defect(entry.first, absl::StrCat(prefix, name, " is set twice, first in line ",
                                         first->second, "; leave one"));
        continue;
      }
      visit(name, entry.first, entry.second);
    }
  }

  void ReadSection(const ConfigSection& section, const YAML::Node& key, const YAML::Node& value) {
    if (value.IsNull()) return;  // "gate:" with everything below it commented out
    if (!value.IsMap()) {
      Defect(key, absl::StrCat(section.name(), " is ", Describe(value),
                               ", must be a map of settings; ", section.description()));
      return;
    }
    const std::string prefix = section.name() + ".";
    ForEachKey(
        value, prefix,
        [&](const std::string& name, const YAML::Node& field_key, const YAML::Node& field_value) {
          for (const ConfigField& field : section.fields()) {
            if (field.name == name) return ReadField(field, prefix, field_key, field_value);
          }
          std::vector<std::string> known;
          for (const ConfigField& field : section.fields()) known.push_back(field.name);
          Defect(field_key, absl::StrCat("unknown key ", prefix, name, Suggestion(name, known)));
        });
  }

  void ReadList(const ConfigList& list, const YAML::Node& key, const YAML::Node& value) {
    if (!value.IsNull() && !value.IsSequence()) {
      Defect(key, absl::StrCat(list.name, " is ", Describe(value), ", must be a list; ",
                               list.description));
      return;
    }
    if (value.size() > static_cast<size_t>(list.count_max)) {
      Defect(key,
             absl::StrCat(list.name, " has ", value.size(), " elements, at most ", list.count_max));
      return;
    }
    list.clear();
    for (const YAML::Node& element : value) {
      if (element.IsMap()) {
        ReadSection(list.add(), element, element);
      } else {
        Defect(element, absl::StrCat("an element of ", list.name, " is ", Describe(element),
                                     ", must be a map of settings; ", list.description));
      }
    }
  }

  void ReadField(const ConfigField& field, absl::string_view prefix, const YAML::Node& key,
                 const YAML::Node& value) {
    std::string must = field.type;
    if (value.IsScalar()) must = field.parse(value.Scalar(), value.Tag() == "!");
    if (must.empty()) return;
    Defect(key, absl::StrCat(prefix, field.name, " is ", Describe(value), ", must be ", must,
                             field.unit.empty() ? "" : " ", field.unit, "; ", field.description));
  }

  std::string file_name_;
  const std::vector<ConfigSection>& sections_;
  const std::vector<ConfigList>& lists_;
  std::vector<std::string> defects_;
};

// Reads a whole file of at most kConfigFileBytesMax bytes.
absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const auto unreadable = [&path](absl::string_view what) {
    return MakeError(absl::StatusCode::kNotFound, "CONFIG_UNREADABLE",
                     absl::StrCat("can't read config file ", path, ": ", what));
  };
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!file.valid() || fstat(file.get(), &info) != 0) return unreadable(std::strerror(errno));
  if (S_ISDIR(info.st_mode)) return unreadable("it is a directory");
  // Read, not trusted to st_size: a pipe has none.
  std::string text(kConfigFileBytesMax + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = read(file.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return unreadable(std::strerror(errno));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > kConfigFileBytesMax) {
    return Invalid(absl::StrCat("config file ", path, " has more than ", kConfigFileBytesMax,
                                " bytes; is it a config file?"));
  }
  text.resize(size);
  return text;
}

// "# " and the words of `text`, broken into lines of at most 100 columns.
void AppendComment(absl::string_view indent, absl::string_view text, std::string* yaml) {
  constexpr size_t kColumns = 100;
  size_t column = kColumns;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column + 1 + word.size() > kColumns) {
      absl::StrAppend(yaml, yaml->empty() || yaml->back() == '\n' ? "" : "\n", indent, "#");
      column = indent.size() + 1;
    }
    absl::StrAppend(yaml, " ", word);
    column += 1 + word.size();
  }
  absl::StrAppend(yaml, "\n");
}

std::string EscapeMarkdown(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"|", "\\|"}, {"<", "\\<"}});
}

std::string FieldTable(const ConfigSection& section) {
  std::string text =
      "| setting | type | default | allowed | unit | meaning |\n"
      "|---|---|---|---|---|---|\n";
  for (const ConfigField& field : section.fields()) {
    absl::StrAppend(&text, "| `", field.name, "` | ", field.type, " | `", field.show(), "` | ",
                    EscapeMarkdown(field.range), " | ", field.unit, " | ",
                    EscapeMarkdown(field.description), " |\n");
  }
  return text;
}

}  // namespace

void ConfigReader::AddSection(ConfigSection section) {
  for (const ConfigSection& other : sections_) {
    CERTKV_CHECK(other.name() != section.name(), "a section is added once");
  }
  sections_.push_back(std::move(section));
}

void ConfigReader::AddList(ConfigList list) { lists_.push_back(std::move(list)); }

absl::Status ConfigReader::ReadText(absl::string_view file_name, const std::string& text) {
  // yaml-cpp reads up to a NUL in places and past it in others.
  if (text.find('\0') != std::string::npos) {
    return Invalid(absl::StrCat(file_name, ": not YAML: it has a zero byte"));
  }
  FileReader reader(file_name, sections_, lists_);
  try {
    if (HasSecondDocument(text)) {
      return Invalid(absl::StrCat(file_name,
                                  ": has several YAML documents (separated by ---), or text that "
                                  "belongs to none, must have one; remove the others"));
    }
    reader.ReadDocument(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    return Invalid(absl::StrCat(file_name, ":", error.mark.line + 1, ": not YAML: ", error.msg));
  } catch (const std::exception& error) {
    return Invalid(absl::StrCat(file_name, ": not YAML: ", error.what()));
  }
  CERTKV_RETURN_IF_ERROR(reader.status());
  return Check(file_name);
}

absl::StatusOr<std::string> ReadConfigText(const std::string& path) { return ReadWhole(path); }

absl::Status ConfigReader::ReadFile(const std::string& path) {
  CERTKV_ASSIGN_OR_RETURN(const std::string text, ReadWhole(path));
  return ReadText(path, text);
}

absl::Status ConfigReader::Check(absl::string_view file_name) const {
  for (const ConfigSection& section : sections_) {
    for (const auto& check : section.checks()) {
      if (const absl::Status status = check(); !status.ok()) {
        return Invalid(absl::StrCat(file_name, ": ", section.name(), ": ", status.message()));
      }
    }
  }
  return absl::OkStatus();
}

std::string ConfigReader::ToYaml() const {
  std::string yaml;
  for (const ConfigSection& section : sections_) {
    if (!yaml.empty()) absl::StrAppend(&yaml, "\n");
    AppendComment("", section.description(), &yaml);
    absl::StrAppend(&yaml, section.name(), ":\n");
    for (const ConfigField& field : section.fields()) {
      std::string comment = field.description;
      if (!field.range.empty()) absl::StrAppend(&comment, "; ", field.range);
      if (!field.unit.empty()) absl::StrAppend(&comment, "; ", field.unit);
      AppendComment("  ", comment, &yaml);
      absl::StrAppend(&yaml, "  ", field.name, ": ", field.show(), "\n");
    }
  }
  for (const ConfigList& list : lists_) {
    absl::StrAppend(&yaml, "\n");
    AppendComment("", list.description, &yaml);
    const std::vector<ConfigSection> elements = list.elements();
    absl::StrAppend(&yaml, list.name, elements.empty() ? ": []\n" : ":\n");
    for (const ConfigSection& element : elements) {
      const char* lead = "  - ";
      for (size_t i = 0; i < element.fields().size(); ++i) {
        const ConfigField& field = element.fields()[i];
        if (field.show() == list.sample.fields()[i].show()) continue;
        absl::StrAppend(&yaml, lead, field.name, ": ", field.show(), "\n");
        lead = "    ";
      }
      if (lead[2] == '-') absl::StrAppend(&yaml, "  - {}\n");
    }
  }
  return yaml;
}

std::string ConfigReader::ToMarkdown() const {
  std::string text;
  for (const ConfigSection& section : sections_) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", "## `", section.name(), "`\n\n",
                    section.description(), "\n\n", FieldTable(section));
  }
  for (const ConfigList& list : lists_) {
    absl::StrAppend(&text, "\n## `", list.name, "`, a list of at most ", list.count_max, "\n\n",
                    list.description, "\n\n", FieldTable(list.sample));
  }
  return text;
}

}  // namespace certkv
