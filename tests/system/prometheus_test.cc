// Debian's Prometheus scrapes certkvd while it works: every query of the Grafana dashboard and of
// the alert rules is evaluated, and every metric of the docs is looked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/slab_layout.h"
#include "tests/support/etcd_server.h"
#include "tests/support/file_content.h"
#include "tests/support/http_client.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using nlohmann::json;

constexpr char kPrometheus[] = "/usr/bin/prometheus";
constexpr char kPromtool[] = "/usr/bin/promtool";
constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

// What has no value in a store without a disk tier, a GPU or other nodes, whose reads all succeed.
const std::set<std::string> kAbsent = {
    "certkv_certifier_device_passes_total",   "certkv_certifier_errors_total",
    "certkv_kvstore_cluster_blocks_total",    "certkv_kvstore_cluster_lookups_total",
    "certkv_kvstore_cluster_nodes_total",     "certkv_kvstore_cluster_registered_info",
    "certkv_kvstore_cluster_watching_info",   "certkv_kvstore_disk_blocks_total",
    "certkv_kvstore_disk_open_info",          "certkv_kvstore_disk_opening_blocks",
    "certkv_kvstore_disk_opening_bytes",      "certkv_kvstore_tenant_disk_bytes",
    "certkv_kvstore_tenant_disk_limit_bytes", "certkv_kvstore_nccl_blocks_total",
    "certkv_kvstore_nccl_bytes_total",        "certkv_kvstore_nccl_failures_total",
    "certkv_kvstore_nccl_links_made_total",   "certkv_kvstore_nccl_links_total"};

std::set<std::string> MetricNamesIn(const std::string& text) {
  const std::string prefix = "certkv_";
  std::set<std::string> names;
  for (size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix, at)) {
    const size_t begin = at;
    while (at < text.size() && (absl::ascii_islower(text[at]) || text[at] == '_')) ++at;
    absl::string_view name = absl::string_view(text).substr(begin, at - begin);
    for (const char* part : {"_bucket", "_sum", "_count"}) {
      if (absl::ConsumeSuffix(&name, part)) break;
    }
    if (name.size() > prefix.size()) names.emplace(name);
  }
  return names;
}

// Expressions of deploy/prometheus/certkv.rules.yml, by the name of their alert.
std::map<std::string, std::string> AlertExpressions(const json& rules) {
  std::map<std::string, std::string> expressions;
  for (const json& group : rules["data"]["groups"]) {
    for (const json& rule : group["rules"]) expressions[rule["name"]] = rule["query"];
  }
  return expressions;
}

class PrometheusTest : public SystemTest {
 protected:
  void Start(const std::string& more = "") {
    http_port_ = FreePort();
    StartCluster(absl::StrCat("server:\n  http_address: 127.0.0.1:", http_port_,
                              "\n  log_format: json\n  log_level: debug\n", more,
                              "gate:\n  risk_mode: cumulative\n  tenant_budget: 1000\n"));
  }
  std::string Metrics() { return HttpGet(http_port_, "/metrics").body; }

