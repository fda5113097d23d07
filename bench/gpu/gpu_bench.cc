#include "bench/gpu/gpu_bench.h"

#include <algorithm>
#include <memory>
#include <string>

#include "bench/gpu/device_cache.h"
#include "bench/gpu/read_launch.h"
#include "bench/kernels/bench_data.h"
#include "bench/kernels/bench_report.h"
#include "kernels/cuda/gather.h"

namespace certkv::bench {
namespace {

struct Format {
  const char* name;
  KeyFormat key_format;
  ValueFormat value_format;
  int32_t witness_bands;
};
constexpr Format kFormats[] = {{"K8V4", KeyFormat::kK8, ValueFormat::kV4, 0},
                               {"K8V8", KeyFormat::kK8, ValueFormat::kV8, 0},
                               {"K6V4w1", KeyFormat::kK6, ValueFormat::kV4, 1},
                               {"K4V4w1", KeyFormat::kK4, ValueFormat::kV4, 1},
                               {"F16", KeyFormat::kF16, ValueFormat::kF16, 0}};
constexpr float kSkipTolerance = 0.05f;
constexpr float kTvTolerance = 0.1f;
// Launches between two events, so that what the host takes to queue one is hidden.
constexpr int kLaunchesPerTime = 5;
// Blocks of a launch for every multiprocessor.
constexpr int32_t kBlocksPerMultiprocessor = 8;

class GpuBench {
 public:
  GpuBench(const GpuBenchSizes& sizes, cuda::Stream stream, cuda::DeviceDescription device)
      : sizes_(sizes), stream_(std::move(stream)), device_(std::move(device)) {}

  absl::StatusOr<nlohmann::json> Run() {
    nlohmann::json report;
    report["device"] = {{"name", device_.name},
                        {"multiprocessors", device_.multiprocessors},
                        {"memory_bytes", device_.memory_bytes}};
    CERTKV_RETURN_IF_ERROR(MeasureCopy(&report));
    for (const int32_t tokens : sizes_.token_counts) {
      for (const int32_t group_size : sizes_.group_sizes) {
        CERTKV_RETURN_IF_ERROR(MeasureReads(tokens, group_size, &report));
      }
    }
    CERTKV_RETURN_IF_ERROR(MeasureSealing(&report));
    CERTKV_RETURN_IF_ERROR(MeasureRepair(&report));
    return report;
  }

 private:
  // Median of one launch.
  absl::StatusOr<double> Time(const cuda::Launches& launches) {
    CERTKV_RETURN_IF_ERROR(cuda::StatusOfLaunch(launches(stream_.get()), "warming up"));
    std::vector<double> seconds;
    for (int n = 0; n < sizes_.repetitions; ++n) {
      CERTKV_ASSIGN_OR_RETURN(const double all, stream_.SecondsOf([&](CUstream_st* stream) {
        for (int k = 0; k < kLaunchesPerTime; ++k) {
          if (const int error = launches(stream); error != 0) return error;
        }
        return 0;
      }));
      seconds.push_back(all / kLaunchesPerTime);
    }
    return Median(seconds);
  }

  absl::Status MeasureCopy(nlohmann::json* report) {
    CERTKV_ASSIGN_OR_RETURN(const cuda::Buffer from, cuda::Buffer::Allocate(sizes_.copy_bytes));
    CERTKV_ASSIGN_OR_RETURN(const cuda::Buffer to, cuda::Buffer::Allocate(sizes_.copy_bytes));
    CERTKV_ASSIGN_OR_RETURN(const double seconds, Time([&](CUstream_st* stream) {
                              return cuda::LaunchCopy(to.As<void>(), from.As<void>(),
                                                      sizes_.copy_bytes, stream);
                            }));
    // Read and written.
    copy_gb_per_s_ = 2e-9 * static_cast<double>(sizes_.copy_bytes) / seconds;
    (*report)["copy"] = {
        {"bytes", sizes_.copy_bytes}, {"seconds", seconds}, {"gb_per_s", copy_gb_per_s_}};
    return absl::OkStatus();
  }

  // `seconds` of something that moves `bytes`, once.
  nlohmann::json Rate(int64_t bytes, double seconds) const {
    const double rate = 1e-9 * static_cast<double>(bytes) / seconds;
    return {{"bytes", bytes},
            {"seconds", seconds},
            {"gb_per_s", rate},
            {"share_of_copy", rate / copy_gb_per_s_}};
  }

