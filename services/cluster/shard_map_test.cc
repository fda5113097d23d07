#include "services/cluster/shard_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::cluster {
namespace {

using ::testing::HasSubstr;

constexpr int kRoots = 20'000;

// Keys are SHA-256 values, so any spread of bytes does; this one is simple to write down.
BlockKey Root(int number) {
  std::string bytes(32, '\0');
  for (size_t i = 0; i < 4; ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return *BlockKeyFromBytes(bytes);
}

Node MakeNode(const std::string& name, int32_t weight = 1) {
  return {name, name + ":7000", name + ":7001", weight, "i"};
}

std::vector<Node> MakeNodes(int count) {
  std::vector<Node> nodes;
  for (int i = 0; i < count; ++i) nodes.push_back(MakeNode(absl::StrCat("node-", i)));
  return nodes;
}

std::vector<std::string> OwnersIn(const ShardMap& map) {
  std::vector<std::string> owners;
  for (int i = 0; i < kRoots; ++i) owners.push_back(map.OwnerOf(Root(i))->name);
  return owners;
}

TEST(ShardMapTest, WithoutNodesNobodyOwnsAnything) {
  EXPECT_EQ(ShardMap().OwnerOf(Root(1)), nullptr);
  EXPECT_EQ(ShardMap().Find("a"), nullptr);
}

TEST(ShardMapTest, EveryNodeOwnsItsShare) {
  const ShardMap map({MakeNode("a"), MakeNode("b", 2), MakeNode("c", 5)}, 1);
  std::map<std::string, int> owned;
  for (const std::string& owner : OwnersIn(map)) ++owned[owner];
  // Within five standard deviations of the binomial distribution.
  for (const auto& [name, share] :
       std::map<std::string, double>{{"a", 1.0 / 8}, {"b", 2.0 / 8}, {"c", 5.0 / 8}}) {
    EXPECT_NEAR(owned[name], kRoots * share, 5 * std::sqrt(kRoots * share * (1 - share))) << name;
  }
}

TEST(ShardMapTest, ANodeThatComesOrGoesMovesOnlyItsShare) {
  std::vector<Node> nodes = MakeNodes(9);
  const std::vector<std::string> before = OwnersIn(ShardMap(nodes, 1));
  nodes.push_back(MakeNode("late"));
  const std::vector<std::string> after = OwnersIn(ShardMap(nodes, 2));
  int moved = 0;
  for (int i = 0; i < kRoots; ++i) {
    if (before[i] == after[i]) continue;
    ++moved;
    // What moves goes to the newcomer, or, read backwards, is what the leaver had.
    EXPECT_EQ(after[i], "late") << i;
  }
  EXPECT_NEAR(moved, kRoots / 10, 5 * std::sqrt(kRoots * 0.09));
}

TEST(ShardMapTest, AWeightThatRisesTakesAndGivesNothing) {
  std::vector<Node> nodes = MakeNodes(4);
  const std::vector<std::string> before = OwnersIn(ShardMap(nodes, 1));
  nodes[2].weight = 3;
  const std::vector<std::string> after = OwnersIn(ShardMap(nodes, 2));
  int moved = 0;
  for (int i = 0; i < kRoots; ++i) {
    if (before[i] == after[i]) continue;
    ++moved;
    EXPECT_EQ(after[i], "node-2") << i;
  }
  EXPECT_NEAR(moved, kRoots * (0.5 - 0.25), 5 * std::sqrt(kRoots * 0.25));
}

TEST(ShardMapTest, TheOrderOfNodesAndWhatElseTheySayChangesNoOwner) {
  std::vector<Node> nodes = MakeNodes(7);
  const std::vector<std::string> before = OwnersIn(ShardMap(nodes, 1));
  std::reverse(nodes.begin(), nodes.end());
  for (Node& node : nodes) {
    node.target = "elsewhere:1";
    node.instance = "other";
  }
  EXPECT_EQ(OwnersIn(ShardMap(nodes, 2)), before);
}

TEST(ShardMapTest, TheSecondInRankIsTheOwnerWithoutTheFirst) {
  std::vector<Node> nodes = MakeNodes(6);
  nodes[4].weight = 3;
  const ShardMap map(nodes, 1);
  for (int i = 0; i < 300; ++i) {
    const auto ranked = map.RankedFor(Root(i), 2);
    ASSERT_EQ(ranked.size(), 2u);
    EXPECT_EQ(ranked[0], map.OwnerOf(Root(i)));
    std::vector<Node> others;
    for (const Node& node : nodes) {
      if (node.name != ranked[0]->name) others.push_back(node);
    }
    EXPECT_EQ(ranked[1]->name, ShardMap(others, 2).OwnerOf(Root(i))->name) << i;
  }
  EXPECT_EQ(map.RankedFor(Root(1), 99).size(), nodes.size());
  EXPECT_TRUE(ShardMap().RankedFor(Root(1), 2).empty());
}

// Nodes of two versions must agree: these are part of the wire.
TEST(ShardMapTest, OwnersAreThoseOfOtherVersions) {
  const ShardMap map({MakeNode("a"), MakeNode("b", 2), MakeNode("c", 5)}, 1);
  std::string owners;
  for (int i = 0; i < 24; ++i) owners += map.OwnerOf(Root(i))->name;
  EXPECT_EQ(owners, "bccbbbccccccacbcacbabccb");
}

TEST(ShardMapTest, FindsNodesByName) {
  const ShardMap map(MakeNodes(5), 7);
  ASSERT_NE(map.Find("node-3"), nullptr);
  EXPECT_EQ(map.Find("node-3")->target, "node-3:7000");
  EXPECT_EQ(map.Find("node-33"), nullptr);
  EXPECT_EQ(map.revision(), 7);
}

TEST(NodeTextTest, ComesBackAsItWas) {
  const Node node{"gpu-7.rack-2", "10.0.0.7:7000", "10.0.0.7:7001", 40, "00ff"};
  const auto read = NodeFromText(NodeToText(node));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, node);
}

TEST(NodeTextTest, PassesOverWhatAnotherVersionAdds) {
  const auto read = NodeFromText(
      R"({"name":"a","target":"a:1","weight":2,"instance":"x","rack":"r1","extra":{"deep":[1]}})");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->weight, 2);
  EXPECT_EQ(read->bulk_target, "");
}

