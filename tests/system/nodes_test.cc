// Store nodes in one cluster, with a real etcd: what one has, lookups at the others find.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/block_key.h"
#include "services/cluster/shard_map.h"
#include "tests/support/etcd_server.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

constexpr int64_t kTokenCount = 64 * 5;  // whole blocks

class NodesTest : public SystemTest {
 protected:
  void StartNode(const std::string& name, const std::string& target = "") {
    const std::string bulk = absl::StrCat("127.0.0.1:", UnusedPort());
    const std::string yaml =
        absl::StrCat("server:\n  tcp_security: insecure\nkvstore:\n  bulk_address: ", bulk,
                     "\n  bulk_timeout: 2s\ncluster:\n  etcd: ", etcd_.endpoint(),
                     "\n  node: ", name, "\n  target: ", target.empty() ? name + ":1" : target,
                     "\n  bulk_target: ", bulk, "\n  ttl: 2s\n");
    auto node = Cluster::Start(ClusterShape::kAllInOne, "", {yaml, ""});
    ASSERT_TRUE(node.ok()) << node.status();
    nodes_[name] = *std::move(node);
    map_nodes_.push_back({name, name + ":1", bulk, 1, "x"});
  }
  void TearDown() override {
    for (const auto& [name, node] : nodes_) {
      if (HasFailure()) std::cerr << name << ":\n" << node->Logs();
    }
  }
  // Waits until every node has said that it sees `count` nodes.
  void WaitForNodes(size_t count) {
    const std::string said = absl::StrCat("nodes=", count, " ");
    for (const auto& [name, node] : nodes_) {
      for (int i = 0; i < 1000 && !absl::StrContains(node->Logs(), said); ++i) {
        absl::SleepFor(absl::Milliseconds(20));
      }
      ASSERT_TRUE(absl::StrContains(node->Logs(), said)) << name;
    }
  }
  // A chain that `owner` owns.
  TestSequence SequenceOf(const std::string& owner) const {
    const cluster::ShardMap map(map_nodes_, 1);
    for (uint32_t seed = 1;; ++seed) {
      TestSequence data(SmallSpec(), kTokenCount, seed);
      const auto keys = ComputeBlockKeys(client::DefaultKeyContext(data.spec), data.token_ids,
                                         data.spec.block_tokens);
      if (map.OwnerOf(keys.front())->name == owner) return data;
    }
  }
  std::unique_ptr<client::Worker> Attach(const std::string& node) {
    auto worker = client::Worker::Attach(nodes_[node]->options(), SmallSpec());
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  std::unique_ptr<client::Sequence> Lookup(client::Worker& worker, const TestSequence& data) {
    auto found = worker.Lookup(data.token_ids, client::DefaultKeyContext(data.spec));
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? *std::move(found) : nullptr;
  }

  EtcdServer etcd_;
  std::map<std::string, std::unique_ptr<Cluster>> nodes_;
  std::vector<cluster::Node> map_nodes_;
};

TEST_F(NodesTest, LookupsFindWhatTheOwnerHas) {
  for (const char* name : {"a", "b", "c"}) StartNode(name);
  WaitForNodes(3);
  const TestSequence data = SequenceOf("b");
  const auto at_b = Attach("b");
  const auto put = Put(*at_b, data);
  for (const char* name : {"a", "c"}) {
    const auto worker = Attach(name);
    const auto found = Lookup(*worker, data);
    ASSERT_NE(found, nullptr);
    ASSERT_EQ(found->token_count(), kTokenCount) << name;
    // And they are read there, certified by that node's own certifier.
    cluster_ = std::move(nodes_[name]);
    const auto request = OpenRequest(absl::StrCat("at-", name));
    auto attention = client::Attention::Open(*worker, *found, *request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    for (const client::ReadResult& result : ReadAndCheck(**attention, data, kTokenCount, 5)) {
      EXPECT_FALSE(result.in_process);
    }
    nodes_[name] = std::move(cluster_);
  }
}

TEST_F(NodesTest, ALongerPrefixLeavesOneLease) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  const TestSequence data = SequenceOf("b");
  const auto at_b = Attach("b");
  const auto put = Put(*at_b, data);
  // Two of the five blocks are here already.
  const auto worker = Attach("a");
  const auto beginning =
      worker->Lookup(absl::MakeConstSpan(data.token_ids).first(2 * data.spec.block_tokens),
                     client::DefaultKeyContext(data.spec));
  ASSERT_TRUE(beginning.ok()) << beginning.status();
  ASSERT_EQ((*beginning)->blocks().size(), 2u);
  client::StoreClient store(nodes_["a"]->options());
  ASSERT_EQ(store.GetStats()->lease_count(), 1);
  const auto found = Lookup(*worker, data);
  ASSERT_EQ(found->token_count(), kTokenCount);
  EXPECT_EQ(store.GetStats()->lease_count(), 2) << "one each";
}

TEST_F(NodesTest, ANodeThatComesFindsWhatTheOwnerBeforeHas) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  // Put where it belongs among the two; of three it is the newcomer's.
  map_nodes_.push_back({"c", "c:1", "", 1, "x"});
  TestSequence data = SequenceOf("c");
  map_nodes_.pop_back();
  const auto keys = ComputeBlockKeys(client::DefaultKeyContext(data.spec), data.token_ids,
                                     data.spec.block_tokens);
  const std::string before = cluster::ShardMap(map_nodes_, 1).OwnerOf(keys.front())->name;
  const auto at_owner = Attach(before);
  const auto put = Put(*at_owner, data);
  StartNode("c");
  WaitForNodes(3);
  const auto worker = Attach("c");
  EXPECT_EQ(Lookup(*worker, data)->token_count(), kTokenCount);
}