  absl::Status MeasureReads(int32_t tokens, int32_t group_size, nlohmann::json* report) {
    const int32_t tiles = tokens / kTileTokens;
    const int64_t page_pair_bytes = int64_t{4} * kPageTokens * sizes_.dim;
    const int64_t read_bytes = tiles * page_pair_bytes;
    const auto reads = static_cast<int32_t>(
        std::max<int64_t>(1, (sizes_.cache_bytes + read_bytes - 1) / read_bytes));
    const int32_t blocks = kBlocksPerMultiprocessor * device_.multiprocessors;
    const ReadShape shape{reads,          tiles,
                          group_size,     std::max(1, (blocks + reads - 1) / reads),
                          kSkipTolerance, kTvTolerance};
    CERTKV_ASSIGN_OR_RETURN(const DeviceOriginals originals,
                            DeviceOriginals::Make(stream_, sizes_.dim, reads * tiles));
    double paged_seconds = 0;
    {
      CERTKV_ASSIGN_OR_RETURN(const auto paged, PagedLaunch::Make(originals, shape, sizes_.dim));
      CERTKV_ASSIGN_OR_RETURN(paged_seconds,
                              Time([&](CUstream_st* stream) { return paged->Decode(stream); }));
    }
    nlohmann::json row = {{"tokens", tokens},
                          {"reads", reads},
                          {"group_size", group_size},
                          {"dim", sizes_.dim},
                          {"fp16_paged", Rate(reads * read_bytes, paged_seconds)}};
    for (const Format& format : kFormats) {
      CERTKV_RETURN_IF_ERROR(MeasureFormat(format, shape, originals, paged_seconds, &row));
    }
    (*report)["reads"].push_back(std::move(row));
    return absl::OkStatus();
  }

  absl::Status MeasureFormat(const Format& format, const ReadShape& shape,
                             const DeviceOriginals& originals, double paged_seconds,
                             nlohmann::json* row) {
    const CacheSpec spec = BenchSpec(format.key_format, format.value_format, sizes_.dim,
                                     shape.group_size, format.witness_bands);
    CERTKV_ASSIGN_OR_RETURN(const DeviceTiles tiles, DeviceTiles::Make(spec, originals));
    CERTKV_RETURN_IF_ERROR(cuda::StatusOfLaunch(tiles.Seal(stream_.get()), "sealing"));
    CERTKV_RETURN_IF_ERROR(stream_.Synchronize());
    CERTKV_ASSIGN_OR_RETURN(const auto launch, ReadLaunch::Make(tiles, shape));
    CERTKV_ASSIGN_OR_RETURN(const double seconds,
                            Time([&](CUstream_st* stream) { return launch->Attend(stream); }));
    CERTKV_ASSIGN_OR_RETURN(const double finish_seconds,
                            Time([&](CUstream_st* stream) { return launch->Finish(stream); }));
    CERTKV_ASSIGN_OR_RETURN(const double worst_tv, launch->WorstTv());
    nlohmann::json result = Rate(tiles.scans.size_bytes() + tiles.details.size_bytes(), seconds);
    result["speed_over_fp16_paged"] = paged_seconds / seconds;
    result["certificate_seconds"] = finish_seconds;
    result["speed_with_certificate"] = paged_seconds / (seconds + finish_seconds);
    result["worst_case_tv_max"] = worst_tv;
    CERTKV_RETURN_IF_ERROR(MeasureGraph(*launch, &result));
    if (launch->can_skip()) {
      CERTKV_ASSIGN_OR_RETURN(const double skipping, Time([&](CUstream_st* stream) {
                                return launch->Progressive(stream);
                              }));
      CERTKV_ASSIGN_OR_RETURN(const double share, launch->ShareRead());
      result["progressive"] = {{"skip_tolerance", kSkipTolerance},
                               {"seconds", skipping},
                               {"share_read", share},
                               {"speed_over_dense", seconds / skipping}};
    }
    (*row)["formats"][format.name] = std::move(result);
    return absl::OkStatus();
  }

  // The read and its certificates as one graph, as a decode step replays them.
  absl::Status MeasureGraph(const ReadLaunch& launch, nlohmann::json* result) {
    CERTKV_ASSIGN_OR_RETURN(const cuda::Graph graph,
                            cuda::Graph::Capture(stream_, [&](CUstream_st* stream) {
                              const int error = launch.Attend(stream);
                              return error != 0 ? error : launch.Finish(stream);
                            }));
    CERTKV_ASSIGN_OR_RETURN(const double seconds,
                            Time([&](CUstream_st* stream) { return graph.Launch(stream); }));
    (*result)["graph_seconds"] = seconds;
    return absl::OkStatus();
  }

