#include "services/common/config_reader.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::StartsWith;

enum class Colour { kRed, kBlue };

struct TestConfig {
  double share = 0.25;
  float tolerance = 0.2f;
  int32_t count = 4;
  int64_t big = int64_t{1} << 40;
  int64_t memory_bytes = 4 << 20;
  int64_t wait_ms = 30000;
  bool quick = false;
  std::string name = "a \"quoted\" \\ name";
  Colour colour = Colour::kRed;
};

ConfigSection TestSection(TestConfig* config) {
  ConfigSection section("kitchen", "Where things are tested.");
  section.AddDouble("share", &config->share, {.min = 0, .max = 1, .min_excluded = true}, "",
                    "share of the pie");
  section.AddDouble("tolerance", &config->tolerance, {.min = 0, .max = 1}, "",
                    "how much is tolerated");
  section.AddInteger("count", &config->count, {.min = 1, .max = 100}, "spoons", "number of spoons");
  section.AddInteger("big", &config->big, {}, "", "a large number");
  section.AddSize("memory", &config->memory_bytes, {.min = 4096, .max = int64_t{1} << 42},
                  "size of the pantry");
  section.AddDuration("wait", &config->wait_ms, {.min = 100, .max = 3600000}, "time to wait");
  section.AddBool("quick", &config->quick, "whether to hurry");
  section.AddString("name", &config->name, 32, "what it is called");
  section.AddEnum<Colour>("colour", &config->colour,
                          {{"red", Colour::kRed}, {"blue", Colour::kBlue}}, "colour of the wall");
  section.AddCheck([config] {
    if (config->count == 13)
      return absl::InvalidArgumentError("count is 13, which brings bad luck");
    return absl::OkStatus();
  });
  return section;
}

class ConfigReaderTest : public ::testing::Test {
 protected:
  ConfigReaderTest() { reader_.AddSection(TestSection(&config_)); }
  // The message of the error that reading `text` gives; "" when it is read.
  std::string ErrorOf(const std::string& text) {
    const absl::Status status = reader_.ReadText("kitchen.yaml", text);
    EXPECT_EQ(ReasonOf(status), status.ok() ? "" : "CONFIG_INVALID") << status;
    return std::string(status.message());
  }

  TestConfig config_;
  ConfigReader reader_;
};

TEST_F(ConfigReaderTest, ReadsEveryType) {
  ASSERT_EQ(ErrorOf("kitchen:\n"
                    "  share: 1e-1\n  tolerance: 0.3\n  count: 7\n  big: -5\n  memory: 512MiB\n"
                    "  wait: 1500ms\n  quick: true\n  name: \"b: c\"\n  colour: blue\n"),
            "");
  EXPECT_EQ(config_.share, 0.1);
  EXPECT_EQ(config_.tolerance, 0.3f);
  EXPECT_EQ(config_.count, 7);
  EXPECT_EQ(config_.big, -5);
  EXPECT_EQ(config_.memory_bytes, int64_t{512} << 20);
  EXPECT_EQ(config_.wait_ms, 1500);
  EXPECT_TRUE(config_.quick);
  EXPECT_EQ(config_.name, "b: c");
  EXPECT_EQ(config_.colour, Colour::kBlue);
}

TEST_F(ConfigReaderTest, ReadsUnitsOfSizesAndDurations) {
  const struct {
    const char* text;
    int64_t value;
  } kSizes[] = {{"4096", 4096},
                {"64KiB", 65536},
                {"\"4 GiB\"", int64_t{4} << 30},
                {"2TiB", int64_t{2} << 40}},
    kDurations[] = {{"500ms", 500}, {"30s", 30000}, {"5min", 300000}, {"1h", 3600000}};
  for (const auto& c : kSizes) {
    EXPECT_EQ(ErrorOf(absl::StrCat("kitchen: {memory: ", c.text, "}")), "");
    EXPECT_EQ(config_.memory_bytes, c.value) << c.text;
  }
  for (const auto& c : kDurations) {
    EXPECT_EQ(ErrorOf(absl::StrCat("kitchen: {wait: ", c.text, "}")), "");
    EXPECT_EQ(config_.wait_ms, c.value) << c.text;
  }
}

TEST_F(ConfigReaderTest, LeavesDefaultsWhereTheFileIsSilent) {
  EXPECT_EQ(ErrorOf(""), "");
  EXPECT_EQ(ErrorOf("# nothing but a comment\n"), "");
  EXPECT_EQ(ErrorOf("kitchen:\n"), "");
  EXPECT_EQ(ErrorOf("kitchen:\n  count: 5\n"), "");
  EXPECT_EQ(config_.share, 0.25);
  EXPECT_EQ(config_.count, 5);
}