  // A server that scrapes certkvd every half second.
  void StartPrometheus() {
    prometheus_port_ = FreePort();
    const std::string directory = cluster_->directory();
    const std::string rules = std::filesystem::absolute("deploy/prometheus/certkv.rules.yml");
    // The shipped file, but quicker, and with the port of this test.
    std::string config = ContentOf("deploy/prometheus/prometheus.yml");
    config =
        absl::StrReplaceAll(config, {{"15s", "500ms"},
                                     {"127.0.0.1:9464", absl::StrCat("127.0.0.1:", http_port_)},
                                     {"- certkv.rules.yml", absl::StrCat("- ", rules)}});
    std::ofstream(directory + "/prometheus.yml") << config;
    auto process = cli::ChildProcess::Start(
        {kPrometheus, "--config.file=" + directory + "/prometheus.yml",
         "--storage.tsdb.path=" + directory + "/prometheus",
         absl::StrCat("--web.listen-address=127.0.0.1:", prometheus_port_)},
        {}, directory + "/prometheus.log");
    ASSERT_TRUE(process.ok()) << process.status();
    prometheus_ = *std::move(process);
  }
  json Ask(const std::string& target) {
    return json::parse(HttpGet(prometheus_port_, target).body, nullptr, false);
  }
  json Query(const std::string& expression) {
    return Ask("/api/v1/query?query=" + PercentEncode(expression));
  }
  // Every query of the dashboard has data.
  void CheckDashboard() {
    const json dashboard = json::parse(ContentOf("deploy/grafana/certkv.json"));
    int query_count = 0;
    for (const json& panel : dashboard["panels"]) {
      if (!panel.contains("targets")) continue;
      for (const json& target : panel["targets"]) {
        const std::string written = target["expr"];
        const json answer = Query(absl::StrReplaceAll(written, {{"$__rate_interval", "1m"}}));
        ASSERT_FALSE(answer.is_discarded()) << written;
        EXPECT_EQ(answer["status"], "success") << written << "\n" << answer.dump();
        const std::set<std::string> names = MetricNamesIn(written);
        ASSERT_FALSE(names.empty()) << written;
        const bool is_absent = kAbsent.count(*names.begin()) > 0;
        EXPECT_EQ(answer["data"]["result"].empty(), is_absent) << written;
        ++query_count;
      }
    }
    EXPECT_GT(query_count, 25);
  }
  // Queries of the dashboard that name what is absent without a disk or other nodes.
  static std::set<std::string> QueriesOfDiskAndNodes() {
    const json dashboard = json::parse(ContentOf("deploy/grafana/certkv.json"));
    std::set<std::string> queries;
    for (const json& panel : dashboard["panels"]) {
      for (const json& target : panel.value("targets", json::array())) {
        const std::string written = target["expr"];
        for (const std::string& name : MetricNamesIn(written)) {
          if (name != "certkv_certifier_errors_total" && kAbsent.count(name) > 0) {
            queries.insert(absl::StrReplaceAll(written, {{"$__rate_interval", "1m"}}));
          }
        }
      }
    }
    return queries;
  }
  // A node of a cluster whose memory is for 24 blocks and whose disk has the rest.
  static std::string NodeYaml(const EtcdServer& etcd, const std::string& node,
                              const std::string& disk, uint16_t http_port) {
    const std::string bulk = absl::StrCat("127.0.0.1:", UnusedPort());
    const auto bytes = [](SlabKind kind) { return SlabLayout(SmallSpec(), kind, 24).slab_bytes(); };
    return absl::StrCat("server:\n  tcp_security: insecure\n  http_address: 127.0.0.1:", http_port,
                        "\nkvstore:\n  device_memory: ", bytes(SlabKind::kDevice),
                        "\n  backing_memory: ", bytes(SlabKind::kBacking),
                        "\n  spill_directory: ", disk, "\n  bulk_address: ", bulk,
                        "\nkvstore_tenants:\n  - {tenant: acme, spill_limit: 1GiB}\n",
                        "cluster:\n  etcd: ", etcd.endpoint(), "\n  node: ", node,
                        "\n  target: ", node, ":1\n  bulk_target: ", bulk, "\n");
  }
  // A worker of tenant "acme" that has put `data`.
  std::unique_ptr<client::Worker> PutAsTenant(const TestSequence& data) {
    client::Options options = cluster_->options();
    options.tenant = "acme";
    auto worker = client::Worker::Attach(options, data.spec);
    EXPECT_TRUE(worker.ok()) << worker.status();
    if (!worker.ok()) return nullptr;
    Put(**worker, data);
    return *std::move(worker);
  }
  void CheckRules() {
    // Nothing fires here, but what the rules look at is there.
    const json rules = Ask("/api/v1/rules");
    const auto alerts = AlertExpressions(rules);
    EXPECT_GE(alerts.size(), 10u);
    for (const auto& [alert, expression] : alerts) {
      const json answer = Query(expression);
      EXPECT_EQ(answer["status"], "success") << alert;
      EXPECT_TRUE(answer["data"]["result"].empty()) << alert << " fires: " << answer.dump();
      for (const std::string& name : MetricNamesIn(expression)) {
        const json series = Query(absl::StrCat("{__name__=~\"", name, "(_bucket)?\"}"));
        EXPECT_EQ(series["data"]["result"].empty(), kAbsent.count(name) > 0)
            << alert << ": " << name;
      }
    }
  }

