#include "services/certifier/read_workspace.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "kernels/core/limits.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend_progressive.h"

namespace certkv::certifier {
namespace {

constexpr auto kScratchAlignment = std::align_val_t{kPlaneAlignment};

template <typename T>
void Grow(std::vector<T>* array, int64_t size) {
  if (static_cast<int64_t>(array->size()) < size) array->resize(static_cast<size_t>(size));
}

}  // namespace

void ReadWorkspace::AlignedDelete::operator()(uint8_t* memory) const {
  ::operator delete[](memory, kScratchAlignment);
}

void WorkspaceShape::Include(const WorkspaceShape& other) {
  group_size = std::max(group_size, other.group_size);
  head_dim = std::max(head_dim, other.head_dim);
  value_dim = std::max(value_dim, other.value_dim);
  tile_count = std::max(tile_count, other.tile_count);
  atom_count = std::max(atom_count, other.atom_count);
  attend_bytes = std::max(attend_bytes, other.attend_bytes);
}

WorkspaceShape ShapeOfRead(const CacheSpec& spec, const TileLayout& layout, int32_t tile_count,
                           int32_t tail_count) {
  AttendArgs args{};
  args.layout = &layout;
  args.original_dtype = spec.original_dtype;
  args.logit_scale = spec.logit_scale;
  args.soft_cap = spec.soft_cap;
  args.group_size = spec.group_size;
  args.tile_count = tile_count;
  args.tail_count = tail_count;
  args.tail_key_stride = spec.head_dim;
  args.tail_value_stride = spec.value_dim;
  args.token_end = int64_t{tile_count} * kTileTokens + tail_count;
  return {spec.group_size,
          spec.head_dim,
          spec.value_dim,
          tile_count,
          std::max(AttendAtomCount(args), ProgressiveAtomsMax(args)),
          std::max(AttendWorkspaceBytes(args), ProgressiveWorkspaceBytes(args))};
}

WorkspaceShape ShapeOfReads(const CacheSpec& spec, int64_t token_count) {
  const int64_t block_count = (token_count + spec.block_tokens - 1) / spec.block_tokens;
  WorkspaceShape shape;
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    shape.Include(ShapeOfRead(spec, MakeTileLayout(spec, layer),
                              static_cast<int32_t>(block_count) * spec.tiles_per_block(),
                              spec.block_tokens));
  }
  return shape;
}

void ReadWorkspace::Reserve(const WorkspaceShape& wanted) {
  WorkspaceShape shape = shape_;
  shape.Include(wanted);
  if (shape == shape_) return;
  const int64_t heads = shape.group_size;
  Grow(&tiles, shape.tile_count);
  Grow(&original_held, shape.tile_count);
  Grow(&sources, heads * shape.tile_count);
  Grow(&ladders, heads);
  ladder.Reserve(shape.tile_count, shape.atom_count);
  Grow(&pass_queries, heads * shape.head_dim);
  Grow(&pass_sink_logits, heads);
  Grow(&pass_failure_probability, heads);
  Grow(&pass_sources, heads * shape.tile_count);
  Grow(&outputs, heads * shape.value_dim);
  Grow(&lse_nat, heads);
  Grow(&block_lse, heads * shape.atom_count);
  Grow(&block_max_logit, heads * shape.atom_count);
  Grow(&logit_half_width, heads * shape.atom_count);
  Grow(&top_half_width, heads * shape.atom_count);
  Grow(&tile_value_error, heads * shape.tile_count);
  Grow(&value_term, heads);
  Grow(&rounding_term, heads);
  Grow(&pass_skip_tolerance, heads);
  Grow(&atom_count, heads);
  Grow(&skipped_lse_nat, heads);
  Grow(&sub_blocks_read, heads * shape.tile_count);
  if (shape.attend_bytes > shape_.attend_bytes) {
    attend_scratch_.reset(static_cast<uint8_t*>(
        ::operator new[](static_cast<size_t>(shape.attend_bytes), kScratchAlignment)));
  }
  shape_ = shape;
}

WorkspacePool::WorkspacePool(int32_t count) {
  for (int32_t i = 0; i < count; ++i) idle_.push_back(std::make_unique<ReadWorkspace>());
}

void WorkspacePool::Reserve(const CacheSpec& spec, int64_t token_count) {
  const auto rounded = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(token_count)));
  const WorkspaceShape shape = ShapeOfReads(spec, rounded);
  absl::MutexLock lock(&mutex_);
  shape_.Include(shape);
  for (const auto& workspace : idle_) workspace->Reserve(shape_);
}

WorkspacePool::Handle WorkspacePool::Take() {
  absl::MutexLock lock(&mutex_);
  if (idle_.empty()) {
    auto workspace = std::make_unique<ReadWorkspace>();
    workspace->Reserve(shape_);
    return {this, std::move(workspace)};
  }
  std::unique_ptr<ReadWorkspace> workspace = std::move(idle_.back());
  idle_.pop_back();
  return {this, std::move(workspace)};
}

void WorkspacePool::Return(std::unique_ptr<ReadWorkspace> workspace) {
  absl::MutexLock lock(&mutex_);
  workspace->Reserve(shape_);
  idle_.push_back(std::move(workspace));
}

}  // namespace certkv::certifier
