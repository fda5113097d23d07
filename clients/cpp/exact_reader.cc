// The in-process exact read: the same kernel, every tile from its originals.
#include <algorithm>
#include <chrono>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/leased_tiles.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/finish_certificate.h"

namespace certkv::client {
namespace {

absl::Status ReadInvalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "READ_INVALID", message);
}

absl::Status CheckRead(const Worker& worker, const Sequence& sequence, const ReadRequest& read) {
  const CacheSpec& spec = worker.spec();
  if (!(read.layer >= 0 && read.layer < spec.layer_count())) {
    return ReadInvalid(
        absl::StrCat("layer is ", read.layer, ", must be in [0, ", spec.layer_count(), ")"));
  }
  if (!(read.query_position >= 0 && read.query_position < sequence.token_count())) {
    return ReadInvalid(absl::StrCat("query_position is ", read.query_position, ", must be in [0, ",
                                    sequence.token_count(), ")"));
  }
  if (read.queries == nullptr) return ReadInvalid("queries is null");
  return sequence.CheckWritten(read.layer, read.query_position);
}

// Generations of every block, in both tiers.
absl::Status CheckAllGenerations(const Worker& worker, const Sequence& sequence, bool after) {
  for (size_t i = 0; i < sequence.blocks().size(); ++i) {
    CERTKV_RETURN_IF_ERROR(
        CheckGenerations(worker, sequence.blocks()[i], static_cast<int64_t>(i), after));
  }
  return absl::OkStatus();
}

// The tiles of one layer and KV head, with both representations.
std::vector<AttendTile> MakeTiles(const Worker& worker, const Sequence& sequence, int32_t layer,
                                  int32_t kv_head) {
  const SlabLayout& device = worker.device_layout();
  const SlabLayout& backing = worker.backing_layout();
  const CacheSpec& spec = worker.spec();
  std::vector<AttendTile> tiles;
  for (const BlockHandle& block : sequence.blocks()) {
    const auto* keys = reinterpret_cast<const uint16_t*>(
        worker.backing_base() + backing.key_offset(block.backing.slot, layer, kv_head));
    const auto* values = reinterpret_cast<const uint16_t*>(
        worker.backing_base() + backing.value_offset(block.backing.slot, layer, kv_head));
    for (int32_t tile = 0; tile < device.tiles_per_block(); ++tile) {
      tiles.push_back(
          {worker.device_base() + device.scan_offset(block.device.slot, layer, kv_head, tile),
           worker.device_base() + device.detail_offset(block.device.slot, layer, kv_head, tile),
           keys + int64_t{tile} * kTileTokens * spec.head_dim,
           values + int64_t{tile} * kTileTokens * spec.value_dim});
    }
  }
  return tiles;
}

// Is every tile the one that was sealed, in both representations? The bound of an exact output
// comes from the tile's header, so the quantized record counts too.
absl::Status VerifyTiles(const Worker& worker, const Sequence& sequence, int32_t layer,
                         int32_t kv_head, const std::vector<AttendTile>& tiles) {
  const int32_t tiles_per_block = worker.spec().tiles_per_block();
  for (size_t i = 0; i < tiles.size(); ++i) {
    const auto block = static_cast<int64_t>(i) / tiles_per_block;
    const auto tile = static_cast<int32_t>(i % tiles_per_block);
    CERTKV_RETURN_IF_ERROR(VerifyLeasedTile(
        worker, sequence.blocks()[block].key,
        {.block = block, .layer = layer, .kv_head = kv_head, .tile = tile}, tiles[i]));
  }
  return absl::OkStatus();
}

AttendArgs MakeArgs(const Worker& worker, const Sequence& sequence, const ReadRequest& read,
                    int32_t kv_head, const std::vector<AttendTile>& tiles,
                    const std::vector<uint8_t>& sources) {
  const CacheSpec& spec = worker.spec();
  AttendArgs args{};
  args.layout = &worker.device_layout().tile_layout(read.layer);
  args.original_dtype = spec.original_dtype;
  args.logit_scale = spec.logit_scale;
  args.soft_cap = spec.soft_cap;
  args.group_size = spec.group_size;
  args.queries = read.queries + int64_t{kv_head} * spec.group_size * spec.head_dim;
  if (read.sink_logits != nullptr) args.sink_logits = read.sink_logits + kv_head * spec.group_size;
  args.witness_weights = WitnessWeightsOf(spec, read.layer, kv_head);
  args.tiles = tiles.data();
  args.tile_count = static_cast<int32_t>(tiles.size());
  args.tile_sources = sources.data();
  if (const TailRef& tail = sequence.tail(); tail.token_count > 0) {
    const SlabLayout& staging = worker.staging_layout();
    args.tail_keys = reinterpret_cast<const uint16_t*>(
        worker.staging_base() + staging.key_offset(tail.staging_slot, read.layer, kv_head));
    args.tail_values = reinterpret_cast<const uint16_t*>(
        worker.staging_base() + staging.value_offset(tail.staging_slot, read.layer, kv_head));
    args.tail_count = tail.token_count;
  }
  args.tail_key_stride = spec.head_dim;
  args.tail_value_stride = spec.value_dim;
  args.token_end = read.query_position + 1;
  const int64_t window = spec.layers[read.layer].sliding_window;
  args.token_begin = window == 0 ? 0 : std::max<int64_t>(0, args.token_end - window);
  return args;
}

