// certkv-bench-device: a device slab's copy. How fast blocks get into it, what comparing them
// costs, and whether copies and reads run at the same time: on a GPU, or, as
// certkv-bench-device-on-cpu, on CPU threads, where the figures say only that everything runs.
//
//   upload   DeviceCopy::Upload of 1, 8 and 64 blocks, bytes per second, of what is in host memory
//   compare  ImportedSlab::Equals of the same bytes
//   overlap  uploads in one thread and passes of attention in another: the share of the shorter one
//            that the other one hid (1: all of it, 0: one after the other)
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/read_fixture.h"
#include "services/common/clock.h"
#include "tests/device/device_cache.h"

ABSL_FLAG(int32_t, rounds, 9, "rounds of each measurement; medians are reported");
ABSL_FLAG(int32_t, blocks, 64, "blocks of the sequence, of 64 tokens, at most 64");
ABSL_FLAG(int32_t, layers, 8, "layers, of 8 KV heads with 4 query heads each, d 128, K8V4");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

template <typename Call>
double OnceMs(const Call& call) {
  const int64_t start = RealClock()->MonotonicNs();
  call();
  return static_cast<double>(RealClock()->MonotonicNs() - start) / 1e6;
}

template <typename Call>
double MedianMs(const Call& call) {
  std::vector<double> times;
  for (int32_t i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) times.push_back(OnceMs(call));
  return Median(times);
}

struct Case {
  explicit Case(const CacheSpec& spec)
      : fixture(spec, int64_t{absl::GetFlag(FLAGS_blocks)} * spec.block_tokens,
                certifier::TestLease({.tv_tolerance = 1, .value_tolerance = 1})),
        copy(CopyOf(&fixture.fake)) {
    const absl::Status imported = fixture.fake.cache()->ImportDeviceCopy(HostMemoryDevice());
    CERTKV_CHECK(imported.ok(), "the copy of the benchmark is opened");
    for (const BlockHandle& block : fixture.fake.blocks()) slots.push_back(block.device.slot);
    kernels = certifier::KernelsOf(Backend::kCpu);
    kernels.attend_on_device = certifier::KernelsOf(Backend::kCuda).attend;
  }

  void Upload(size_t count) {
    for (size_t i = 0; i < slots.size(); i += count) {
      copy->Upload(absl::MakeConstSpan(slots).subspan(i, count));
    }
  }
  // All layers, at the last position.
  void Read() {
    const CacheSpec& spec = fixture.fake.spec();
    const certifier::ReadEngine engine(kernels, &counters);
    std::vector<ReadCertificate> certificates(spec.query_head_count());
    std::vector<float> outputs(int64_t{spec.query_head_count()} * spec.value_dim);
    for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
      const auto plan = certifier::PlanRead(
          *fixture.view, fixture.Request(layer, fixture.fake.data().token_count - 1), 0);
      CERTKV_CHECK(plan.ok(), "the read of the benchmark is planned");
      const absl::Status status =
          engine.Read(*plan, &workspace, {absl::MakeSpan(certificates), absl::MakeSpan(outputs)});
      CERTKV_CHECK(status.ok(), "and done");
    }
  }

  certifier::ReadFixture fixture;
  std::unique_ptr<kvstore::DeviceCopy> copy;
  std::vector<int32_t> slots;
  certifier::ReadKernels kernels;
  certifier::CertifierCounters counters;
  certifier::ReadWorkspace workspace;
};

nlohmann::json UploadRates(Case* one) {
  nlohmann::json rows;
  const int64_t before = one->copy->uploaded_bytes();
  one->Upload(one->slots.size());
  const auto bytes = static_cast<double>(one->copy->uploaded_bytes() - before);
  for (const size_t count : {size_t{1}, size_t{8}, size_t{64}}) {
    const double ms = MedianMs([&] { one->Upload(count); });
    rows.push_back({{"blocks_per_call", count}, {"ms", ms}, {"gb_per_s", bytes / ms / 1e6}});
  }
  return {{"bytes", bytes}, {"rows", rows}};
}

nlohmann::json CompareRate(Case* one) {
  const SlabLayout& layout = one->fixture.fake.cache()->device().layout();
  std::vector<ImportedSlab::Range> ranges;
  int64_t bytes = 0;
  for (const int32_t slot : one->slots) {
    for (int32_t head = 0; head < layout.kv_head_count(); ++head) {
      const TileLayout& tile = layout.tile_layout(0);
      ranges.push_back(
          {layout.scan_offset(slot, 0, head, 0), layout.tiles_per_block() * tile.scan_bytes});
      ranges.push_back(
          {layout.detail_offset(slot, 0, head, 0), layout.tiles_per_block() * tile.detail_bytes});
      bytes += layout.tiles_per_block() * tile.tile_bytes();
    }
  }
  const double ms = MedianMs([&] {
    const auto equal = one->fixture.fake.cache()->device_copy()->Equals(ranges);
    CERTKV_CHECK(equal.ok() && *equal, "the copy is equal");
  });
  return {{"bytes", bytes}, {"ms", ms}, {"gb_per_s", static_cast<double>(bytes) / ms / 1e6}};
}

nlohmann::json Overlap(Case* one) {
  one->Read();
  CERTKV_CHECK(one->counters.device_passes > 0 && one->counters.DeviceFallbacksByReason().empty(),
               "the device reads");
  // As many uploads as take about as long as the read.
  const double read_once_ms = OnceMs([one] { one->Read(); });
  const double upload_once_ms = MedianMs([one] { one->Upload(8); });
  const auto repeats = std::max(1, static_cast<int32_t>(read_once_ms / upload_once_ms));
  const auto upload = [one, repeats] {
    for (int32_t i = 0; i < repeats; ++i) one->Upload(8);
  };
  std::vector<double> uploads;
  std::vector<double> reads;
  std::vector<double> both;
  for (int32_t i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) {
    uploads.push_back(OnceMs(upload));
    reads.push_back(OnceMs([one] { one->Read(); }));
    both.push_back(OnceMs([&] {
      std::thread thread(upload);
      one->Read();
      thread.join();
    }));
  }
  const double upload_ms = Median(uploads);
  const double read_ms = Median(reads);
  const double both_ms = Median(both);
  return {{"uploads", repeats},
          {"upload_ms", upload_ms},
          {"read_ms", read_ms},
          {"both_ms", both_ms},
          {"hidden_share", (upload_ms + read_ms - both_ms) / std::min(upload_ms, read_ms)}};
}

}  // namespace

nlohmann::json Run() {
  const absl::Status usable = cuda::UseDevice();
  if (!usable.ok()) return {{"error", usable.ToString()}};
  CacheSpec spec = certifier::SmallSpec(absl::GetFlag(FLAGS_layers), 8, 4, 128);
  Case one(spec);
  const DeviceProperties device = RegisteredDeviceRuntime()->Devices()->front();
  return {{"run", DescribeRun()},
          {"device", {{"name", device.name}, {"memory_bytes", device.memory_bytes}}},
          {"sequence",
           {{"blocks", one.slots.size()},
            {"block_tokens", spec.block_tokens},
            {"layers", spec.layer_count()}}},
          {"upload", UploadRates(&one)},
          {"compare", CompareRate(&one)},
          {"overlap", Overlap(&one)}};
}

}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const nlohmann::json report = certkv::bench::Run();
  std::printf("%s\n", report.dump(2).c_str());
  if (report.contains("error")) return 1;
  return certkv::bench::WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}
