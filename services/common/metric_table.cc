#include "services/common/metric_table.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <sstream>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/core/check.h"

namespace certkv {
namespace {

prometheus::MetricType TypeOf(MetricKind kind) {
  switch (kind) {
    case MetricKind::kCounter:
      return prometheus::MetricType::Counter;
    case MetricKind::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricKind::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

const char* NameOf(MetricKind kind) {
  switch (kind) {
    case MetricKind::kCounter:
      return "counter";
    case MetricKind::kGauge:
      return "gauge";
    case MetricKind::kHistogram:
      return "histogram";
  }
  return "?";
}

std::string LabelNames(MetricSink::Labels labels) {
  std::string names;
  for (const auto& label : labels) absl::StrAppend(&names, names.empty() ? "" : ", ", label.first);
  return names;
}

// Makes prometheus-cpp's families of what one source tells.
class FamilySink final : public MetricSink {
 public:
  explicit FamilySink(absl::Span<const MetricInfo> infos) {
    for (const MetricInfo& info : infos) {
      index_[info.name] = infos_.size();
      infos_.push_back(&info);
      prometheus::MetricFamily family;
      family.name = std::string(info.name);
      family.help = std::string(info.help);
      family.type = TypeOf(info.kind);
      families_.push_back(std::move(family));
    }
  }

  void Add(absl::string_view name, double value, Labels labels) override {
    prometheus::ClientMetric* metric = MetricOf(name, labels);
    metric->counter.value = value;
    metric->gauge.value = value;
  }
  void AddHistogram(absl::string_view name, const HistogramSnapshot& snapshot,
                    Labels labels) override {
    prometheus::ClientMetric* metric = MetricOf(name, labels);
    metric->histogram.sample_count = snapshot.cumulative_counts.back();
    metric->histogram.sample_sum = snapshot.sum;
    for (size_t i = 0; i < snapshot.bounds.size(); ++i) {
      prometheus::ClientMetric::Bucket bucket;
      bucket.upper_bound = snapshot.bounds[i];
      bucket.cumulative_count = snapshot.cumulative_counts[i];
      metric->histogram.bucket.push_back(bucket);
    }
  }
  // Those that have values.
  void MoveTo(std::vector<prometheus::MetricFamily>* families) {
    for (prometheus::MetricFamily& family : families_) {
      if (!family.metric.empty()) families->push_back(std::move(family));
    }
  }

 private:
  prometheus::ClientMetric* MetricOf(absl::string_view name, Labels labels) {
    const auto found = index_.find(name);
    CERTKV_CHECK(found != index_.end(), "a metric is declared in its service's table");
    CERTKV_CHECK(LabelNames(labels) == infos_[found->second]->labels,
                 "a metric has the labels that its table says");
    prometheus::ClientMetric metric;
    for (const auto& [label, value] : labels) {
      metric.label.push_back({std::string(label), std::string(value)});
    }
    auto& metrics = families_[found->second].metric;
    metrics.push_back(std::move(metric));
    return &metrics.back();
  }

  absl::flat_hash_map<absl::string_view, size_t> index_;
  std::vector<const MetricInfo*> infos_;
  std::vector<prometheus::MetricFamily> families_;
};

}  // namespace

void MetricTable::AddSource(MetricSource source) {
  absl::MutexLock lock(&mutex_);
  sources_.push_back(std::move(source));
}

std::string MetricTable::ToText() const {
  std::vector<prometheus::MetricFamily> families;
  {
    absl::MutexLock lock(&mutex_);
    for (const MetricSource& source : sources_) {
      FamilySink sink(source.infos);
      source.collect(&sink);
      sink.MoveTo(&families);
    }
  }
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return out.str();
}

std::string MetricsToMarkdown(absl::Span<const MetricInfo> infos) {
  std::string text = "| metric | kind | labels | meaning |\n|---|---|---|---|\n";
  for (const MetricInfo& info : infos) {
    std::string labels;
    for (const absl::string_view label : absl::StrSplit(info.labels, ", ", absl::SkipEmpty())) {
      absl::StrAppend(&labels, labels.empty() ? "" : ", ", "`", label, "`");
    }
    absl::StrAppend(&text, "| `", info.name, "` | ", NameOf(info.kind), " | ", labels, " | ",
                    info.help, " |\n");
  }
  return text;
}

}  // namespace certkv
