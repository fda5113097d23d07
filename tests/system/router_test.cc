// Cache-aware routing over two real stores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cpp/prefix_router.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/block_key.h"
#include "kernels/core/status.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::PrefixCounts;
using client::PrefixRouter;
using client::PrefixScore;

constexpr int kTokens = 200;

class RouterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (auto* cluster : {&a_, &b_}) {
      auto started = Cluster::Start(ClusterShape::kAllInOne, "");
      ASSERT_TRUE(started.ok()) << started.status();
      *cluster = *std::move(started);
    }
    auto router = PrefixRouter::Start(
        {}, {{"a", a_->options().kvstore_target}, {"b", b_->options().kvstore_target}});
    ASSERT_TRUE(router.ok()) << router.status();
    router_ = *std::move(router);
    keys_ = ComputeBlockKeys(client::DefaultKeyContext(data_.spec), data_.token_ids,
                             data_.spec.block_tokens);
    blocks_ = static_cast<int32_t>(keys_.size());
  }
  std::unique_ptr<client::Worker> Attach(const Cluster& cluster) {
    auto worker = client::Worker::Attach(cluster.options(), data_.spec);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }
  // Puts the whole sequence.
  void Put(client::Worker& worker) {
    const auto sequence =
        worker.PutSequence(data_.token_ids, data_.layers(), client::DefaultKeyContext(data_.spec));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
  }
  std::map<std::string, PrefixScore> Scores() {
    std::map<std::string, PrefixScore> scores;
    for (const PrefixScore& score : router_->Score(keys_)) scores[score.node] = score;
    return scores;
  }
  // Waits until node `name` has so many blocks and is (or is not) current.
  bool Shows(const std::string& name, int32_t blocks, bool is_current = true) {
    for (int i = 0; i < 1500; ++i) {
      const PrefixScore score = Scores()[name];
      if (score.counts.memory_blocks == blocks && score.is_current == is_current) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }

  const TestSequence data_{SmallSpec(), kTokens, 7};
  std::unique_ptr<Cluster> a_;
  std::unique_ptr<Cluster> b_;
  std::unique_ptr<PrefixRouter> router_;
  std::vector<BlockKey> keys_;
  int32_t blocks_ = 0;
};

TEST_F(RouterTest, FollowsWhatEachNodeHas) {
  ASSERT_GE(blocks_, 3);
  EXPECT_TRUE(Shows("a", 0));
  EXPECT_TRUE(Shows("b", 0));
  const auto at_a = Attach(*a_);
  const auto at_b = Attach(*b_);
  Put(*at_b);
  EXPECT_TRUE(Shows("b", blocks_));
  EXPECT_EQ(router_->Score(keys_)[0].node, "b");
  Put(*at_a);
  EXPECT_TRUE(Shows("a", blocks_));
  EXPECT_EQ(Scores()["a"].counts, (PrefixCounts{blocks_, blocks_, blocks_}));
  EXPECT_EQ(router_->Score(keys_)[0].node, "a") << "of equal ones by name";

  // A dropped block takes those after it along.
  client::StoreClient store(b_->options());
  const auto cache = store.RegisterCache(data_.spec);
  const auto session = store.AttachWorker(cache->cache);
  ASSERT_TRUE(session.ok()) << session.status();
  const auto dropped = store.DropBlocks(session->session, {keys_[1]});
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(*dropped, blocks_ - 1);
  EXPECT_TRUE(Shows("b", 1));
}

TEST_F(RouterTest, ListsWhatWasThereBefore) {
  const auto worker = Attach(*a_);
  Put(*worker);
  const auto late = *PrefixRouter::Start({}, {{"a", a_->options().kvstore_target}});
  router_->SetNodes({}).IgnoreError();
  EXPECT_TRUE(router_->Score(keys_).empty());
  for (int i = 0; i < 1500 && !late->Score(keys_)[0].is_current; ++i) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(late->Score(keys_)[0].counts.memory_blocks, blocks_);
}

TEST_F(RouterTest, AStoreThatIsStartedAgainIsListedAnew) {
  {
    const auto worker = Attach(*a_);
    Put(*worker);
  }
  ASSERT_TRUE(Shows("a", blocks_));
  a_->Kill(ClusterService::kStore);
  EXPECT_TRUE(Shows("a", blocks_, /*is_current=*/false)) << "what it had is still the best guess";
  ASSERT_TRUE(a_->Restart(ClusterService::kStore).ok());
  EXPECT_TRUE(Shows("a", 0));
  const auto worker = Attach(*a_);
  Put(*worker);
  EXPECT_TRUE(Shows("a", blocks_));
}

TEST_F(RouterTest, NodesAreCheckedAndMayChange) {
  EXPECT_EQ(ReasonOf(router_->SetNodes({{"a", "x"}, {"a", "y"}})), "NODE_INVALID");
  EXPECT_EQ(ReasonOf(router_->SetNodes({{"", "x"}})), "NODE_INVALID");
  ASSERT_TRUE(Shows("a", 0));
  // One that stays as it was stays current; a name that moves is another store.
  ASSERT_TRUE(
      router_->SetNodes({{"a", a_->options().kvstore_target}, {"b", "unix:/nowhere"}}).ok());
  EXPECT_TRUE(Scores()["a"].is_current);
  EXPECT_TRUE(Shows("b", 0, /*is_current=*/false));
}

}  // namespace
}  // namespace certkv
