// Bits flipped in the memory of a running store: a read is repaired, or says DATA_LOSS.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/status.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

// The scrubber is off, so that the reader is the one who finds the damage.
constexpr char kVerifyEveryRead[] =
    "kvstore:\n  scrub_rate: 0\ncertifier:\n  verify_every_read: true\n";
constexpr char kFastScrub[] = "kvstore:\n  scrub_rate: 1GiB\n";

class CorruptionTest : public SystemTest {
 protected:
  void Open(const std::string& config, ReadMode mode) {
    StartCluster(config);
    data_ = std::make_unique<TestSequence>(SmallSpec(), 300, 31);
    worker_ = AttachWorker(data_->spec);
    sequence_ = Put(*worker_, *data_);
    request_ = OpenRequest("corruption", 0.2f, mode);
    auto attention = client::Attention::Open(*worker_, *sequence_, *request_);
    ASSERT_TRUE(attention.ok()) << attention.status();
    attention_ = *std::move(attention);
    ReadAndCheck(*attention_, *data_, 300, 1);
  }

  // Flips a bit of the store's own mapping of a slab, as a cosmic ray would.
  void Flip(const std::string& slab, int64_t offset) {
    const pid_t pid = cluster_->pid(ClusterService::kStore);
    std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
    uint64_t begin = 0;
    for (std::string line; std::getline(maps, line) && begin == 0;) {
      if (!absl::StrContains(line, slab) || !absl::StrContains(line, " rw-s ")) continue;
      ASSERT_EQ(std::sscanf(line.c_str(), "%lx-", &begin), 1);
    }
    ASSERT_NE(begin, 0u) << "the store has mapped " << slab;
    const int memory = open(absl::StrCat("/proc/", pid, "/mem").c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(memory, 0) << "a test may write its child's memory";
    uint8_t byte = 0;
    const auto at = static_cast<off_t>(begin + offset);
    ASSERT_EQ(pread(memory, &byte, 1, at), 1);
    byte ^= 0x20;
    ASSERT_EQ(pwrite(memory, &byte, 1, at), 1);
    close(memory);
  }
  void FlipScan(int32_t block) {
    Flip("certkv-device",
         worker_->device_layout().scan_offset(sequence_->blocks()[block].device.slot, 0, 0, 0) +
             worker_->device_layout().tile_layout(0).coarse_offset + 100);
  }
  void FlipOriginal(int32_t block) {
    Flip("certkv-backing",
         worker_->backing_layout().key_offset(sequence_->blocks()[block].backing.slot, 0, 0) + 333);
  }
  kvstore::v1::Stats Stats() { return *client::StoreClient(cluster_->options()).GetStats(); }

  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<client::Attention> attention_;
};

TEST_P(CorruptionTest, ADamagedPlaneInTheMiddleOfAttendIsRepaired) {
  Open(kVerifyEveryRead, ReadMode::kEnforce);
  FlipScan(2);
  for (const client::ReadResult& result : ReadAndCheck(*attention_, *data_, 300, 2)) {
    EXPECT_FALSE(result.in_process) << "the certifier read the repaired block";
  }
  EXPECT_EQ(Stats().blocks_rebuilt(), 1);
  EXPECT_EQ(Stats().blocks_lost(), 0);
}

TEST_P(CorruptionTest, ADamagedOriginalIsDataLossAndTheBlockVanishes) {
  Open(kVerifyEveryRead, ReadMode::kExact);
  FlipOriginal(2);
  const std::vector<float> queries = TestQueries(data_->spec, 3);
  client::ReadRequest read;
  read.query_position = 299;
  read.queries = queries.data();
  const auto results = attention_->Attend({read});
  ASSERT_TRUE(results.ok());
  EXPECT_TRUE(absl::IsDataLoss((*results)[0].status)) << (*results)[0].status;
  EXPECT_TRUE((*results)[0].outputs.empty());
  EXPECT_EQ(Stats().blocks_lost(), 1);
  const auto found = worker_->Lookup(data_->token_ids, client::DefaultKeyContext(data_->spec));
  ASSERT_TRUE(found.ok());
  EXPECT_EQ((*found)->blocks().size(), 2u);
  // In this process it is found as well.
  const auto here = client::AttendExactInProcess(*worker_, *sequence_, read);
  EXPECT_EQ(ReasonOf(here.status()), "ORIGINAL_CHECKSUM_MISMATCH") << here.status();
}

TEST_P(CorruptionTest, TheScrubberFindsWhatNobodyReads) {
  Open(kFastScrub, ReadMode::kEnforce);
  FlipScan(1);
  for (int i = 0; i < 1000 && Stats().blocks_rebuilt() == 0; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(Stats().blocks_rebuilt(), 1);
  ReadAndCheck(*attention_, *data_, 300, 4);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CorruptionTest, ::testing::Values(ClusterShape::kAllInOne),
                         ShapeName);

}  // namespace
}  // namespace certkv
