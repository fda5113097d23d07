#include "services/common/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "services/common/log.h"
#include "services/common/metric_table.h"
#include "services/common/process_metrics.h"
#include "services/common/rpc_observer.h"
#include "services/common/trace_context.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr MetricInfo kInfos[] = {
    {"certkv_test_reads_total", MetricKind::kCounter, "rung, format", "Reads"},
    {"certkv_test_views_total", MetricKind::kGauge, "", "Views"},
    {"certkv_test_read_seconds", MetricKind::kHistogram, "", "Time of a read"},
};

TEST(MetricTableTest, WritesPrometheusTextWithEscapedLabels) {
  LatencyHistogram seconds;
  seconds.Observe(9'000);           // first bucket
  seconds.Observe(20'000'000'000);  // beyond the last
  MetricTable table;
  table.AddSource(
      {kInfos, [&](MetricSink* sink) {
         sink->Add("certkv_test_reads_total", 3, {{"rung", "none"}, {"format", "a\"b\\c\nd"}});
         sink->AddHistogram("certkv_test_read_seconds", seconds.Snapshot());
       }});
  const std::string text = table.ToText();
  EXPECT_THAT(text, HasSubstr("# TYPE certkv_test_reads_total counter"));
  EXPECT_THAT(text,
              HasSubstr("certkv_test_reads_total{rung=\"none\",format=\"a\\\"b\\\\c\\nd\"} 3"));
  EXPECT_THAT(text, HasSubstr("certkv_test_read_seconds_count 2"));
  EXPECT_THAT(text, HasSubstr("certkv_test_read_seconds_bucket{le=\"1e-05\"} 1"));
  EXPECT_THAT(text, HasSubstr("certkv_test_read_seconds_bucket{le=\"+Inf\"} 2"));
  EXPECT_THAT(text, Not(HasSubstr("certkv_test_views_total")));  // has no value
}

TEST(MetricTableDeathTest, RefusesWhatIsNotDeclared) {
  MetricTable table;
  table.AddSource({kInfos, [](MetricSink* sink) { sink->Add("certkv_test_other_total", 1); }});
  EXPECT_DEATH(table.ToText(), "declared");
  MetricTable labels;
  labels.AddSource({kInfos, [](MetricSink* sink) {
                      sink->Add("certkv_test_reads_total", 1, {{"rung", "none"}});
                    }});
  EXPECT_DEATH(labels.ToText(), "labels");
}

TEST(MetricTableTest, DescribesRowsAsMarkdown) {
  EXPECT_THAT(MetricsToMarkdown(kInfos),
              HasSubstr("| `certkv_test_reads_total` | counter | `rung`, `format` | Reads |"));
}

TEST(MetricTableTest, ProcessTellsItsVersionAndMemory) {
  MetricTable table;
  table.AddSource({ProcessMetricInfos(), CollectProcessMetrics});
  const std::string text = table.ToText();
  for (const MetricInfo& info : ProcessMetricInfos()) {
    EXPECT_THAT(text, HasSubstr(std::string(info.name))) << info.name;
  }
  EXPECT_THAT(text, Not(HasSubstr("certkv_server_resident_memory_bytes 0\n")));
}

TEST(LatencyHistogramTest, PutsATimeIntoTheBucketThatIncludesIt) {
  LatencyHistogram seconds;
  seconds.Observe(10'000);  // exactly a bound
  seconds.Observe(10'001);
  const HistogramSnapshot snapshot = seconds.Snapshot();
  EXPECT_EQ(snapshot.cumulative_counts[0], 1);
  EXPECT_EQ(snapshot.cumulative_counts[1], 2);
  EXPECT_EQ(snapshot.cumulative_counts.back(), 2);
  EXPECT_DOUBLE_EQ(snapshot.sum, 20'001e-9);
}

TEST(LogTest, JsonLineSurvivesWhatAClientSends) {
  EXPECT_EQ(FormatLogJson("t", LogLevel::kWarning, "e",
                          {{"request", "a\"b\n<script>"}, {"reads", 3}, {"share", 0.5}}),
            "{\"time\":\"t\",\"level\":\"warning\",\"service\":\"certkv\",\"event\":\"e\","
            "\"request\":\"a\\\"b\\n<script>\",\"reads\":3,\"share\":0.5}");
  // Not UTF-8, and no number of JSON.
  const std::string line =
      FormatLogJson("t", LogLevel::kInfo, "e",
                    {{"text", "\xff"}, {"tv", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_THAT(line, HasSubstr("\"tv\":\"nan\""));
  EXPECT_THAT(line, Not(HasSubstr("\xff")));
}

TEST(TraceContextTest, TakesTraceparentsAndNothingElse) {
  const std::string good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  EXPECT_TRUE(IsTraceparent(good));
  EXPECT_TRUE(IsTraceparent("cc" + good.substr(2) + "-what-comes-later"));
  EXPECT_TRUE(IsTraceparent(MakeTraceparent()));
  for (const std::string& bad :
       {std::string(), good + "-more", "ff" + good.substr(2), good.substr(1),
        std::string("00-00000000000000000000000000000000-00f067aa0ba902b7-01"),
        std::string("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01"),
        std::string("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01"),
        "cc" + good.substr(2) + "-line\nbreak"}) {
    EXPECT_FALSE(IsTraceparent(bad)) << bad;
    EXPECT_EQ(TraceparentOrNone(bad), "");
  }
}

}  // namespace
}  // namespace certkv