// Arrays that AttendResult points at.
struct HeadArrays {
  HeadArrays(int64_t heads, int64_t atoms, int64_t tiles)
      : lse(heads),
        block_lse(heads * atoms),
        block_max(heads * atoms),
        half_width(heads * atoms),
        tile_error(heads * tiles),
        value_term(heads),
        rounding_term(heads) {}
  std::vector<float> lse, block_lse, block_max, half_width, tile_error, value_term, rounding_term;
  float value_radius = 0;
};

absl::Status ReadKvHead(const AttendArgs& args, int32_t first_head, const ReadRequest& read,
                        ReadResult& result) {
  const int32_t atoms = AttendAtomCount(args);
  HeadArrays arrays(args.group_size, atoms, args.tile_count);
  const AttendResult out{
      result.outputs.data() + int64_t{first_head} * args.layout->value_dim,
      arrays.lse.data(),
      arrays.block_lse.data(),
      arrays.block_max.data(),
      arrays.half_width.data(),
      arrays.tile_error.data(),
      arrays.value_term.data(),
      arrays.rounding_term.data(),
      &arrays.value_radius,
  };
  std::vector<uint8_t> workspace(AttendWorkspaceBytes(args) + 64);
  void* aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  CERTKV_RETURN_IF_ERROR(Attend(Backend::kCpu, args, out, aligned));
  FinishWorkspace finish_workspace;
  const auto key_format = static_cast<uint8_t>(args.layout->key_format);
  const auto value_format = static_cast<uint8_t>(args.layout->value_format);
  for (int32_t g = 0; g < args.group_size; ++g) {
    const FinishArgs finish{atoms,
                            arrays.block_lse.data() + int64_t{g} * atoms,
                            arrays.block_max.data() + int64_t{g} * atoms,
                            arrays.half_width.data() + int64_t{g} * atoms,
                            atoms - 1,
                            arrays.value_term[g],
                            arrays.rounding_term[g],
                            arrays.value_radius,
                            0.0f};
    Certificate certificate;
    CERTKV_RETURN_IF_ERROR(
        FinishCertificate(Backend::kCpu, finish, &finish_workspace, &certificate));
    ReadCertificate& record = result.certificates[first_head + g];
    record.layer = read.layer;
    record.query_head = first_head + g;
    record.query_position = read.query_position;
    record.worst_case_tv = certificate.worst_case_tv;
    record.first_worst_case_tv = certificate.worst_case_tv;
    record.value_term = certificate.value_term;
    record.output_error_bound = certificate.output_error_bound;
    record.value_radius = certificate.value_radius;
    record.read_tokens = args.token_end - args.token_begin;
    record.rung = Rung::kLayer;
    record.outcome = Outcome::kExact;
    record.key_format = key_format;
    record.value_format = value_format;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReadResult> AttendExactInProcess(const Worker& worker, const Sequence& sequence,
                                                const ReadRequest& read) {
  const auto start = std::chrono::steady_clock::now();
  CERTKV_RETURN_IF_ERROR(CheckRead(worker, sequence, read));
  CERTKV_RETURN_IF_ERROR(sequence.CheckLease());
  CERTKV_RETURN_IF_ERROR(CheckAllGenerations(worker, sequence, /*after=*/false));
  const CacheSpec& spec = worker.spec();
  ReadResult result;
  result.in_process = true;
  result.outputs.resize(int64_t{spec.query_head_count()} * spec.value_dim);
  result.certificates.resize(spec.query_head_count());
  for (int32_t kv_head = 0; kv_head < spec.kv_head_count; ++kv_head) {
    const std::vector<AttendTile> tiles = MakeTiles(worker, sequence, read.layer, kv_head);
    const absl::Status intact = VerifyTiles(worker, sequence, read.layer, kv_head, tiles);
    if (!intact.ok()) {
      // A slot that was reused meanwhile explains it.
      CERTKV_RETURN_IF_ERROR(CheckAllGenerations(worker, sequence, /*after=*/true));
      return intact;
    }
    const std::vector<uint8_t> sources(tiles.size() * spec.group_size,
                                       kSourceOriginalKeys | kSourceOriginalValues);
    const AttendArgs args = MakeArgs(worker, sequence, read, kv_head, tiles, sources);
    CERTKV_RETURN_IF_ERROR(ReadKvHead(args, kv_head * spec.group_size, read, result));
  }
  result.tile_sources.assign(
      sequence.blocks().size() * worker.spec().tiles_per_block() * spec.query_head_count(),
      kSourceOriginalKeys | kSourceOriginalValues);
  CERTKV_RETURN_IF_ERROR(CheckAllGenerations(worker, sequence, /*after=*/true));
  CERTKV_RETURN_IF_ERROR(sequence.CheckLease());
  result.read_time_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start)
          .count();
  return result;
}

}  // namespace certkv::client
