#include "services/cluster/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/config_reader.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

absl::Status Read(const std::string& lines, ClusterConfig* config) {
  ConfigReader reader;
  reader.AddSection(ClusterConfigSection(config));
  return reader.ReadText("node.yaml", absl::StrCat("cluster:\n", lines));
}

TEST(ClusterConfigTest, IsOffByDefault) {
  ClusterConfig config;
  EXPECT_TRUE(Read("  node: a\n", &config).ok());
  EXPECT_FALSE(config.is_on());
}

TEST(ClusterConfigTest, TakesANode) {
  ClusterConfig config;
  const absl::Status status =
      Read("  etcd: e0:2379, e1:2379\n  node: a\n  target: a:1\n  bulk_target: a:2\n  ttl: 5s\n",
           &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(config.is_on());
  EXPECT_EQ(config.ttl_ms, 5000);
}

TEST(ClusterConfigTest, NamesWhatIsWrong) {
  const std::string node = "  node: a\n  target: a:1\n";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"  etcd: e0\n" + node, "host:port"},
      {"  etcd: e0:1\n  target: a:1\n", "name"},
      {"  etcd: e0:1\n  node: a\n", "target"},
      {"  etcd: e0:1\n  node: a/b\n  target: a:1\n", "name"},
      {"  etcd: e0:1\n  ttl: 1500ms\n" + node, "whole seconds"},
      {"  etcd: e0:1\n  weight: 0\n" + node, "cluster.weight"},
      {"  etcd: e0:1\n  pull_wait: 0ms\n" + node, "cluster.pull_wait"},
  };
  for (const auto& [lines, what] : cases) {
    ClusterConfig config;
    const absl::Status status = Read(lines, &config);
    EXPECT_FALSE(status.ok()) << lines;
    EXPECT_EQ(ReasonOf(status), "CONFIG_INVALID") << lines;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what)) << lines;
  }
}

TEST(ParseEndpointsTest, TakesHostAndPort) {
  EXPECT_EQ(*cluster::ParseEndpoints("a:2379, [::1]:2379"),
            (std::vector<std::string>{"a:2379", "[::1]:2379"}));
  for (const char* text : {"", "a", "a:", ":1", "http://a:1", ",", "a:1,b"}) {
    EXPECT_EQ(ReasonOf(cluster::ParseEndpoints(text).status()), "CONFIG_INVALID") << text;
  }
}

}  // namespace
}  // namespace certkv
