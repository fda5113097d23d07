#include "bench/gpu/read_launch.h"

#include <algorithm>
#include <cmath>

#include "bench/kernels/bench_data.h"
#include "kernels/core/half.h"

namespace certkv::bench {
namespace {

float LogitScale(int32_t dim) { return 1.0f / std::sqrt(static_cast<float>(dim)); }

std::vector<uint16_t> HalfQueries(int32_t group_size, int32_t dim) {
  std::vector<uint16_t> queries;
  for (const float query : BenchQueries(group_size, dim)) queries.push_back(FloatToF16(query));
  return queries;
}

}  // namespace

template <typename T>
absl::StatusOr<T*> ReadLaunch::Allocate(int64_t count) {
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer buffer,
                          cuda::Buffer::Allocate(count * static_cast<int64_t>(sizeof(T))));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().As<T>();
}

template <typename T>
absl::StatusOr<T*> ReadLaunch::Place(const std::vector<T>& data) {
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer buffer, Upload(data));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().As<T>();
}

absl::StatusOr<std::unique_ptr<ReadLaunch>> ReadLaunch::Make(const DeviceTiles& tiles,
                                                             const ReadShape& shape) {
  std::unique_ptr<ReadLaunch> launch(new ReadLaunch(tiles.layout, shape));
  CERTKV_RETURN_IF_ERROR(launch->Prepare(tiles));
  if (launch->can_skip()) {
    CERTKV_RETURN_IF_ERROR(launch->PrepareProgressive());
  }
  return launch;
}

absl::Status ReadLaunch::Prepare(const DeviceTiles& tiles) {
  const int64_t heads = shape_.group_size;
  const int32_t dim = layout_.head_dim;
  std::vector<AttendTile> all;
  for (int32_t n = 0; n < tiles.tile_count; ++n) all.push_back(tiles.tile(n));
  CERTKV_ASSIGN_OR_RETURN(AttendTile* const device_tiles, Place(all));
  CERTKV_ASSIGN_OR_RETURN(uint16_t* const queries, Place(HalfQueries(shape_.group_size, dim)));
  CERTKV_ASSIGN_OR_RETURN(float* const tolerance,
                          Place(std::vector<float>(heads, shape_.tv_tolerance)));
  CERTKV_ASSIGN_OR_RETURN(certificates_, Allocate<Certificate>(heads * shape_.read_count));
  std::vector<cuda::AttendRead> reads;
  std::vector<cuda::FinishRead> finishes;
  for (int32_t r = 0; r < shape_.read_count; ++r) {
    AttendArgs args{};
    args.layout = &layout_;
    args.original_dtype = OriginalDtype::kF16;
    args.logit_scale = LogitScale(dim);
    args.group_size = shape_.group_size;
    args.tiles = device_tiles + int64_t{r} * shape_.tiles_per_read;
    args.tile_count = shape_.tiles_per_read;
    args.token_end = int64_t{shape_.tiles_per_read} * kTileTokens;
    args_.push_back(args);
    const int64_t atoms = heads * AttendAtomCount(args);
    AttendResult result{};
    const std::pair<float**, int64_t> arrays[] = {
        {&result.outputs, heads * layout_.value_dim},
        {&result.lse_nat, heads},
        {&result.block_lse, atoms},
        {&result.block_max_logit, atoms},
        {&result.logit_half_width, atoms},
        {&result.top_half_width, atoms},
        {&result.tile_value_error, heads * shape_.tiles_per_read},
        {&result.value_term, heads},
        {&result.rounding_term, heads},
        {&result.value_radius, 1}};
    for (const auto& [array, count] : arrays) {
      CERTKV_ASSIGN_OR_RETURN(*array, Allocate<float>(count));
    }
    CERTKV_ASSIGN_OR_RETURN(uint8_t* const scratch,
                            Allocate<uint8_t>(cuda::ScratchBytes(args, shape_.block_target)));
    reads.push_back(
        cuda::PlanRead(args, result, shape_.block_target, scratch, {queries, OriginalDtype::kF16}));
    finishes.push_back(cuda::PlanFinish(reads.back(), tolerance, certificates_ + heads * r));
  }
  plan_ = cuda::PlanLaunch(reads.data(), shape_.read_count);
  finish_plan_ = cuda::PlanFinishLaunch(finishes.data(), shape_.read_count);
  CERTKV_ASSIGN_OR_RETURN(reads_, Place(reads));
  CERTKV_ASSIGN_OR_RETURN(finishes_, Place(finishes));
  return absl::OkStatus();
}

absl::Status ReadLaunch::PrepareProgressive() {
  const int64_t heads = shape_.group_size;
  const int64_t masks = heads * shape_.tiles_per_read;
  CERTKV_ASSIGN_OR_RETURN(float* const skip_tolerance,
                          Place(std::vector<float>(heads, shape_.skip_tolerance)));
  CERTKV_ASSIGN_OR_RETURN(uint16_t* const queries,
                          Place(HalfQueries(shape_.group_size, layout_.head_dim)));
  CERTKV_ASSIGN_OR_RETURN(masks_, Allocate<uint8_t>(masks * shape_.read_count));
  std::vector<cuda::ProgressiveRead> reads;
  for (int32_t r = 0; r < shape_.read_count; ++r) {
    const int64_t atoms = heads * ProgressiveAtomsMax(args_[r]);
    ProgressiveResult result{};
    const std::pair<float**, int64_t> arrays[] = {{&result.outputs, heads * layout_.value_dim},
                                                  {&result.lse_nat, heads},
                                                  {&result.block_lse, atoms},
                                                  {&result.block_max_logit, atoms},
                                                  {&result.logit_half_width, atoms},
                                                  {&result.value_term, heads},
                                                  {&result.rounding_term, heads},
                                                  {&result.value_radius, 1},
                                                  {&result.skipped_lse_nat, heads}};
    for (const auto& [array, count] : arrays) {
      CERTKV_ASSIGN_OR_RETURN(*array, Allocate<float>(count));
    }
    CERTKV_ASSIGN_OR_RETURN(result.atom_count, Allocate<int32_t>(heads));
    result.sub_blocks_read = masks_ + masks * r;
    const int64_t size_bytes = cuda::ProgressiveScratchBytes(args_[r], shape_.block_target);
    CERTKV_ASSIGN_OR_RETURN(uint8_t* const scratch, Allocate<uint8_t>(size_bytes));
    reads.push_back(cuda::PlanProgressive({args_[r], skip_tolerance}, result, shape_.block_target,
                                          scratch, {queries, OriginalDtype::kF16}));
  }
  progressive_plan_ = cuda::PlanProgressiveLaunch(reads.data(), shape_.read_count);
  CERTKV_ASSIGN_OR_RETURN(progressive_, Place(reads));
  return absl::OkStatus();
}

