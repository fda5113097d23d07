// A store with a tier on disk: more sequences than memory, kill -9, restart.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/slab_layout.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

constexpr int kSequences = 12;
constexpr int32_t kTokens = 64 * 8 + 10;

class SpillTest : public SystemTest {
 protected:
  // Memory for a third of the sequences.
  static std::string Config(const std::string& directory) {
    const CacheSpec spec = SmallSpec();
    const int32_t slots = kSequences * 8 / 3;
    return absl::StrCat(
        "kvstore:\n  device_memory: ", SlabLayout(spec, SlabKind::kDevice, slots).slab_bytes(),
        "\n  backing_memory: ", SlabLayout(spec, SlabKind::kBacking, slots).slab_bytes(),
        "\n  spill_directory: ", directory, "\n");
  }
  static TestSequence DataOf(int number) {
    return TestSequence(SmallSpec(), kTokens, static_cast<uint32_t>(100 + number));
  }
  kvstore::v1::Stats Stats() { return *client::StoreClient(cluster_->options()).GetStats(); }
  // Looks a sequence up and reads what was found, by the certifier.
  size_t LookUpAndRead(client::Worker& worker, int number) {
    const TestSequence data = DataOf(number);
    auto sequence = worker.Lookup(data.token_ids, client::DefaultKeyContext(worker.spec()));
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    if (!sequence.ok() || (*sequence)->blocks().empty()) return 0;
    const auto request = OpenRequest(absl::StrCat("read-", ++requests_));
    const auto attention = client::Attention::Open(worker, **sequence, *request);
    EXPECT_TRUE(attention.ok()) << attention.status();
    if (attention.ok()) ReadAndCheck(**attention, data, (*sequence)->token_count(), 5);
    return (*sequence)->blocks().size();
  }

  int requests_ = 0;
};

TEST_P(SpillTest, MoreThanMemoryIsFoundAlsoAfterKillNine) {
  char directory[] = "/tmp/certkv-spill-XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  StartCluster(Config(directory));
  {
    const auto worker = AttachWorker(SmallSpec());
    for (int i = 0; i < kSequences; ++i) Put(*worker, DataOf(i));
    for (int i = 0; i < kSequences; ++i) EXPECT_EQ(LookUpAndRead(*worker, i), 8u) << i;
  }
  const kvstore::v1::Stats before = Stats();
  EXPECT_EQ(before.blocks_evicted(), 0);
  EXPECT_GT(before.blocks_spilled(), 0);
  EXPECT_GT(before.blocks_restored(), 0);
  EXPECT_EQ(before.spill().error(), "");
  cluster_->Kill(ClusterService::kStore);
  ASSERT_TRUE(cluster_->Restart(ClusterService::kStore).ok());
  const auto worker = AttachWorker(SmallSpec());
  const kvstore::v1::Stats after = Stats();
  EXPECT_GE(after.spill().blocks(), before.spill().blocks()) << "every block that was written";
  size_t found = 0;
  for (int i = 0; i < kSequences; ++i) found += LookUpAndRead(*worker, i);
  EXPECT_GE(found, static_cast<size_t>(kSequences * 8 * 2 / 3));
  EXPECT_EQ(Stats().spill().blocks_damaged(), 0);
  ASSERT_TRUE(cluster_->Stop().ok());
  std::filesystem::remove_all(directory);
}

TEST_P(SpillTest, AStoreThatStopsWritesAllDown) {
  char directory[] = "/tmp/certkv-spill-XXXXXX";
  ASSERT_NE(mkdtemp(directory), nullptr);
  StartCluster(Config(directory));
  {
    const auto worker = AttachWorker(SmallSpec());
    Put(*worker, DataOf(0));
  }
  ASSERT_TRUE(cluster_->Stop().ok());
  ASSERT_TRUE(cluster_->Restart(ClusterService::kStore).ok());
  const auto worker = AttachWorker(SmallSpec());
  EXPECT_EQ(LookUpAndRead(*worker, 0), 8u);
  ASSERT_TRUE(cluster_->Stop().ok());
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SpillTest, ::testing::Values(ClusterShape::kAllInOne), ShapeName);

}  // namespace
}  // namespace certkv
