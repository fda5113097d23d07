// Reads that a benchmark compares: one storage format each, with or without the certificate.
#ifndef CERTKV_BENCH_KERNELS_ATTEND_VARIANTS_H_
#define CERTKV_BENCH_KERNELS_ATTEND_VARIANTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/kernels/bench_data.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/cache_spec.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/ops/attend.h"

namespace certkv::bench {

// A read's results and scratch, reused.
struct ReadMemory {
  explicit ReadMemory(const AttendArgs& args);
  std::vector<float> outputs, lse, block_lse, block_max, half_width, top_half_width, tile_error,
      terms;
  std::unique_ptr<HugeBuffer> workspace;
  AttendResult result{};
};

struct VariantShape {
  KeyFormat key_format;
  ValueFormat value_format;
  int32_t witness_bands;
  int32_t dim;
  int32_t group_size;
  int32_t tile_count;
  double cache_factor;  // working set in last-level caches; 0: one head
};

// One way to read: `kernels` null is Attend of kernels/ops as it ships, checks included.
class Variant {
 public:
  // `cache` may be shared by variants of one shape; each walks its heads in turn.
  Variant(std::string name, const VariantShape& shape, std::shared_ptr<SealedCache> cache,
          const std::vector<float>& queries, const cpu::AttendKernels* kernels);

  // Reads the next head.
  Clocks Read();
  // Reads heads under each schedule in turn and keeps the one with the smallest median time.
  // Needs kernels.
  void ChooseSchedule(const std::vector<cpu::PrefetchSchedule>& schedules, int repeats);

  const std::string& name() const { return name_; }
  const AttendArgs& args() const { return args_; }
  const ReadMemory& memory() const { return *memory_; }
  const SealedCache& cache() const { return *cache_; }
  SealedCache* mutable_cache() { return cache_.get(); }
  const cpu::PrefetchSchedule* schedule() const { return scheduled_ ? &schedule_ : nullptr; }
  double bytes_per_token() const {
    return static_cast<double>(cache_->head_bytes()) /
           static_cast<double>(int64_t{args_.tile_count} * kTileTokens);
  }

  std::vector<double> thread_ns;  // per token, one entry a round
  std::vector<double> wall_ns;

 private:
  std::string name_;
  std::shared_ptr<SealedCache> cache_;
  AttendArgs args_{};
  std::unique_ptr<ReadMemory> memory_;
  const cpu::AttendKernels* kernels_;
  cpu::PrefetchSchedule schedule_{};
  bool scheduled_ = false;
};

// Of FillOriginals' numbers, or of others.
std::shared_ptr<SealedCache> MakeSealedCache(const VariantShape& shape);
std::shared_ptr<SealedCache> MakeSealedCache(const VariantShape& shape, const FillTile& fill);

// The kernels that Attend runs here, and the same without the certificate (null where there are
// none).
const cpu::AttendKernels* CertifiedKernels();
const cpu::AttendKernels* UncertifiedKernels();
// The same with all of the certificate but one part, where they are built; `name` is the part's.
struct PartlyCertified {
  const char* name;
  const cpu::AttendKernels* kernels;
};
std::vector<PartlyCertified> PartlyCertifiedKernels();

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_ATTEND_VARIANTS_H_
