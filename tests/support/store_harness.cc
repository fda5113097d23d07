#include "tests/support/store_harness.h"

#include <array>
#include <cstdlib>
#include <cstring>

#include "kernels/core/block_key.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/cuda/cuda.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv {
namespace {

constexpr uint32_t kPatternSize = 1024;

// Halves in [-1, 1); a block's originals are this table read from a place that its key decides.
const std::array<uint16_t, 2 * kPatternSize>& Pattern() {
  static const auto pattern = [] {
    std::array<uint16_t, 2 * kPatternSize> table{};
    for (uint32_t i = 0; i < table.size(); ++i) {
      const uint32_t mixed = (i % kPatternSize) * 2654435761u >> 16;
      table[i] = FloatToF16(static_cast<float>(mixed % 2048) / 1024.0f - 1.0f);
    }
    return table;
  }();
  return pattern;
}

// Where the row of a token starts in the pattern.
uint32_t RowStart(const BlockKey& key, int32_t layer, int32_t kv_head, int32_t row, bool is_value) {
  const uint64_t tag = TileIdentityTag(key, layer, kv_head, 2 * row + (is_value ? 1 : 0));
  return static_cast<uint32_t>(tag % kPatternSize);
}

// visit(offset of a row in the slab, its first element in the pattern, its bytes) for each row;
// stops at the first false and returns it.
template <typename Visit>
bool VisitRows(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key, int32_t slot,
               const Visit& visit) {
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    for (int32_t head = 0; head < spec.kv_head_count; ++head) {
      for (int32_t row = 0; row < spec.block_tokens; ++row) {
        const int64_t key_bytes = int64_t{2} * spec.head_dim;
        const int64_t value_bytes = int64_t{2} * spec.value_dim;
        const bool is_same = visit(layout.key_offset(slot, layer, head) + row * key_bytes,
                                   RowStart(key, layer, head, row, false), key_bytes) &&
                             visit(layout.value_offset(slot, layer, head) + row * value_bytes,
                                   RowStart(key, layer, head, row, true), value_bytes);
        if (!is_same) return false;
      }
    }
  }
  return true;
}

KvStoreConfig ConfigOf(const StoreShape& shape, const CacheSpec& spec) {
  KvStoreConfig config = shape.config;
  config.device_memory_bytes = SlabLayout(spec, SlabKind::kDevice, shape.device_slots).slab_bytes();
  config.backing_memory_bytes =
      SlabLayout(spec, SlabKind::kBacking, shape.backing_slots).slab_bytes();
  return config;
}

}  // namespace

CacheSpec TinySpec(const std::string& model) {
  CacheSpec spec;
  spec.model = model;
  spec.kv_head_count = 1;
  spec.group_size = 1;
  spec.head_dim = 64;
  spec.value_dim = 64;
  spec.rope_pairing = RopePairing::kNone;
  spec.logit_scale = 0.125f;
  spec.layers.resize(2);
  return spec;
}

BlockKey ChainKey(int32_t chain, int32_t index) {
  BlockKeyContext context;
  context.tenant_salt = "chain" + std::to_string(chain);
  return ComputeBlockKey(context, BlockKey{}, {index});
}

BlockKey ChainParent(int32_t chain, int32_t index) {
  return index == 0 ? BlockKey{} : ChainKey(chain, index - 1);
}

std::vector<BlockKey> ChainKeys(int32_t chain, int32_t count) {
  std::vector<BlockKey> keys;
  for (int32_t i = 0; i < count; ++i) keys.push_back(ChainKey(chain, i));
  return keys;
}

void FillOriginals(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key,
                   int32_t slot, uint8_t* base) {
  VisitRows(layout, spec, key, slot, [base](int64_t offset, uint32_t start, int64_t bytes) {
    std::memcpy(base + offset, Pattern().data() + start, static_cast<size_t>(bytes));
    return true;
  });
}

bool HasOriginalsOf(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key,
                    int32_t slot, const uint8_t* base) {
  return VisitRows(layout, spec, key, slot, [base](int64_t offset, uint32_t start, int64_t bytes) {
    return std::memcmp(base + offset, Pattern().data() + start, static_cast<size_t>(bytes)) == 0;
  });
}

absl::Status CheckDevicePlanes(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key,
                               int32_t slot, const uint8_t* base) {
  const SlabLayout one(spec, SlabKind::kBacking, 1);
  std::vector<uint8_t> originals(static_cast<size_t>(one.slab_bytes()));
  FillOriginals(one, spec, key, 0, originals.data());
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    for (int32_t head = 0; head < spec.kv_head_count; ++head) {
      for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
        const uint8_t* scan = base + layout.scan_offset(slot, layer, head, tile);
        TileHeader header;
        std::memcpy(&header, scan, sizeof(header));
        if (header.identity_tag != TileIdentityTag(key, layer, head, tile)) {
          return absl::DataLossError("another block's identity tag");
        }
        const uint8_t* keys =
            originals.data() + one.key_offset(0, layer, head) + tile * OriginalKeyBytes(spec);
        const uint8_t* values =
            originals.data() + one.value_offset(0, layer, head) + tile * OriginalValueBytes(spec);
        absl::Status status = VerifyTile(
            layout.tile_layout(layer), scan, base + layout.detail_offset(slot, layer, head, tile),
            reinterpret_cast<const uint16_t*>(keys), reinterpret_cast<const uint16_t*>(values));
        if (!status.ok()) return status;
      }
    }
  }
  return absl::OkStatus();
}

