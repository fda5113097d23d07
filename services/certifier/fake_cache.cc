#include "services/certifier/fake_cache.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/core/block_key.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/limits.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::certifier {
namespace {

constexpr int32_t kStagingSlots = 4;
constexpr uint64_t kSealedGeneration = 6;
constexpr uint64_t kDitherSecret = 0xfa4e;

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  CERTKV_CHECK(value.ok(), "the fake cache is set up");
  return std::move(value).value();
}

}  // namespace

SequenceData RandomSequence(const CacheSpec& spec, int64_t token_count, float key_scale,
                            std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  SequenceData data;
  data.token_count = token_count;
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    const int64_t channels = int64_t{spec.kv_head_count} * spec.head_dim;
    std::vector<float> offset(channels);
    std::vector<float> spread(channels);
    for (int64_t i = 0; i < channels; ++i) {
      const bool is_large = (*random)() % 16 == 0;
      offset[i] = normal(*random) * (is_large ? 6.0f : 0.5f);
      spread[i] = is_large ? 2.0f : 1.0f;
    }
    std::vector<uint16_t> keys(token_count * channels);
    for (int64_t i = 0; i < token_count * channels; ++i) {
      const float key = offset[i % channels] + spread[i % channels] * normal(*random);
      keys[i] = FloatToOriginal(spec.original_dtype, key * key_scale);
    }
    std::vector<uint16_t> values(token_count * spec.kv_head_count * spec.value_dim);
    for (uint16_t& value : values) value = FloatToOriginal(spec.original_dtype, normal(*random));
    data.keys.push_back(std::move(keys));
    data.values.push_back(std::move(values));
  }
  return data;
}

FakeCache::WriterSlab FakeCache::MakeSlab(SlabKind kind, int32_t slot_count) {
  SlabLayout layout(spec_, kind, slot_count, kDitherSecret);
  UniqueFd fd = ValueOrDie(CreateMemfd("fake", layout.slab_bytes()));
  Mapping mapping = ValueOrDie(Mapping::Map(fd.get(), Mapping::Access::kReadWrite));
  layout.WriteHeader(mapping.data());
  return {std::move(fd), std::move(mapping), std::move(layout)};
}

FakeCache::FakeCache(const CacheSpec& spec, int32_t slot_count)
    : spec_(spec),
      device_(MakeSlab(SlabKind::kDevice, slot_count)),
      backing_(MakeSlab(SlabKind::kBacking, slot_count)),
      staging_slab_(MakeSlab(SlabKind::kStaging, kStagingSlots)) {
  const auto map = [](const WriterSlab& slab) {
    return ValueOrDie(Mapping::Map(slab.fd.get(), Mapping::Access::kReadOnly));
  };
  cache_ = ValueOrDie(MappedCache::Create(spec_, map(device_), map(backing_)));
  staging_ = std::make_shared<const StagingMap>(
      StagingMap{kFakeStagingId,
                 ValueOrDie(MappedSlab::Create(spec_, SlabKind::kStaging, map(staging_slab_)))});
}

void FakeCache::CopyTokens(const WriterSlab& slab, int32_t slot, int64_t first_token,
                           int64_t count) {
  for (int32_t layer = 0; layer < spec_.layer_count(); ++layer) {
    for (int32_t head = 0; head < spec_.kv_head_count; ++head) {
      uint8_t* keys = slab.mapping.data() + slab.layout.key_offset(slot, layer, head);
      uint8_t* values = slab.mapping.data() + slab.layout.value_offset(slot, layer, head);
      for (int64_t t = 0; t < count; ++t) {
        std::memcpy(keys + t * 2 * spec_.head_dim, data_.key(spec_, layer, head, first_token + t),
                    size_t{2} * spec_.head_dim);
        std::memcpy(values + t * 2 * spec_.value_dim,
                    data_.value(spec_, layer, head, first_token + t), size_t{2} * spec_.value_dim);
      }
    }
  }
}

void FakeCache::SealBlock(int32_t block) {
  BlockHandle& handle = blocks_[block];
  for (int32_t layer = 0; layer < spec_.layer_count(); ++layer) {
    const TileLayout& layout = device_.layout.tile_layout(layer);
    for (int32_t head = 0; head < spec_.kv_head_count; ++head) {
      for (int32_t tile = 0; tile < spec_.tiles_per_block(); ++tile) {
        QuantizeTileArgs args{};
        args.spec = &spec_;
        args.layer = layer;
        args.layout = &layout;
        args.keys = original_keys(block, layer, head) + int64_t{tile} * 64 * spec_.head_dim;
        args.values = original_values(block, layer, head) + int64_t{tile} * 64 * spec_.value_dim;
        args.witness_weights = WitnessWeightsOf(spec_, layer, head);
        args.key_stride = spec_.head_dim;
        args.value_stride = spec_.value_dim;
        args.identity_tag = TileIdentityTag(handle.key, layer, head, tile);
        args.scan = scan(block, layer, head, tile);
        args.detail = detail(block, layer, head, tile);
        CERTKV_CHECK(QuantizeTile(Backend::kCpu, args).ok(), "the fake's data is finite");
      }
    }
  }
}