TEST_F(ConfigReaderTest, NamesFileLineValueRangeAndMeaningWhenOutOfRange) {
  EXPECT_EQ(ErrorOf("kitchen:\n\n  tolerance: 1.4\n"),
            "kitchen.yaml:3: kitchen.tolerance is 1.4, must be in [0, 1]; how much is tolerated");
  EXPECT_EQ(ErrorOf("kitchen: {count: 101}"),
            "kitchen.yaml:1: kitchen.count is 101, must be in [1, 100] spoons; number of spoons");
  EXPECT_EQ(ErrorOf("kitchen: {share: 0}"),
            "kitchen.yaml:1: kitchen.share is 0, must be in (0, 1]; share of the pie");
  EXPECT_EQ(ErrorOf("kitchen: {memory: 5TiB}"),
            "kitchen.yaml:1: kitchen.memory is 5TiB, must be in [4KiB, 4TiB]; size of the pantry");
  EXPECT_EQ(ErrorOf("kitchen: {wait: 99ms}"),
            "kitchen.yaml:1: kitchen.wait is 99ms, must be in [100ms, 1h]; time to wait");
  EXPECT_EQ(
      ErrorOf("kitchen: {colour: green}"),
      "kitchen.yaml:1: kitchen.colour is green, must be one of red, blue; colour of the wall");
}

TEST_F(ConfigReaderTest, KeepsTheOldValueWhenTheNewIsRefused) {
  EXPECT_NE(ErrorOf("kitchen: {count: 101, tolerance: .nan}"), "");
  EXPECT_EQ(config_.count, 4);
  EXPECT_EQ(config_.tolerance, 0.2f);
}

TEST_F(ConfigReaderTest, RefusesWrongTypes) {
  for (const char* text : {"count: many",
                           "count: 1.5",
                           "count: \"5\"",
                           "count: 0x10",
                           "count: 99999999999999999999",
                           "count: [1]",
                           "count: {a: 1}",
                           "count:",
                           "count: ~",
                           "share: half",
                           "share: \"0.5\"",
                           "share: 0x1p-1",
                           "share: inf",
                           "quick: yes",
                           "quick: 1",
                           "quick: \"true\"",
                           "memory: 4GB",
                           "memory: -1",
                           "memory: 1.5GiB",
                           "memory: 9999999999TiB",
                           "wait: 30",
                           "wait: 5 minutes",
                           "wait: -1s",
                           "wait: s",
                           "name: [a]",
                           "name: \"a\\nb\"",
                           "name: a text which is a lot longer than it may be"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("kitchen:\n  ", text, "\n")),
                StartsWith("kitchen.yaml:2: kitchen."))
        << text;
  }
}

TEST_F(ConfigReaderTest, RefusesNanAndInfinity) {
  for (const char* text : {".nan", ".inf", "-.inf", "1e999", "-1e999"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("kitchen: {tolerance: ", text, "}")), HasSubstr("in [0, 1]"))
        << text;
  }
}

TEST_F(ConfigReaderTest, SuggestsTheNearestNameForAnUnknownKey) {
  EXPECT_THAT(ErrorOf("kitchen:\n  tolerence: 0.1\n"),
              StartsWith("kitchen.yaml:2: unknown key kitchen.tolerence; did you mean tolerance? "
                         "Known are share, tolerance, count"));
  EXPECT_THAT(ErrorOf("kichen: {}"), HasSubstr("unknown section kichen; did you mean kitchen?"));
  EXPECT_EQ(ErrorOf("garden: {}"), "kitchen.yaml:1: unknown section garden; known are kitchen");
  EXPECT_THAT(ErrorOf("kitchen: {<<: {count: 5}}"), HasSubstr("unknown key kitchen.<<"));
}

TEST_F(ConfigReaderTest, RefusesRepeatedKeys) {
  EXPECT_EQ(ErrorOf("kitchen:\n  count: 5\n  quick: true\n  count: 6\n"),
            "kitchen.yaml:4: kitchen.count is set twice, first in line 2; leave one");
  EXPECT_EQ(ErrorOf("kitchen: {}\nkitchen: {}\n"),
            "kitchen.yaml:2: kitchen is set twice, first in line 1; leave one");
}

TEST_F(ConfigReaderTest, ReportsAllDefectsAtOnce) {
  const std::string error = ErrorOf("kitchen:\n  count: 0\n  colour: green\n  nonsense: 1\n");
  EXPECT_THAT(error, HasSubstr("kitchen.yaml:2: kitchen.count"));
  EXPECT_THAT(error, HasSubstr("\nkitchen.yaml:3: kitchen.colour"));
  EXPECT_THAT(error, HasSubstr("\nkitchen.yaml:4: unknown key kitchen.nonsense"));
}

