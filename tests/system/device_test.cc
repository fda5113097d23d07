// The system with device slabs: store and certifier share a GPU, which here is host memory. What is
// read there is certified as on the host, and whatever the GPU fails to do, a read is certified or
// exact, or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda.h"
#include "kernels/ops/device_runtime.h"
#include "kernels/ops/imported_slab.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kTokenCount = 400;

class DeviceTest : public SystemTest {
 protected:
  void StartOnDevice(const std::string& choice = "cuda", bool pins_originals = false) {
    ClusterAccess access;
    // Small, because host memory that stands for a GPU's is filled when it is taken.
    access.store_yaml = absl::StrCat(
        "kvstore:\n  device_memory: 8MiB\n  backing_memory: 32MiB\n  device: ", choice, "\n");
    access.certifier_yaml =
        absl::StrCat("certifier:\n  device: ", choice,
                     "\n  pin_originals: ", pins_originals ? "true" : "false", "\n");
    access.on_device = true;
    auto cluster = Cluster::Start(GetParam(), "", access);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  void OpenSequence(uint32_t seed = 41) {
    attention_.reset();
    request_.reset();
    sequence_.reset();
    worker_.reset();
    data_ = std::make_unique<TestSequence>(SmallSpec(), kTokenCount, seed);
    worker_ = AttachWorker(data_->spec);
    ASSERT_NE(worker_, nullptr);
    sequence_ = Put(*worker_, *data_);
    ASSERT_NE(sequence_, nullptr);
    request_ = OpenRequest(absl::StrCat("device-", seed));
    ASSERT_NE(request_, nullptr);
    auto attention = client::Attention::Open(*worker_, *sequence_, *request_);
    ASSERT_TRUE(attention.ok()) << attention.status();
    attention_ = *std::move(attention);
  }
  // Checked against the truth; by the certifier, not in this process.
  void ReadByCertifier(uint32_t seed) {
    const auto results = ReadAndCheck(*attention_, *data_, kTokenCount, seed);
    ASSERT_EQ(results.size(), 2u);
    for (const client::ReadResult& result : results) EXPECT_FALSE(result.in_process);
  }
  // What the certifier says it did when it ended.
  int64_t CountInLog(const std::string& key) {
    attention_.reset();
    request_.reset();
    sequence_.reset();
    worker_.reset();
    EXPECT_TRUE(cluster_->Stop().ok());
    const std::string logs = cluster_->Logs();
    const size_t at = logs.rfind(key + "=");
    return at == std::string::npos ? -1 : std::atoll(logs.c_str() + at + key.size() + 1);
  }

  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<client::Attention> attention_;
};

TEST_P(DeviceTest, ReadsOfAnotherProcesssMemoryAreCertified) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice());
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  for (uint32_t seed = 1; seed <= 3; ++seed) ReadByCertifier(seed);
  EXPECT_GE(CountInLog("device_passes"), 3 * 2);
  EXPECT_THAT(cluster_->Logs(), Not(HasSubstr("device_copy_")));
  EXPECT_THAT(cluster_->Logs(), Not(HasSubstr("device_pass_run_by_host")));
}

// What an engine's own kernels would read.
TEST_P(DeviceTest, WorkerOpensTheCopyOfEveryBlockItLeases) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice());
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  ASSERT_TRUE(cuda::UseDevice().ok());
  const auto copy = worker_->OpenDeviceCopy(RegisteredDeviceRuntime());
  ASSERT_TRUE(copy.ok()) << copy.status();
  const SlabLayout& layout = worker_->device_layout();
  std::vector<ImportedSlab::Range> ranges;
  for (const BlockHandle& block : sequence_->blocks()) {
    ASSERT_TRUE(GenerationMatches(worker_->device_base(), layout, block.device));
    for (int32_t layer = 0; layer < layout.layer_count(); ++layer) {
      for (int32_t head = 0; head < layout.kv_head_count(); ++head) {
        ranges.push_back({layout.scan_offset(block.device.slot, layer, head, 0),
                          layout.tiles_per_block() * layout.tile_layout(layer).scan_bytes});
        ranges.push_back({layout.detail_offset(block.device.slot, layer, head, 0),
                          layout.tiles_per_block() * layout.tile_layout(layer).detail_bytes});
      }
    }
  }
  ASSERT_FALSE(ranges.empty());
  EXPECT_TRUE((*copy)->IsReady());
  EXPECT_TRUE(*(*copy)->Equals(ranges));
}

TEST_P(DeviceTest, HandleThatIsRefusedLeavesReadsToTheHost) {
  for (const char* failure : {"cudaIpcOpenMemHandle=205", "cudaIpcOpenEventHandle=400"}) {
    // In one process nothing is opened.
    if (GetParam() == ClusterShape::kAllInOne) break;
    SCOPED_TRACE(failure);
    ASSERT_NO_FATAL_FAILURE(StartOnDevice());
    cluster_->SetDeviceFailures(ClusterService::kCertifier, failure);
    ASSERT_NO_FATAL_FAILURE(OpenSequence());
    ReadByCertifier(1);
    EXPECT_EQ(CountInLog("device_passes"), 0);
    EXPECT_THAT(cluster_->Logs(), HasSubstr("device_copy_not_read"));
    EXPECT_THAT(cluster_->Logs(), HasSubstr("DEVICE_IMPORT_REFUSED"));
  }
}