void FakeCache::Put(const SequenceData& data) {
  data_ = data;
  std::vector<int32_t> token_ids(data.token_count);
  for (int64_t t = 0; t < data.token_count; ++t) token_ids[t] = static_cast<int32_t>(t * 7 + 3);
  BlockKeyContext context;
  context.spec_digest = cache_->spec_digest();
  const std::vector<BlockKey> keys = ComputeBlockKeys(context, token_ids, spec_.block_tokens);
  const auto block_count = static_cast<int32_t>(keys.size());
  CERTKV_CHECK(block_count <= device_.layout.slot_count(), "the fake has slots enough");
  for (int32_t block = 0; block < block_count; ++block) {
    BlockHandle handle;
    handle.key = keys[block];
    // Not in order, so that a mix-up of slot and block shows.
    handle.device = {block_count - 1 - block, kSealedGeneration};
    handle.backing = {(block + 1) % block_count, kSealedGeneration};
    blocks_.push_back(handle);
    CopyTokens(backing_, handle.backing.slot, int64_t{block} * spec_.block_tokens,
               spec_.block_tokens);
    SealBlock(block);
    GenerationAt(device_.mapping.data(), device_.layout, handle.device.slot) = kSealedGeneration;
    GenerationAt(backing_.mapping.data(), backing_.layout, handle.backing.slot) = kSealedGeneration;
  }
  tail_count_ = static_cast<int32_t>(data.token_count % spec_.block_tokens);
  CopyTokens(staging_slab_, kFakeTailSlot, int64_t{block_count} * spec_.block_tokens, tail_count_);
}

ViewTail FakeCache::tail() const {
  return ValueOrDie(MakeTail(*cache_, staging_, kFakeTailSlot, tail_count_));
}

std::shared_ptr<View> FakeCache::OpenView(const PolicyLease& policy, BudgetBook* book,
                                          int64_t now_ms) {
  return ValueOrDie(View::Create(cache_, blocks_, tail(), policy, book, now_ms));
}

uint8_t* FakeCache::scan(int32_t block, int32_t layer, int32_t kv_head, int32_t tile) {
  return device_.mapping.data() +
         device_.layout.scan_offset(blocks_[block].device.slot, layer, kv_head, tile);
}

uint8_t* FakeCache::detail(int32_t block, int32_t layer, int32_t kv_head, int32_t tile) {
  return device_.mapping.data() +
         device_.layout.detail_offset(blocks_[block].device.slot, layer, kv_head, tile);
}

uint16_t* FakeCache::original_keys(int32_t block, int32_t layer, int32_t kv_head) {
  return reinterpret_cast<uint16_t*>(
      backing_.mapping.data() +
      backing_.layout.key_offset(blocks_[block].backing.slot, layer, kv_head));
}

uint16_t* FakeCache::original_values(int32_t block, int32_t layer, int32_t kv_head) {
  return reinterpret_cast<uint16_t*>(
      backing_.mapping.data() +
      backing_.layout.value_offset(blocks_[block].backing.slot, layer, kv_head));
}

uint16_t* FakeCache::tail_keys(int32_t layer, int32_t kv_head) {
  return reinterpret_cast<uint16_t*>(
      staging_slab_.mapping.data() +
      staging_slab_.layout.key_offset(kFakeTailSlot, layer, kv_head));
}

void FakeCache::BumpDeviceGeneration(int32_t block) {
  ++GenerationAt(device_.mapping.data(), device_.layout, blocks_[block].device.slot);
}

void FakeCache::BumpBackingGeneration(int32_t block) {
  ++GenerationAt(backing_.mapping.data(), backing_.layout, blocks_[block].backing.slot);
}

void FakeCache::BumpStagingGeneration() {
  ++GenerationAt(staging_slab_.mapping.data(), staging_slab_.layout, kFakeTailSlot);
}

void FakeCache::RestoreGenerations(int32_t block) {
  const BlockHandle& handle = blocks_[block];
  GenerationAt(device_.mapping.data(), device_.layout, handle.device.slot) =
      handle.device.generation;
  GenerationAt(backing_.mapping.data(), backing_.layout, handle.backing.slot) =
      handle.backing.generation;
}

CacheSpec SmallSpec(int32_t layer_count, int32_t kv_head_count, int32_t group_size,
                    int32_t head_dim) {
  CacheSpec spec;
  spec.model = "fake";
  spec.kv_head_count = kv_head_count;
  spec.group_size = group_size;
  spec.head_dim = head_dim;
  spec.value_dim = head_dim;
  spec.rope_pairing = RopePairing::kNone;
  spec.rotary_dim = 0;
  spec.logit_scale = 1 / std::sqrt(static_cast<float>(head_dim));
  spec.layers.resize(layer_count);
  return spec;
}

PolicyLease TestLease(const Tolerances& tolerances, ReadMode mode) {
  PolicyLease lease;
  lease.request = "requests/test";
  lease.lease_id = 1;
  lease.read_mode = mode;
  lease.tolerances = tolerances;
  lease.expire_time_ms = std::numeric_limits<int64_t>::max();
  lease.sequence = 1;
  return lease;
}

}  // namespace certkv::certifier