TEST_F(NodesTest, ANodeThatDiesCostsAWaitOnceAndNoError) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  const TestSequence data = SequenceOf("b");
  const auto worker = Attach("a");
  nodes_["b"]->Kill(ClusterService::kStore);
  const absl::Time start = absl::Now();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Lookup(*worker, data)->token_count(), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  // It puts the chain itself then, and reads it.
  EXPECT_EQ(Put(*worker, data)->token_count(), kTokenCount);
  nodes_.erase("b");
  for (int i = 0; i < 1000 && !absl::StrContains(nodes_["a"]->Logs(), "nodes=1 revision="); ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
}

// The owner has the same tokens of the same model, but quantized otherwise.
TEST_F(NodesTest, ANodeOfAnotherCacheSpecGivesNothing) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  const TestSequence data = SequenceOf("b");
  TestSequence other = data;
  other.spec = SmallSpec(KeyFormat::kK6);
  auto at_b = client::Worker::Attach(nodes_["b"]->options(), other.spec);
  ASSERT_TRUE(at_b.ok()) << at_b.status();
  const auto put_there = Put(**at_b, other);
  const auto worker = Attach("a");
  EXPECT_EQ(Lookup(*worker, data)->token_count(), 0);
  EXPECT_THAT(nodes_["a"]->Logs(), ::testing::HasSubstr("reason=CACHE_NOT_FOUND"));
  const auto put = Put(*worker, data);
  cluster_ = std::move(nodes_["a"]);
  const auto request = OpenRequest("r");
  auto attention = client::Attention::Open(*worker, *put, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  ReadAndCheck(**attention, data, kTokenCount, 5);
  nodes_["a"] = std::move(cluster_);
}

// Two processes are told the same name. The second stays out, says why, and serves alone.
TEST_F(NodesTest, ANodeOfATakenNameServesAlone) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  const TestSequence data = SequenceOf("b");
  const auto at_b = Attach("b");
  const auto put_there = Put(*at_b, data);
  nodes_["first"] = std::move(nodes_["a"]);
  const std::vector<cluster::Node> map_nodes = map_nodes_;
  StartNode("a", "elsewhere:1");
  map_nodes_ = map_nodes;
  for (int i = 0; i < 1000 && !absl::StrContains(nodes_["a"]->Logs(), "cluster_not_joined"); ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_THAT(nodes_["a"]->Logs(),
              ::testing::HasSubstr("node a is registered by the process at a:1, this one is at "
                                   "elsewhere:1; give each node a name of its own"));
  const auto worker = Attach("a");
  const auto put = Put(*worker, data);
  EXPECT_EQ(put->token_count(), kTokenCount);
  EXPECT_EQ(Lookup(*at_b, data)->token_count(), kTokenCount) << "the others go on";
}

// The map is of yesterday: at the owner's address another store listens by now.
TEST_F(NodesTest, AStaleMapCostsHitsAndGivesNoWrongBytes) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  const TestSequence data = SequenceOf("b");
  const std::string bulk = map_nodes_.back().bulk_target;
  etcd_.Kill();
  nodes_.erase("b");
  auto other = Cluster::Start(
      ClusterShape::kAllInOne, "",
      {absl::StrCat("server:\n  tcp_security: insecure\nkvstore:\n  bulk_address: ", bulk, "\n"),
       ""});
  ASSERT_TRUE(other.ok()) << other.status();
  nodes_["other"] = *std::move(other);
  // It has the same cache, and another chain in it.
  const auto at_other = Attach("other");
  const TestSequence another(SmallSpec(), kTokenCount, 999'999);
  const auto put_another = Put(*at_other, another);
  const auto worker = Attach("a");
  EXPECT_EQ(Lookup(*worker, data)->token_count(), 0);
  // What it has by the same name is the same, whoever it is.
  const auto put = Put(*at_other, data);
  absl::SleepFor(absl::Seconds(2));  // a node that was away is left alone for a while
  const auto found = Lookup(*worker, data);
  ASSERT_EQ(found->token_count(), kTokenCount);
  cluster_ = std::move(nodes_["a"]);
  const auto request = OpenRequest("r");
  auto attention = client::Attention::Open(*worker, *found, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  ReadAndCheck(**attention, data, kTokenCount, 5);
  nodes_["a"] = std::move(cluster_);
}

TEST_F(NodesTest, WithoutEtcdLookupsGoOn) {
  StartNode("a");
  StartNode("b");
  WaitForNodes(2);
  const TestSequence data = SequenceOf("b");
  const auto at_b = Attach("b");
  const auto put = Put(*at_b, data);
  etcd_.Kill();
  absl::SleepFor(absl::Seconds(3));  // longer than a registration lives
  const auto worker = Attach("a");
  EXPECT_EQ(Lookup(*worker, data)->token_count(), kTokenCount);
}

}  // namespace
}  // namespace certkv
