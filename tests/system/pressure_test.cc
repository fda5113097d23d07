// More writes than memory: what it takes, who loses what, and how refused calls come back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using testing::AnyOf;

constexpr int64_t kMiB = int64_t{1} << 20;

// A line of /proc/PID/status, in bytes: VmRSS, or VmHWM, the most that it ever was.
int64_t MemoryOf(pid_t pid, const std::string& name) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/status"));
  for (std::string line; std::getline(file, line);) {
    long kibibytes = 0;
    if (std::sscanf(line.c_str(), (name + ": %ld kB").c_str(), &kibibytes) == 1) {
      return int64_t{kibibytes} << 10;
    }
  }
  ADD_FAILURE() << "process " << pid << " has no " << name;
  return 0;
}

class SystemPressureTest : public SystemTest {
 protected:
  // A store of so many slots in both tiers.
  static std::string Config(int32_t slots, const std::string& more = "") {
    const CacheSpec spec = SmallSpec();
    return absl::StrCat(
        "kvstore:\n  device_memory: ", SlabLayout(spec, SlabKind::kDevice, slots).slab_bytes(),
        "\n  backing_memory: ", SlabLayout(spec, SlabKind::kBacking, slots).slab_bytes(), "\n",
        more);
  }
  static TestSequence DataOf(int number, int32_t blocks) {
    return TestSequence(SmallSpec(), 64 * blocks, static_cast<uint32_t>(100 + number));
  }
  std::unique_ptr<client::Worker> AttachAs(const std::string& tenant, int64_t pressure_wait_ms) {
    client::Options options = cluster_->options();
    options.tenant = tenant;
    options.worker_name = "worker-of-" + tenant;
    options.pressure_wait_ms = pressure_wait_ms;
    options.staging_slot_count = 16;
    auto worker = client::Worker::Attach(options, SmallSpec());
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  static absl::StatusOr<std::unique_ptr<client::Sequence>> TryPut(client::Worker& worker,
                                                                  const TestSequence& data) {
    return worker.PutSequence(data.token_ids, data.layers(),
                              client::DefaultKeyContext(worker.spec()));
  }
  size_t CountBlocks(client::Worker& worker, const TestSequence& data) {
    const auto found = worker.Lookup(data.token_ids, client::DefaultKeyContext(worker.spec()));
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? (*found)->blocks().size() : 0;
  }
  kvstore::v1::Stats Stats() { return *client::StoreClient(cluster_->options()).GetStats(); }
};

TEST_P(SystemPressureTest, MemoryStaysUnderItsLimitThroughAWriteBurst) {
  // The scrubber reads through a second map, whose pages RSS would count again.
  StartCluster(
      "kvstore:\n  device_memory: 8MiB\n  backing_memory: 16MiB\n  staging_memory: 8MiB\n"
      "  memory_limit: 32MiB\n  seal_queue_limit: 4\n  scrub_rate: 0\n"
      "kvstore_pools:\n  - {name: team, tenants: \"t0, t1, t2\"}\n");
  const pid_t pid = cluster_->pid(ClusterService::kStore);
  const int64_t before = MemoryOf(pid, "VmRSS");
  constexpr int kWriters = 6;
  constexpr int kSequencesEach = 10;
  constexpr int32_t kBlocks = 48;
  std::atomic<int64_t> blocks{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i) {
    writers.emplace_back([&, i] {
      const auto worker = AttachAs(absl::StrCat("t", i % 3), 60'000);
      for (int k = 0; worker != nullptr && k < kSequencesEach; ++k) {
        const auto put = TryPut(*worker, DataOf(i * kSequencesEach + k, kBlocks));
        // Six writers may lease so much together that none can go on: then it is said.
        if (put.ok()) blocks += kBlocks;
        EXPECT_TRUE(put.ok() || RetryDelayMsOf(put.status()) > 0) << put.status();
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  const kvstore::v1::Stats stats = Stats();
  EXPECT_LE(stats.memory_bytes(), 32 * kMiB);
  const int64_t written = blocks * SlabLayout::SlotBytes(SmallSpec(), SlabKind::kBacking);
  const int64_t most = MemoryOf(pid, "VmHWM") - before;
  std::printf("%ld MiB of originals written, memory grew by at most %ld MiB of 32 MiB\n",
              static_cast<long>(written / kMiB), static_cast<long>(most / kMiB));
  EXPECT_GT(written, 5 * 16 * kMiB) << "not vacuous";
  EXPECT_GT(most, 16 * kMiB) << "the test sees the memory at all";
  // Beside the slabs: records of blocks, calls in gRPC's buffers, stacks of threads.
  EXPECT_LT(most, 32 * kMiB + 32 * kMiB);
}

TEST_P(SystemPressureTest, RefusedWriterComesBackWhenThereIsRoom) {
  StartCluster(Config(8));
  const auto holder = AttachAs("", 0);
  const auto writer = AttachAs("", 60'000);
  auto held = TryPut(*holder, DataOf(0, 8));
  ASSERT_TRUE(held.ok()) << held.status();
  const TestSequence data = DataOf(1, 4);
  const absl::Status refused = TryPut(*holder, data).status();
  EXPECT_EQ(ReasonOf(refused), "STORE_FULL") << "who waits for nothing is told at once";
  EXPECT_GT(RetryDelayMsOf(refused), 0);
  absl::Status late;
  absl::Notification begins;
  std::thread waiting([&] {
    begins.Notify();
    late = TryPut(*writer, data).status();
  });
  begins.WaitForNotification();
  held->reset();
  waiting.join();
  EXPECT_TRUE(late.ok()) << late;
  EXPECT_EQ(CountBlocks(*holder, data), 4u);
}

TEST_P(SystemPressureTest, AppendedTailWaitsForRoomToo) {
  StartCluster(Config(4));
  const auto holder = AttachAs("", 0);
  const auto writer = AttachAs("", 60'000);
  const TestSequence data = DataOf(1, 2);
  TestSequence beginning = data;
  beginning.token_ids.resize(127);
  auto sequence =
      writer->PutSequence(beginning.token_ids, data.layers(), client::DefaultKeyContext(data.spec));
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  auto held = TryPut(*holder, DataOf(0, 3));
  ASSERT_TRUE(held.ok()) << held.status();
  absl::Status appended;
  absl::Notification begins;
  std::thread waiting([&] {
    begins.Notify();
    appended = writer->AppendToken(**sequence, data.token_ids, data.layers_at(127),
                                   client::DefaultKeyContext(data.spec));
  });
  begins.WaitForNotification();
  held->reset();
  waiting.join();
  EXPECT_TRUE(appended.ok()) << appended;
  EXPECT_EQ((*sequence)->blocks().size(), 2u) << "no token of the tail was lost";
}

TEST_P(SystemPressureTest, TenantKeepsItsShareAndItsLimit) {
  const int64_t slot = SlabLayout::SlotBytes(SmallSpec(), SlabKind::kBacking);
  // Shares are of a pool; tenants in none have caches of their own.
  StartCluster(
      Config(12, absl::StrCat("kvstore_pools:\n  - {name: team, tenants: \"small, large\"}\n",
                              "kvstore_tenants:\n  - tenant: small\n", "    backing_guaranteed: ",
                              4 * slot, "\n    backing_limit: ", 6 * slot, "\n")));
  const auto small = AttachAs("small", 0);
  const auto large = AttachAs("large", 0);
  const TestSequence kept = DataOf(0, 4);
  ASSERT_TRUE(TryPut(*small, kept).ok());
  for (int i = 1; i <= 6; ++i) ASSERT_TRUE(TryPut(*large, DataOf(i, 4)).ok());
  EXPECT_EQ(CountBlocks(*small, kept), 4u) << "written first, never read, but guaranteed";
  for (int i = 11; i <= 14; ++i) ASSERT_TRUE(TryPut(*small, DataOf(i, 2)).ok());
  EXPECT_EQ(ReasonOf(TryPut(*small, DataOf(20, 7)).status()), "QUOTA_EXCEEDED");
  bool is_shown = false;
  const kvstore::v1::Stats stats = Stats();
  for (const auto& tenant : stats.caches(0).tenants()) {
    if (tenant.tenant() != "small") continue;
    is_shown = true;
    EXPECT_LE(tenant.backing().used(), 6);
    EXPECT_EQ(tenant.backing().guaranteed(), 4);
    EXPECT_EQ(tenant.backing().limit(), 6);
  }
  EXPECT_TRUE(is_shown);
}

TEST_P(SystemPressureTest, PinnedSequenceStaysThroughABurst) {
  StartCluster(Config(12));
  const auto worker = AttachAs("", 0);
  const TestSequence prompt = DataOf(0, 4);
  {
    const auto sequence = TryPut(*worker, prompt);
    ASSERT_TRUE(sequence.ok());
    ASSERT_TRUE(worker->PinSequence(**sequence, true, 3'600'000).ok());
  }
  for (int i = 1; i <= 6; ++i) ASSERT_TRUE(TryPut(*worker, DataOf(i, 4)).ok());
  EXPECT_EQ(CountBlocks(*worker, prompt), 4u);
  {
    const auto sequence = TryPut(*worker, prompt);
    ASSERT_TRUE(worker->PinSequence(**sequence, false).ok());
  }
  EXPECT_EQ(Stats().caches(0).blocks_pinned(), 0);
}

TEST_P(SystemPressureTest, ACertifierKeepsNoCacheThatNoWorkerUses) {
  constexpr int kCacheLimit = 2;
  constexpr int kModels = 3 * kCacheLimit;
  StartCluster(absl::StrCat("kvstore:\n  device_memory: 8MiB\n  backing_memory: 16MiB\n",
                            "  memory_limit: 128MiB\n  cache_limit: ", kCacheLimit, "\n"));
  const pid_t pid = cluster_->pid(ClusterService::kStore);
  for (int i = 0; i < 2 * kModels; ++i) {  // each model twice: the certifier attaches again
    CacheSpec spec = SmallSpec();
    spec.model = absl::StrCat("model-", i % kModels);
    const TestSequence data(spec, 64 * 4, static_cast<uint32_t>(i));
    const auto worker = AttachWorker(spec);
    ASSERT_NE(worker, nullptr) << "model " << i;
    const auto sequence = Put(*worker, data);
    ASSERT_NE(sequence, nullptr);
    const auto request = OpenRequest(absl::StrCat("request-", i));
    ASSERT_NE(request, nullptr);
    auto attention = client::Attention::Open(*worker, *sequence, *request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    for (const client::ReadResult& result : ReadAndCheck(**attention, data, 64 * 4, 7)) {
      EXPECT_FALSE(result.in_process) << "the certifier read it";
    }
  }
  EXPECT_LE(Stats().caches_size(), kCacheLimit);
  const std::string log = cluster_->Logs();
  EXPECT_TRUE(absl::StrContains(log, "made room for another"));
  EXPECT_FALSE(absl::StrContains(log, "store_lost")) << "the store was there all the time";
  // What the certifier has mapped of the caches that are gone would show here.
  EXPECT_LT(MemoryOf(pid, "RssShmem"), kCacheLimit * (8 + 16) * kMiB + 16 * kMiB);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SystemPressureTest, ::testing::Values(ClusterShape::kAllInOne),
                         ShapeName);

}  // namespace
}  // namespace certkv