kvstore::DevicePlace DeviceOfTests() {
  if (std::getenv(kTestDevice) == nullptr) return {};
  static const kvstore::DevicePlace* const place = [] {
    CERTKV_CHECK(cuda::UseDevice().ok(), "host memory is a device");
    DeviceRuntime* const runtime = RegisteredDeviceRuntime();
    return new kvstore::DevicePlace{runtime, runtime->Devices()->front()};
  }();
  return *place;
}

StoreHarness::StoreHarness(const StoreShape& shape, const CacheSpec& spec)
    : spec(spec),
      engine(ConfigOf(shape, spec), &clock, &pool, shape.spill, shape.device),
      device_layout(spec, SlabKind::kDevice, shape.device_slots),
      backing_layout(spec, SlabKind::kBacking, shape.backing_slots) {
  const auto registered = engine.RegisterCache(spec);
  CERTKV_CHECK(registered.ok(), "the cache of a test is registered");
  CERTKV_CHECK(registered->device_slot_count == shape.device_slots &&
                   registered->backing_slot_count == shape.backing_slots,
               "memory for N slots gives N slots");
  cache = registered->cache;
}

StoreHarness::Worker StoreHarness::Attach(const std::string& name, int32_t staging_slots,
                                          const std::string& tenant) {
  const auto role =
      staging_slots > 0 ? kvstore::SessionRole::kWorker : kvstore::SessionRole::kReader;
  auto attached = engine.AttachWorker({cache, name, role, staging_slots, tenant});
  CERTKV_CHECK(attached.ok(), "a worker of a test is attached");
  auto slabs = engine.ConnectSession(attached->fd_token);
  CERTKV_CHECK(slabs.ok(), "a worker of a test is connected");
  Worker worker;
  worker.session = attached->session;
  worker.fd_token = attached->fd_token;
  worker.staging_id = attached->staging_id;
  worker.device_memory = slabs->device;
  device_layout.AdoptDitherSecret(slabs->device->base());
  worker.backing_memory = slabs->backing;
  worker.device = *Mapping::Map(slabs->device->export_fd(), Mapping::Access::kReadOnly);
  worker.backing = *Mapping::Map(slabs->backing->export_fd(), Mapping::Access::kReadOnly);
  if (staging_slots > 0) {
    worker.staging = slabs->staging;
    worker.mapped_staging = *Mapping::Map(slabs->staging->export_fd(), Mapping::Access::kReadWrite);
  }
  return worker;
}

std::vector<kvstore::SealEntry> StoreHarness::Write(Worker& worker, int32_t chain, int32_t first,
                                                    int32_t count) {
  const auto slots = engine.ReserveBlocks(worker.session, count);
  CERTKV_CHECK(slots.ok(), "a test has enough staging slots");
  std::vector<kvstore::SealEntry> entries;
  for (int32_t i = 0; i < count; ++i) {
    const BlockKey key = ChainKey(chain, first + i);
    FillOriginals(worker.staging->layout(), spec, key, (*slots)[i], worker.mapped_staging.data());
    entries.push_back({(*slots)[i], key, ChainParent(chain, first + i)});
  }
  return entries;
}

absl::StatusOr<kvstore::LeasedBlocks> StoreHarness::Put(Worker& worker, int32_t chain,
                                                        int32_t first, int32_t count,
                                                        int64_t lease_duration_ms) {
  return engine.SealBlocks(worker.session, Write(worker, chain, first, count), lease_duration_ms);
}

void StoreHarness::PutUnleased(Worker& worker, int32_t chain, int32_t first, int32_t count) {
  const auto sealed = Put(worker, chain, first, count);
  CERTKV_CHECK(sealed.ok(), "a block of a test is sealed");
  CERTKV_CHECK(engine.ReleaseLease(worker.session, sealed->lease).ok(), "a lease is released");
}

absl::StatusOr<kvstore::LeasedBlocks> StoreHarness::Lookup(const Worker& worker, int32_t chain,
                                                           int32_t count) {
  // As the service does it.
  const std::vector<BlockKey> keys = ChainKeys(chain, count);
  auto leased = engine.TryLookupAndLease(worker.session, keys, 0);
  return leased.has_value() ? *std::move(leased) : engine.LookupAndLease(worker.session, keys, 0);
}

int32_t StoreHarness::CountPrefix(int32_t chain, int32_t count) {
  int32_t found = 0;
  for (const BlockKey& key : ChainKeys(chain, count)) {
    if (!engine.GetBlock(cache, key).ok()) break;
    ++found;
  }
  return found;
}

bool StoreHarness::IsReadable(const Worker& worker, const BlockHandle& handle) const {
  if (!GenerationMatches(worker.backing.data(), backing_layout, handle.backing)) return false;
  const bool has_originals =
      HasOriginalsOf(backing_layout, spec, handle.key, handle.backing.slot, worker.backing.data());
  if (!GenerationStillMatches(worker.backing.data(), backing_layout, handle.backing)) return false;
  if (!handle.device.present()) return has_originals;
  if (!GenerationMatches(worker.device.data(), device_layout, handle.device)) return false;
  const absl::Status planes =
      CheckDevicePlanes(device_layout, spec, handle.key, handle.device.slot, worker.device.data());
  kvstore::DeviceCopy* const copy = worker.device_memory->device_copy();
  const bool is_copied = copy == nullptr || !copy->Differs(handle.device.slot);
  if (!GenerationStillMatches(worker.device.data(), device_layout, handle.device)) return false;
  return has_originals && planes.ok() && is_copied;
}

kvstore::BlockInfo StoreHarness::Info(int32_t chain, int32_t index) {
  const auto info = engine.GetBlock(cache, ChainKey(chain, index));
  CERTKV_CHECK(info.ok(), "a test asks about blocks that are there");
  return *info;
}

}  // namespace certkv