TEST_F(ConfigReaderTest, RefusesWhatIsNotAMapOfSections) {
  EXPECT_THAT(ErrorOf("[1, 2]"), HasSubstr("the file is a list, must be a map of sections"));
  EXPECT_THAT(ErrorOf("just text"), HasSubstr("the file is just text"));
  EXPECT_THAT(ErrorOf("kitchen: 5"), HasSubstr("kitchen is 5, must be a map of settings"));
  EXPECT_THAT(ErrorOf("? [a]\n: 5"), HasSubstr("a key is a list, must be text"));
}

TEST_F(ConfigReaderTest, RefusesWhatIsNotYaml) {
  EXPECT_THAT(ErrorOf("kitchen:\n  count: [1\n"), HasSubstr("not YAML"));
  EXPECT_THAT(ErrorOf("kitchen:\n\tcount: 1\n"), StartsWith("kitchen.yaml:2: not YAML"));
  EXPECT_THAT(ErrorOf("kitchen: *nobody\n"), HasSubstr("not YAML"));
  EXPECT_THAT(ErrorOf(std::string("a\0b", 3)), HasSubstr("zero byte"));
  EXPECT_THAT(ErrorOf("kitchen: {}\n---\nkitchen: {}\n"), HasSubstr("several YAML documents"));
  EXPECT_THAT(ErrorOf("kitchen: {}\n---\n---\n---\n"), HasSubstr("several YAML documents"));
  EXPECT_THAT(ErrorOf(std::string(100000, '[')), HasSubstr("not YAML"));
}

TEST_F(ConfigReaderTest, RunsChecksBetweenFields) {
  EXPECT_EQ(ErrorOf("kitchen: {count: 13}"),
            "kitchen.yaml: kitchen: count is 13, which brings bad luck");
}

TEST_F(ConfigReaderTest, PrintsYamlThatReadsBackTheSame) {
  config_ = {.share = 0.1 + 0.2,
             .tolerance = 0.02f,
             .count = 9,
             .big = std::numeric_limits<int64_t>::min(),
             .memory_bytes = 5000,
             .wait_ms = 90000,
             .quick = true,
             .name = "tab-less: \"x\" # \\ é",
             .colour = Colour::kBlue};
  const std::string yaml = reader_.ToYaml();
  EXPECT_THAT(yaml, HasSubstr("  # time to wait; in [100ms, 1h]\n  wait: 90s\n"));
  EXPECT_THAT(yaml, HasSubstr("  tolerance: 0.02\n"));

  TestConfig again;
  ConfigReader reader;
  reader.AddSection(TestSection(&again));
  ASSERT_TRUE(reader.ReadText("printed", yaml).ok()) << yaml;
  EXPECT_EQ(again.share, config_.share);
  EXPECT_EQ(again.tolerance, config_.tolerance);
  EXPECT_EQ(again.big, config_.big);
  EXPECT_EQ(again.memory_bytes, config_.memory_bytes);
  EXPECT_EQ(again.wait_ms, config_.wait_ms);
  EXPECT_EQ(again.quick, config_.quick);
  EXPECT_EQ(again.name, config_.name);
  EXPECT_EQ(again.colour, config_.colour);
}

// What yaml-cpp would take for documents without end.
TEST_F(ConfigReaderTest, EndsAtTextThatNoDocumentBeginsWith) {
  for (const char* text : {",", ",,,", "]", "}", "kitchen: {}\n]", "- a\n}", "? ,", ",kitchen: {",
                           "kitchen: {count: 3}\n,"}) {
    EXPECT_NE(ErrorOf(text), "") << text;
  }
}

TEST_F(ConfigReaderTest, WritesOneTableRowPerSetting) {
  EXPECT_THAT(reader_.ToMarkdown(),
              HasSubstr("| `count` | integer | `4` | in [1, 100] | spoons | number of spoons |\n"));
}

TEST_F(ConfigReaderTest, ReadsFilesAndNamesTheOnesItCannotRead) {
  const std::string path = absl::StrCat(::testing::TempDir(), "certkv_config_", getpid(), ".yaml");
  std::ofstream(path) << "kitchen: {count: 8}\n";
  EXPECT_TRUE(reader_.ReadFile(path).ok());
  EXPECT_EQ(config_.count, 8);

  std::ofstream(path) << std::string(kConfigFileBytesMax + 1, '#');
  EXPECT_THAT(std::string(reader_.ReadFile(path).message()), HasSubstr("more than 1048576 bytes"));
  std::remove(path.c_str());

  const absl::Status missing = reader_.ReadFile(path);
  EXPECT_EQ(ReasonOf(missing), "CONFIG_UNREADABLE");
  EXPECT_THAT(std::string(missing.message()), HasSubstr("No such file"));
  EXPECT_THAT(std::string(reader_.ReadFile("/").message()), HasSubstr("it is a directory"));
}

}  // namespace
}  // namespace certkv
