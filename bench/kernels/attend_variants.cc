#include "bench/kernels/attend_variants.h"

#include <algorithm>
#include <utility>

#include "bench/kernels/uncertified.h"
#include "kernels/core/check.h"
#include "kernels/ops/backend.h"

namespace certkv::bench {

ReadMemory::ReadMemory(const AttendArgs& args) {
  const int64_t atoms = int64_t{args.group_size} * AttendAtomCount(args);
  outputs.resize(args.group_size * args.layout->value_dim);
  lse.resize(args.group_size);
  block_lse.resize(atoms);
  block_max.resize(atoms);
  half_width.resize(atoms);
  top_half_width.resize(atoms);
  tile_error.resize(args.group_size * args.tile_count);
  terms.resize(2 * args.group_size + 1);
  workspace = std::make_unique<HugeBuffer>(AttendWorkspaceBytes(args));
  result = {outputs.data(),
            lse.data(),
            block_lse.data(),
            block_max.data(),
            half_width.data(),
            tile_error.data(),
            terms.data(),
            terms.data() + args.group_size,
            terms.data() + 2 * args.group_size,
            top_half_width.data()};
}

std::shared_ptr<SealedCache> MakeSealedCache(const VariantShape& shape) {
  return MakeSealedCache(
      shape, [&shape](int32_t tile, std::vector<uint16_t>* keys, std::vector<uint16_t>* values) {
        FillOriginals(tile, shape.dim, keys, values);
      });
}

std::shared_ptr<SealedCache> MakeSealedCache(const VariantShape& shape, const FillTile& fill) {
  const CacheSpec spec = BenchSpec(shape.key_format, shape.value_format, shape.dim,
                                   shape.group_size, shape.witness_bands);
  const auto bytes_min = std::max<int64_t>(
      1, static_cast<int64_t>(shape.cache_factor * static_cast<double>(LastLevelCacheBytes())));
  return std::make_shared<SealedCache>(spec, shape.tile_count, bytes_min, fill);
}

Variant::Variant(std::string name, const VariantShape& shape, std::shared_ptr<SealedCache> cache,
                 const std::vector<float>& queries, const cpu::AttendKernels* kernels)
    : name_(std::move(name)), cache_(std::move(cache)), kernels_(kernels) {
  const CacheSpec spec = BenchSpec(shape.key_format, shape.value_format, shape.dim,
                                   shape.group_size, shape.witness_bands);
  args_.layout = &cache_->layout();
  args_.original_dtype = spec.original_dtype;
  args_.logit_scale = spec.logit_scale;
  args_.group_size = shape.group_size;
  args_.queries = queries.data();
  args_.tile_count = shape.tile_count;
  args_.token_end = int64_t{shape.tile_count} * kTileTokens;
  memory_ = std::make_unique<ReadMemory>(args_);
}

Clocks Variant::Read() {
  args_.tiles = cache_->NextHead().data();
  const Clocks begin = ReadClocks();
  if (kernels_ == nullptr) {
    const absl::Status status =
        Attend(Backend::kCpu, args_, memory_->result, memory_->workspace->data());
    CERTKV_CHECK(status.ok(), "the benchmark's reads succeed");
  } else {
    cpu::AttendWith(*kernels_, args_, memory_->result, memory_->workspace->data(), schedule());
  }
  const Clocks end = ReadClocks();
  return {end.wall_ns - begin.wall_ns, end.thread_ns - begin.thread_ns};
}

void Variant::ChooseSchedule(const std::vector<cpu::PrefetchSchedule>& schedules, int repeats) {
  CERTKV_CHECK(kernels_ != nullptr, "Attend of kernels/ops has one schedule, its own");
  std::vector<std::vector<double>> times(schedules.size() + 1);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (size_t i = 0; i < times.size(); ++i) {
      scheduled_ = i > 0;  // the first is the kernels' own
      if (scheduled_) schedule_ = schedules[i - 1];
      times[i].push_back(static_cast<double>(Read().thread_ns));
    }
  }
  size_t best = 0;
  for (size_t i = 1; i < times.size(); ++i) {
    if (Median(times[i]) < Median(times[best])) best = i;
  }
  scheduled_ = best > 0;
  if (scheduled_) schedule_ = schedules[best - 1];
}

const cpu::AttendKernels* CertifiedKernels() {
  const auto isa = SelectedCpuIsa();
  CERTKV_CHECK(isa.ok(), "CERTKV_ISA, if set, names an instruction set of this machine");
  switch (*isa) {
#if defined(__x86_64__)
    case CpuIsa::kAvx2:
      return &cpu::kAttendAvx2;
    case CpuIsa::kAvx512Vnni:
      return &cpu::kAttendAvx512;
#endif
    default:
      return &cpu::kAttendPortable;
  }
}

const cpu::AttendKernels* UncertifiedKernels() {
#if defined(__x86_64__)
  if (CertifiedKernels() == &cpu::kAttendAvx2) return &kUncertifiedAvx2;
  if (CertifiedKernels() == &cpu::kAttendAvx512) return &kUncertifiedAvx512;
#endif
  return nullptr;
}

std::vector<PartlyCertified> PartlyCertifiedKernels() {
#if defined(CERTKV_BENCH_PARTS)
  if (CertifiedKernels() == &cpu::kAttendAvx2) {
    return {{"half-widths", &kAvx2WithoutPart[0]},
            {"atoms", &kAvx2WithoutPart[1]},
            {"weight-errors", &kAvx2WithoutPart[2]},
            {"value-errors", &kAvx2WithoutPart[3]}};
  }
#endif
  return {};
}

}  // namespace certkv::bench
