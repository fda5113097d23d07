#include <algorithm>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cuda/copied_read.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/gather.h"
#include "kernels/ops/resident.h"

namespace certkv::cuda {
namespace {

// Originals of a tile, keys or values: where the host has them, and what is to point to the
// device's.
struct Original {
  const uint16_t* from;
  const uint16_t** to;
  int64_t size_bytes;
};

int64_t OriginalTileBytes(int32_t dim) {
  return int64_t{kTileTokens} * dim * static_cast<int64_t>(sizeof(uint16_t));
}

// kSource bits that heads have at a tile.
uint8_t SourcesOf(const AttendArgs& args, int32_t tile) {
  if (args.tile_sources == nullptr) return kSourceQuantized;
  uint8_t sources = kSourceQuantized;
  for (int32_t g = 0; g < args.group_size; ++g) {
    sources |= args.tile_sources[int64_t{g} * args.tile_count + tile];
  }
  return sources;
}

// Brings originals to device memory, on the default stream: those that are pinned
// (kernels/ops/resident.h) by one launch that reads all of them over the bus, the others by copies.
absl::Status BringOriginals(absl::Span<const Original> originals, DeviceMemory* memory) {
  int64_t size_bytes = 0;
  for (const Original& original : originals) size_bytes += original.size_bytes;
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const begin, memory->Allocate<uint8_t>(size_bytes));
  uint8_t* to = begin;
  std::vector<OriginalCopy> gathered;
  for (const Original& original : originals) {
    *original.to = reinterpret_cast<const uint16_t*>(to);
    const uint8_t* const pinned = PinnedAddress(original.from, original.size_bytes);
    if (pinned != nullptr && reinterpret_cast<uintptr_t>(pinned) % kCopyAlignment == 0) {
      gathered.push_back({pinned, to, original.size_bytes});
    } else {
      CERTKV_RETURN_IF_ERROR(memory->CopyInto(to, original.from, original.size_bytes));
    }
    to += original.size_bytes;
  }
  if (gathered.empty()) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(CheckOriginalCopies(gathered));
  const auto count = static_cast<int32_t>(gathered.size());
  CERTKV_ASSIGN_OR_RETURN(const OriginalCopy* const copies, memory->Copy(gathered.data(), count));
  return StatusOfCuda(static_cast<cudaError_t>(LaunchGather(copies, count, nullptr)),
                      "gathering originals");
}

// Tiles that the range touches, in device memory: where the device has them
// (kernels/ops/resident.h), or copied there, records in two slabs, later tiles first, because
// nothing may depend on their order. Originals only where a head reads them.
absl::StatusOr<const AttendTile*> CopyTiles(const AttendArgs& args, DeviceMemory* memory) {
  const TileLayout& layout = *args.layout;
  const auto begin =
      static_cast<int32_t>(std::min<int64_t>(args.token_begin / kTileTokens, args.tile_count));
  const auto end = static_cast<int32_t>(
      std::min<int64_t>((args.token_end + kTileTokens - 1) / kTileTokens, args.tile_count));
  const auto scan_of = [&](int32_t t) {
    return ResidentAddress(args.tiles[t].scan, layout.scan_bytes);
  };
  const auto detail_of = [&](int32_t t) {
    return ResidentAddress(args.tiles[t].detail, layout.detail_bytes);
  };
  int64_t count = 0;  // of tiles that the device doesn't have
  for (int32_t t = begin; t < end; ++t) count += scan_of(t) == nullptr || detail_of(t) == nullptr;
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const scans,
                          memory->Allocate<uint8_t>(count * layout.scan_bytes));
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const details,
                          memory->Allocate<uint8_t>(count * layout.detail_bytes));
  std::vector<AttendTile> tiles(args.tile_count, AttendTile{});
  std::vector<Original> originals;
  for (int32_t t = begin; t < end; ++t) {
    const AttendTile& from = args.tiles[t];
    tiles[t].scan = scan_of(t);
    tiles[t].detail = detail_of(t);
    if (tiles[t].scan == nullptr || tiles[t].detail == nullptr) {
      --count;
      uint8_t* const scan = scans + count * layout.scan_bytes;
      uint8_t* const detail = details + count * layout.detail_bytes;
      CERTKV_RETURN_IF_ERROR(memory->CopyInto(scan, from.scan, layout.scan_bytes));
      CERTKV_RETURN_IF_ERROR(memory->CopyInto(detail, from.detail, layout.detail_bytes));
      tiles[t].scan = scan;
      tiles[t].detail = detail;
    }
    const uint8_t sources = SourcesOf(args, t);
    if ((sources & kSourceOriginalKeys) != 0) {
      originals.push_back(
          {from.original_keys, &tiles[t].original_keys, OriginalTileBytes(layout.head_dim)});
    }
    if ((sources & kSourceOriginalValues) != 0) {
      originals.push_back(
          {from.original_values, &tiles[t].original_values, OriginalTileBytes(layout.value_dim)});
    }
  }
  CERTKV_RETURN_IF_ERROR(BringOriginals(originals, memory));
  return memory->Copy(tiles.data(), args.tile_count);
}