TEST_P(DeviceTest, OriginalsArePinnedWhereTheConfigSaysSo) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice("cuda", true));
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  ReadByCertifier(1);
  EXPECT_GE(CountInLog("device_passes"), 2);
  EXPECT_THAT(cluster_->Logs(), HasSubstr("originals_pinned"));
  EXPECT_THAT(cluster_->Logs(), Not(HasSubstr("originals_not_pinned")));
}

TEST_P(DeviceTest, OriginalsThatCannotBePinnedLeaveReadsOnTheDevice) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice("cuda", true));
  cluster_->SetDeviceFailures(ClusterService::kCertifier, "cudaHostGetDevicePointer=1");
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  ReadByCertifier(1);
  EXPECT_GE(CountInLog("device_passes"), 2);
  EXPECT_THAT(cluster_->Logs(), HasSubstr("originals_not_pinned"));
  EXPECT_THAT(cluster_->Logs(), HasSubstr("where the device reads pinned memory"));
}

TEST_P(DeviceTest, DeviceThatIsLostLeavesReadsToTheHost) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice());
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  ReadByCertifier(1);
  cluster_->SetDeviceFailures(ClusterService::kCertifier, "*=46");
  for (uint32_t seed = 2; seed <= 4; ++seed) ReadByCertifier(seed);
  cluster_->SetDeviceFailures(ClusterService::kCertifier, "");
  ReadByCertifier(5);
  const int64_t passes = CountInLog("device_passes");
  EXPECT_GE(passes, 2);
  EXPECT_LE(passes, 8) << "of the first read alone";
}

TEST_P(DeviceTest, StoreWhoseDeviceFailsGoesOnSealing) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice());
  ASSERT_NO_FATAL_FAILURE(OpenSequence(41));
  ReadByCertifier(1);
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaMemcpyAsync=214");
  ASSERT_NO_FATAL_FAILURE(OpenSequence(42));
  ReadByCertifier(2);
  cluster_->SetDeviceFailures(ClusterService::kStore, "");
  ASSERT_NO_FATAL_FAILURE(OpenSequence(43));
  ReadByCertifier(3);
  CountInLog("device_passes");
  EXPECT_THAT(cluster_->Logs(), HasSubstr("device_copy_failed"));
}

TEST_P(DeviceTest, DeviceWithoutMemoryLeavesTheTierOnTheHost) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice("auto"));
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaMalloc=2");
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  ReadByCertifier(1);
  EXPECT_EQ(CountInLog("device_passes"), 0);
  EXPECT_THAT(cluster_->Logs(), HasSubstr("DEVICE_MEMORY_FULL"));
}

TEST_P(DeviceTest, CacheThatNeedsADeviceWithoutMemoryIsRefused) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice("cuda"));
  cluster_->SetDeviceFailures(ClusterService::kStore, "cudaMalloc=2");
  const auto worker = client::Worker::Attach(cluster_->options(), SmallSpec());
  EXPECT_TRUE(absl::IsResourceExhausted(worker.status())) << worker.status();
  EXPECT_THAT(std::string(worker.status().message()), HasSubstr("device: host"));
}

TEST_P(DeviceTest, RestartedStoreGivesHandlesOfItsOwn) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice());
  ASSERT_NO_FATAL_FAILURE(OpenSequence(41));
  ReadByCertifier(1);
  cluster_->Kill(ClusterService::kStore);
  // The copy's process is gone: exact from what this process has mapped, or an error.
  const std::vector<float> queries = TestQueries(data_->spec, 2);
  client::ReadRequest read;
  read.layer = 0;
  read.query_position = kTokenCount - 1;
  read.queries = queries.data();
  const auto results = attention_->Attend(absl::MakeConstSpan(&read, 1));
  if (results.ok() && results->front().status.ok()) {
    EXPECT_EQ(CheckReadAgainstTruth(*data_, read, results->front(), tolerances_), "");
  }
  ASSERT_TRUE(cluster_->Restart(ClusterService::kStore).ok());
  ASSERT_NO_FATAL_FAILURE(OpenSequence(42));
  ReadByCertifier(3);
  EXPECT_GE(CountInLog("device_passes"), 2);
}

TEST_P(DeviceTest, ProgramsWithoutAGpuRunOnTheHostAndSaySoOnce) {
  ASSERT_NO_FATAL_FAILURE(StartOnDevice("auto"));
  // Programs of on_device always find one; so they are told that there is none, and started again.
  for (const ClusterService service : {ClusterService::kStore, ClusterService::kCertifier}) {
    cluster_->SetDeviceFailures(service, "cudaGetDeviceCount=100");
    cluster_->Kill(service);
    ASSERT_TRUE(cluster_->Restart(service).ok());
    if (GetParam() == ClusterShape::kAllInOne) break;
  }
  ASSERT_NO_FATAL_FAILURE(OpenSequence());
  ReadByCertifier(1);
  EXPECT_EQ(CountInLog("device_passes"), 0);
  const std::string logs = cluster_->Logs();
  const size_t first = logs.find("device_tier_on_host_alone");
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(logs.find("device_tier_on_host_alone", first + 1), std::string::npos);
  EXPECT_THAT(logs, HasSubstr("reads_on_host_alone"));
}

INSTANTIATE_TEST_SUITE_P(Shapes, DeviceTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
