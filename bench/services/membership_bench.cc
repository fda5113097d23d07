// certkv-bench-membership: what N store nodes cost one etcd (processor time of leases kept alive),
// and how soon all of them see one more node come and go. Everything runs on this machine.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "bench/kernels/bench_report.h"
#include "services/cluster/membership.h"
#include "services/common/log.h"
#include "tests/support/etcd_server.h"

ABSL_FLAG(int64_t, seconds, 20, "for which processor time is counted");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using cluster::Membership;
using cluster::MembershipOptions;
using cluster::ShardMap;
using nlohmann::json;

constexpr int64_t kTtlSeconds = 10;
constexpr int kChanges = 10;

// User and system time of a process so far, in seconds.
double ProcessorSeconds(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(text.rfind(')') + 2));
  std::string field;
  double ticks = 0;
  for (int i = 3; i <= 15 && fields >> field; ++i) {
    if (i >= 14) ticks += std::stod(field);
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

std::unique_ptr<Membership> Join(const EtcdServer& etcd, const std::string& name) {
  MembershipOptions options;
  options.etcd.endpoints = {etcd.endpoint()};
  options.ttl_seconds = kTtlSeconds;
  options.self = cluster::Node{name, name + ":1", "", 1, ""};
  return *Membership::Start(options);
}

json Measure(int node_count) {
  const EtcdServer etcd;
  std::vector<std::unique_ptr<Membership>> nodes;
  for (int i = 0; i < node_count; ++i) nodes.push_back(Join(etcd, absl::StrCat("node-", i)));
  const auto all_see = [&nodes](size_t count) {
    const absl::Time start = absl::Now();
    for (const auto& node : nodes) {
      if (!node->WaitUntil([count](const ShardMap& map) { return map.nodes().size() == count; },
                           60'000)) {
        return -1.0;
      }
    }
    return absl::ToDoubleMilliseconds(absl::Now() - start);
  };
  const auto count = static_cast<size_t>(node_count);
  if (all_see(count) < 0) return {{"nodes", node_count}, {"error", "not all joined within 60 s"}};
  const auto wait = [&nodes](int64_t seconds) {
    nodes[0]->WaitUntil([](const ShardMap&) { return false; }, seconds * 1000);
  };
  wait(2);  // what the beginning left behind
  const double before = ProcessorSeconds(etcd.pid());
  const absl::Time start = absl::Now();
  wait(absl::GetFlag(FLAGS_seconds));
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const double share = (ProcessorSeconds(etcd.pid()) - before) / seconds;
  std::vector<double> joins;
  std::vector<double> leaves;
  for (int i = 0; i < kChanges; ++i) {
    auto late = Join(etcd, "late");
    joins.push_back(all_see(count + 1));
    late.reset();
    leaves.push_back(all_see(count));
  }
  const json row = {{"nodes", node_count},
                    {"etcd_processors", share},
                    {"keep_alives_per_second", node_count * 3.0 / kTtlSeconds},
                    {"join_seen_by_all_ms", Median(joins)},
                    {"leave_seen_by_all_ms", Median(leaves)}};
  std::printf(
      "%4d nodes: etcd uses %.4f processors; a join is seen by all after %.1f ms, a leave "
      "%.1f ms\n",
      node_count, share, Median(joins), Median(leaves));
  std::fflush(stdout);
  return row;
}

int Main() {
  SetLeastLogLevel(LogLevel::kError);
  json report = {{"run", DescribeRun()}, {"ttl_seconds", kTtlSeconds}, {"rows", json::array()}};
  for (const int nodes : {1, 10, 50, 200}) report["rows"].push_back(Measure(nodes));
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