  absl::Status MeasureSealing(nlohmann::json* report) {
    CERTKV_ASSIGN_OR_RETURN(const DeviceOriginals originals,
                            DeviceOriginals::Make(stream_, sizes_.dim, sizes_.seal_tiles));
    for (const Format& format : kFormats) {
      const CacheSpec spec =
          BenchSpec(format.key_format, format.value_format, sizes_.dim, 1, format.witness_bands);
      CERTKV_ASSIGN_OR_RETURN(const DeviceTiles tiles, DeviceTiles::Make(spec, originals));
      CERTKV_ASSIGN_OR_RETURN(const double seconds,
                              Time([&](CUstream_st* stream) { return tiles.Seal(stream); }));
      nlohmann::json rate = Rate(originals.keys.size_bytes() + originals.values.size_bytes() +
                                     tiles.scans.size_bytes() + tiles.details.size_bytes(),
                                 seconds);
      rate["tokens_per_s"] = sizes_.seal_tiles * double{kTileTokens} / seconds;
      (*report)["sealing"][format.name] = std::move(rate);
    }
    return absl::OkStatus();
  }

  // Originals of so many tiles from pinned host memory.
  absl::Status MeasureRepair(nlohmann::json* report) {
    const int64_t half_bytes = int64_t{2} * kTileTokens * sizes_.dim;
    for (const int32_t tiles : sizes_.repair_tiles) {
      const int64_t size_bytes = 2 * half_bytes * tiles;
      CERTKV_ASSIGN_OR_RETURN(const cuda::Buffer host,
                              cuda::Buffer::Allocate(size_bytes, cuda::MemoryKind::kPinnedHost));
      std::fill_n(host.As<uint8_t>(), size_bytes, uint8_t{1});
      CERTKV_ASSIGN_OR_RETURN(const cuda::Buffer to, cuda::Buffer::Allocate(size_bytes));
      std::vector<cuda::OriginalCopy> copies;
      for (int64_t at = 0; at < size_bytes; at += half_bytes) {
        copies.push_back({host.As<uint8_t>() + at, to.As<uint8_t>() + at, half_bytes});
      }
      CERTKV_RETURN_IF_ERROR(cuda::CheckOriginalCopies(copies));
      CERTKV_ASSIGN_OR_RETURN(const cuda::Buffer records, Upload(copies));
      CERTKV_ASSIGN_OR_RETURN(const double seconds, Time([&](CUstream_st* stream) {
                                return cuda::LaunchGather(records.As<cuda::OriginalCopy>(),
                                                          static_cast<int32_t>(copies.size()),
                                                          stream);
                              }));
      (*report)["repair"].push_back(
          {{"tiles", tiles},
           {"bytes", size_bytes},
           {"microseconds", 1e6 * seconds},
           {"gb_per_s", 1e-9 * static_cast<double>(size_bytes) / seconds}});
    }
    return absl::OkStatus();
  }

  const GpuBenchSizes sizes_;
  const cuda::Stream stream_;
  const cuda::DeviceDescription device_;
  double copy_gb_per_s_ = 0;
};

}  // namespace

GpuBenchSizes FullSizes() {
  return {.copy_bytes = int64_t{1} << 30,
          .cache_bytes = int64_t{1} << 30,
          .dim = 128,
          .repetitions = 11,
          .seal_tiles = 8192,
          .token_counts = {1024, 8192, 32768, 131072},
          .group_sizes = {1, 4, 8},
          .repair_tiles = {1, 4, 16, 64}};
}

GpuBenchSizes SmallSizes() {
  return {.copy_bytes = 1 << 16,
          .cache_bytes = 1 << 17,
          .dim = 64,
          .repetitions = 1,
          .seal_tiles = 3,
          .token_counts = {256, 576},
          .group_sizes = {2},
          .repair_tiles = {1, 3}};
}

absl::StatusOr<nlohmann::json> RunGpuBench(const GpuBenchSizes& sizes) {
  CERTKV_ASSIGN_OR_RETURN(cuda::Stream stream, cuda::Stream::Create());
  CERTKV_ASSIGN_OR_RETURN(cuda::DeviceDescription device, cuda::DescribeDevice());
  return GpuBench(sizes, std::move(stream), std::move(device)).Run();
}

}  // namespace certkv::bench