TEST(NodeTextTest, RefusesWhatIsNoNode) {
  const std::string good = R"("target":"a:1","weight":1,"instance":"x"})";
  for (const std::string& text : std::vector<std::string>{
           "", "[]", "null", "{", "\xff\xfe", R"({"name":"a"})", R"({"name":7,)" + good,
           R"({"name":"a b",)" + good, R"({"name":"",)" + good,
           R"({"name":")" + std::string(65, 'a') + "\"," + good,
           R"({"name":"a","target":"","weight":1,"instance":"x"})",
           R"({"name":"a","target":"a:1\u0000","weight":1,"instance":"x"})",
           R"({"name":"a","target":"a:1","weight":0,"instance":"x"})",
           R"({"name":"a","target":"a:1","weight":1000001,"instance":"x"})",
           R"({"name":"a","target":"a:1","weight":99999999999999999999,"instance":"x"})",
           R"({"name":"a","target":"a:1","weight":1.5,"instance":"x"})",
           R"({"name":"a","target":"a:1","weight":1,"instance":""})", std::string(5000, ' ')}) {
    const auto node = NodeFromText(text);
    ASSERT_FALSE(node.ok()) << text;
    EXPECT_EQ(ReasonOf(node.status()), "NODE_INVALID") << text;
    EXPECT_THAT(std::string(node.status().message()), HasSubstr("node's")) << text;
  }
}

}  // namespace
}  // namespace certkv::cluster