int ReadLaunch::Attend(CUstream_st* stream) const {
  return cuda::LaunchAttend(plan_, reads_, stream);
}
int ReadLaunch::Finish(CUstream_st* stream) const {
  return cuda::LaunchFinish(finish_plan_, finishes_, stream);
}
int ReadLaunch::Progressive(CUstream_st* stream) const {
  return cuda::LaunchProgressive(progressive_plan_, progressive_, stream);
}

absl::StatusOr<double> ReadLaunch::ShareRead() const {
  const int64_t count = int64_t{shape_.group_size} * shape_.tiles_per_read * shape_.read_count;
  std::vector<uint8_t> masks(count);
  for (const cuda::Buffer& buffer : buffers_) {
    if (buffer.As<uint8_t>() != masks_) continue;
    CERTKV_RETURN_IF_ERROR(buffer.CopyTo(masks.data(), count));
  }
  int64_t read = 0;
  for (const uint8_t mask : masks) read += __builtin_popcount(mask);
  return static_cast<double>(read) / static_cast<double>(kSubBlocksPerTile * count);
}

absl::StatusOr<double> ReadLaunch::WorstTv() const {
  std::vector<Certificate> certificates(int64_t{shape_.group_size} * shape_.read_count);
  for (const cuda::Buffer& buffer : buffers_) {
    if (buffer.As<Certificate>() != certificates_) continue;
    CERTKV_RETURN_IF_ERROR(buffer.CopyTo(
        certificates.data(), static_cast<int64_t>(certificates.size() * sizeof(Certificate))));
  }
  double worst = 0;
  for (const Certificate& certificate : certificates) {
    worst = std::max<double>(worst, certificate.worst_case_tv);
  }
  return worst;
}

absl::StatusOr<std::unique_ptr<PagedLaunch>> PagedLaunch::Make(const DeviceOriginals& originals,
                                                               const ReadShape& shape,
                                                               int32_t dim) {
  std::unique_ptr<PagedLaunch> launch(new PagedLaunch);
  const auto keep = [](absl::StatusOr<cuda::Buffer> buffer, std::unique_ptr<cuda::Buffer>* place) {
    if (!buffer.ok()) return buffer.status();
    *place = std::make_unique<cuda::Buffer>(*std::move(buffer));
    return absl::OkStatus();
  };
  std::vector<const uint16_t*> keys;
  std::vector<const uint16_t*> values;
  const int64_t page_elements = int64_t{kPageTokens} * dim;
  for (int32_t n = 0; n < shape.read_count * shape.tiles_per_read; ++n) {
    keys.push_back(originals.keys.As<uint16_t>() + n * page_elements);
    values.push_back(originals.values.As<uint16_t>() + n * page_elements);
  }
  const int32_t pages = shape.tiles_per_read;
  const int32_t pages_per_split = (pages + shape.block_target - 1) / shape.block_target;
  const int32_t splits = (pages + pages_per_split - 1) / pages_per_split;
  const int64_t partial = int64_t{splits} * shape.group_size * (dim + 2);
  const int64_t outputs = int64_t{shape.group_size} * dim;
  CERTKV_RETURN_IF_ERROR(keep(Upload(HalfQueries(shape.group_size, dim)), &launch->queries_));
  CERTKV_RETURN_IF_ERROR(keep(Upload(keys), &launch->keys_));
  CERTKV_RETURN_IF_ERROR(keep(Upload(values), &launch->values_));
  CERTKV_RETURN_IF_ERROR(
      keep(cuda::Buffer::Allocate(4 * partial * shape.read_count), &launch->partial_));
  CERTKV_RETURN_IF_ERROR(
      keep(cuda::Buffer::Allocate(4 * outputs * shape.read_count), &launch->outputs_));
  std::vector<PagedRead> reads;
  for (int32_t r = 0; r < shape.read_count; ++r) {
    reads.push_back({launch->queries_->As<uint16_t>(),
                     launch->keys_->As<const uint16_t*>() + int64_t{r} * pages,
                     launch->values_->As<const uint16_t*>() + int64_t{r} * pages,
                     launch->outputs_->As<float>() + r * outputs,
                     launch->partial_->As<float>() + r * partial, pages, pages_per_split, splits});
  }
  CERTKV_RETURN_IF_ERROR(keep(Upload(reads), &launch->reads_));
  launch->plan_ = {shape.read_count, shape.group_size, dim, splits, LogitScale(dim)};
  return launch;
}

int PagedLaunch::Decode(CUstream_st* stream) const {
  return LaunchPagedDecode(plan_, reads_->As<PagedRead>(), stream);
}

}  // namespace certkv::bench