  uint16_t http_port_ = 0;
  uint16_t prometheus_port_ = 0;
  std::unique_ptr<cli::ChildProcess> prometheus_;
};

TEST_P(PrometheusTest, EveryQueryOfDashboardAndRulesFindsItsData) {
  if (!std::filesystem::exists(kPrometheus)) GTEST_SKIP() << "needs Debian's prometheus";
  Start();
  ASSERT_EQ(std::system(absl::StrCat(kPromtool,
                                     " check rules deploy/prometheus/certkv.rules.yml "
                                     ">/dev/null")
                            .c_str()),
            0);
  const TestSequence data(SmallSpec(), 64 * 4 + 10, 7);
  const auto worker = AttachWorker(SmallSpec());
  const auto sequence = Put(*worker, data);
  const auto of_tenant = PutAsTenant(data);
  client::RequestOptions options;
  options.tenant = "acme";
  options.traceparent = kTraceparent;
  auto request = client::Request::Open(cluster_->options(), "scraped", options);
  ASSERT_TRUE(request.ok()) << request.status();
  auto attention = client::Attention::Open(*worker, *sequence, **request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  ReadAndCheck(**attention, data, sequence->token_count(), 1);
  ASSERT_TRUE((*request)->Flush().ok());
  StartPrometheus();
  const absl::Time deadline = absl::Now() + absl::Seconds(120);
  uint32_t seed = 2;
  // Everything that the queries are about happens while Prometheus watches.
  for (bool seen = false; !seen;) {
    ASSERT_LT(absl::Now(), deadline) << "Prometheus saw no reads";
    ReadAndCheck(**attention, data, sequence->token_count(), seed++);
    auto found = worker->Lookup(data.token_ids, client::DefaultKeyContext(worker->spec()));
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_TRUE((*request)->Flush().ok());
    absl::SleepFor(absl::Milliseconds(100));
    const json answer = Query(
        "sum(rate(certkv_gate_directives_total[1m])) > 0 and "
        "sum(rate(certkv_kvstore_lookup_blocks_total[1m])) > 0 and "
        "sum(rate(certkv_certifier_heads_total[1m])) > 0");
    seen = !answer.is_discarded() && answer.contains("data") && !answer["data"]["result"].empty();
  }

  CheckDashboard();
  CheckRules();
  ASSERT_TRUE(prometheus_->Stop().ok());
}

TEST_P(PrometheusTest, QueriesOfDiskAndNodesFindTheirDataWhereThereAreBoth) {
  if (!std::filesystem::exists(kPrometheus)) GTEST_SKIP() << "needs Debian's prometheus";
  EtcdServer etcd;
  http_port_ = FreePort();
  StartCluster(NodeYaml(etcd, "here", etcd.directory() + "/here", http_port_));
  ASSERT_NE(cluster_, nullptr);
  const auto other =
      Cluster::Start(GetParam(), NodeYaml(etcd, "there", etcd.directory() + "/there", FreePort()));
  ASSERT_TRUE(other.ok()) << other.status();
  StartPrometheus();
  client::Options options = (*other)->options();
  options.tenant = "acme";
  const auto writer = client::Worker::Attach(options, SmallSpec());
  ASSERT_TRUE(writer.ok()) << writer.status();
  options = cluster_->options();
  options.tenant = "acme";
  const auto reader = client::Worker::Attach(options, SmallSpec());
  ASSERT_TRUE(reader.ok()) << reader.status();

  std::set<std::string> queries = QueriesOfDiskAndNodes();
  EXPECT_GE(queries.size(), 9u);
  // Sequences go on to be written there and found here until Prometheus has seen it, in memory
  // that has room for a few: the other node owns some of their chains.
  const absl::Time deadline = absl::Now() + absl::Seconds(120);
  queries.insert("sum(certkv_kvstore_cluster_blocks_total) > 0");
  queries.insert("sum(certkv_kvstore_bulk_bytes_total{direction=\"received\"}) > 0");
  queries.insert("sum(certkv_kvstore_disk_blocks_total{event=\"written\"}) > 0");
  for (uint32_t seed = 1; !queries.empty(); ++seed) {
    ASSERT_LT(absl::Now(), deadline) << "no data: " << *queries.begin() << "\n" << Metrics();
    const TestSequence data(SmallSpec(), 64 * 6, seed);
    Put(**writer, data);
    const auto found = (*reader)->Lookup(data.token_ids, client::DefaultKeyContext(data.spec));
    ASSERT_TRUE(found.ok()) << found.status();
    absl::SleepFor(absl::Milliseconds(50));
    std::erase_if(queries, [&](const std::string& query) {
      const json answer = Query(query);
      return !answer.is_discarded() && answer.contains("data") && !answer["data"]["result"].empty();
    });
  }
}

TEST_P(PrometheusTest, EveryMetricOfTheDocsIsThereAfterARead) {
  Start();
  const TestSequence data(SmallSpec(), 64 * 2, 8);
  const auto worker = AttachWorker(SmallSpec());
  const auto sequence = Put(*worker, data);
  const auto of_tenant = PutAsTenant(data);
  client::RequestOptions options;
  options.tenant = "acme";
  options.traceparent = kTraceparent;
  auto request = client::Request::Open(cluster_->options(), "told", options);
  ASSERT_TRUE(request.ok()) << request.status();
  {
    auto attention = client::Attention::Open(*worker, *sequence, **request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    ReadAndCheck(**attention, data, sequence->token_count(), 1);
  }
  ASSERT_TRUE((*request)->Close().ok());
  const std::string text = Metrics();
  // Two whole blocks, in a cache of their own.
  const int64_t slot_bytes = of_tenant->backing_layout().slot_bytes();
  EXPECT_THAT(
      text, testing::HasSubstr(absl::StrCat(
                "certkv_kvstore_tenant_bytes{tenant=\"acme\",tier=\"backing\"} ", 2 * slot_bytes)));
  EXPECT_THAT(text, testing::HasSubstr("certkv_certifier_tokens_total{what=\"skipped\"} 0"));
  const std::set<std::string> told = MetricNamesIn(text);
  for (const std::string& name : MetricNamesIn(ContentOf("docs/metrics.md"))) {
    EXPECT_EQ(told.count(name) > 0, kAbsent.count(name) == 0) << name;
  }
  for (const std::string& name : told) {
    EXPECT_THAT(ContentOf("docs/metrics.md"), ::testing::HasSubstr(name)) << name;
  }

  // Lines of the log are JSON; the caller's trace is in those of all three services.
  std::set<std::string> traced;
  std::istringstream log(ContentOf(cluster_->directory() + "/certkvd.log"));
  for (std::string line; std::getline(log, line);) {
    const json entry = json::parse(line, nullptr, false);
    ASSERT_FALSE(entry.is_discarded()) << line;
    EXPECT_TRUE(entry.contains("time") && entry.contains("level") && entry.contains("event"))
        << line;
    EXPECT_EQ(entry["service"], "certkvd");
    if (entry["event"] == "rpc" && entry["traceparent"] == kTraceparent) {
      traced.insert(absl::StrCat(std::string(entry["callee"]), "/", std::string(entry["method"])));
    }
    if (entry["event"] == "request_opened") {
      EXPECT_EQ(entry["request"], "requests/told");
      EXPECT_EQ(entry["traceparent"], kTraceparent);
    }
  }
  for (const char* call : {"gate/OpenRequest", "gate/CloseRequest", "certifier/OpenView",
                           "certifier/Attend", "kvstore/AttachWorker"}) {
    EXPECT_TRUE(traced.count(call) > 0) << call << " was logged without the caller's trace";
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, PrometheusTest, ::testing::Values(ClusterShape::kAllInOne),
                         ShapeName);

}  // namespace
}  // namespace certkv