absl::StatusOr<AttendResult> AllocateResults(const AttendArgs& args, const AttendResult& result,
                                             DeviceMemory* memory) {
  const int64_t heads = args.group_size;
  const int64_t atoms = heads * AttendAtomCount(args);
  AttendResult copy{};
  CERTKV_ASSIGN_OR_RETURN(copy.outputs,
                          memory->AllocateResult(result.outputs, heads * args.layout->value_dim));
  CERTKV_ASSIGN_OR_RETURN(copy.lse_nat, memory->AllocateResult(result.lse_nat, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.block_lse, memory->AllocateResult(result.block_lse, atoms));
  CERTKV_ASSIGN_OR_RETURN(copy.block_max_logit,
                          memory->AllocateResult(result.block_max_logit, atoms));
  CERTKV_ASSIGN_OR_RETURN(copy.logit_half_width,
                          memory->AllocateResult(result.logit_half_width, atoms));
  if (result.top_half_width != nullptr) {
    CERTKV_ASSIGN_OR_RETURN(copy.top_half_width,
                            memory->AllocateResult(result.top_half_width, atoms));
  }
  CERTKV_ASSIGN_OR_RETURN(copy.tile_value_error,
                          memory->AllocateResult(result.tile_value_error, heads * args.tile_count));
  CERTKV_ASSIGN_OR_RETURN(copy.value_term, memory->AllocateResult(result.value_term, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.rounding_term, memory->AllocateResult(result.rounding_term, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.value_radius, memory->AllocateResult(result.value_radius, 1));
  return copy;
}

// Launches may be on streams that don't wait for the default one.
absl::Status WaitForCopies() {
  return StatusOfCuda(cudaStreamSynchronize(nullptr), "copying to the device");
}

}  // namespace

absl::StatusOr<AttendArgs> CopyAttendArgs(const AttendArgs& args, bool has_float_queries,
                                          DeviceMemory* memory) {
  const int64_t heads = args.group_size;
  AttendArgs copy = args;  // layout stays a host address, for PlanRead
  CERTKV_ASSIGN_OR_RETURN(copy.queries, memory->Copy(has_float_queries ? args.queries : nullptr,
                                                     heads * args.layout->head_dim));
  CERTKV_ASSIGN_OR_RETURN(copy.witness_weights,
                          memory->Copy(args.witness_weights, args.layout->head_dim));
  CERTKV_ASSIGN_OR_RETURN(copy.sink_logits, memory->Copy(args.sink_logits, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.tiles, CopyTiles(args, memory));
  CERTKV_ASSIGN_OR_RETURN(copy.tile_sources,
                          memory->Copy(args.tile_sources, heads * args.tile_count));
  CERTKV_ASSIGN_OR_RETURN(
      copy.tail_keys,
      memory->Copy(args.tail_keys,
                   StridedCount(args.tail_count, args.tail_key_stride, args.layout->head_dim)));
  CERTKV_ASSIGN_OR_RETURN(
      copy.tail_values,
      memory->Copy(args.tail_values,
                   StridedCount(args.tail_count, args.tail_value_stride, args.layout->value_dim)));
  return copy;
}

absl::StatusOr<int32_t> DefaultBlockTarget() {
  int device = 0;
  int multiprocessors = 0;
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaGetDevice(&device), "asking for the device"));
  CERTKV_RETURN_IF_ERROR(
      StatusOfCuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                   "asking for the device's multiprocessors"));
  return 2 * multiprocessors;
}

CopiedRead::CopiedRead() : memory_(std::make_unique<DeviceMemory>()) {}
CopiedRead::CopiedRead(CopiedRead&&) noexcept = default;
CopiedRead& CopiedRead::operator=(CopiedRead&&) noexcept = default;
CopiedRead::~CopiedRead() = default;

absl::StatusOr<CopiedRead> CopiedRead::Make(const AttendArgs& args, const AttendResult& result,
                                            const Options& options) {
  CopiedRead copied;
  DeviceMemory* const memory = copied.memory_.get();
  QueryRows queries = options.queries;
  CERTKV_ASSIGN_OR_RETURN(const AttendArgs device_args,
                          CopyAttendArgs(args, queries.bits == nullptr, memory));
  CERTKV_ASSIGN_OR_RETURN(
      queries.bits, memory->Copy(queries.bits, int64_t{args.group_size} * args.layout->head_dim));
  CERTKV_ASSIGN_OR_RETURN(const AttendResult device_result, AllocateResults(args, result, memory));
  int32_t block_target = options.block_target;
  if (block_target == 0) {
    CERTKV_ASSIGN_OR_RETURN(block_target, DefaultBlockTarget());
  }
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const scratch,
                          memory->Allocate<uint8_t>(ScratchBytes(args, block_target)));
  copied.read_ = PlanRead(device_args, device_result, block_target, scratch, queries);
  CERTKV_ASSIGN_OR_RETURN(copied.device_read_, memory->Copy(&copied.read_, 1));
  CERTKV_RETURN_IF_ERROR(WaitForCopies());
  return copied;
}

absl::Status CopiedRead::CopyQueries(const void* queries) {
  const int64_t count = int64_t{read_.args.group_size} * read_.layout.head_dim;
  // Its own memory, which only others see as constant.
  if (read_.queries.bits != nullptr) {
    CERTKV_RETURN_IF_ERROR(
        memory_->CopyInto(const_cast<uint16_t*>(read_.queries.bits), queries, 2 * count));
  } else {
    CERTKV_RETURN_IF_ERROR(
        memory_->CopyInto(const_cast<float*>(read_.args.queries), queries, 4 * count));
  }
  return WaitForCopies();
}

absl::Status CopiedRead::ReadBack() { return memory_->ReadBack(); }

}  // namespace certkv::cuda
