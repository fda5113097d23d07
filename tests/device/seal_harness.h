// A store whose workers have staging memory on the device that host memory is, and what should
// become of the blocks that they stage there.
#ifndef CERTKV_TESTS_DEVICE_SEAL_HARNESS_H_
#define CERTKV_TESTS_DEVICE_SEAL_HARNESS_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "kernels/core/block_key.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/cuda/cuda.h"
#include "kernels/ops/imported_memory.h"
#include "kernels/ops/quantize_tile.h"
#include "services/kvstore/block_planes.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {

inline DevicePlace PlaceOfHostMemory() {
  CERTKV_CHECK(cuda::UseDevice().ok(), "host memory is a device");
  DeviceRuntime* const runtime = RegisteredDeviceRuntime();
  return {runtime, runtime->Devices()->front()};
}

inline StoreShape ShapeWithStaging(int32_t slots = 16) {
  StoreShape shape;
  shape.device_slots = slots;
  shape.backing_slots = slots;
  shape.device = PlaceOfHostMemory();
  shape.config.device_staging_memory_bytes = int64_t{1} << 30;
  return shape;
}

class SealHarness : public StoreHarness {
 public:
  explicit SealHarness(const StoreShape& shape = ShapeWithStaging(),
                       const CacheSpec& spec = TinySpec())
      : StoreHarness(shape, spec) {}

  // A worker that wants the memory; `staging` null: it was given none.
  struct DeviceWorker {
    Worker worker;
    std::unique_ptr<ImportedMemory> staging;
  };
  DeviceWorker AttachOnDevice(const std::string& name, int32_t slots = 16) {
    DeviceWorker result;
    result.worker = AttachWith({cache, name, SessionRole::kWorker, slots, "", true});
    const Mapping& mapped = result.worker.mapped_staging;
    auto opened =
        ImportedMemory::Open(RegisteredDeviceRuntime(), mapped.data(), mapped.size_bytes());
    if (opened.ok()) result.staging = *std::move(opened);
    return result;
  }

  // Reserves blocks of a chain and fills their slots on the device.
  std::vector<SealEntry> Stage(DeviceWorker& from, int32_t chain, int32_t count) {
    const auto slots = engine.ReserveBlocks(from.worker.session, count);
    CERTKV_CHECK(slots.ok(), "a test has enough staging slots");
    std::vector<SealEntry> entries;
    for (int32_t i = 0; i < count; ++i) {
      Fill(from.worker.staging->layout(), (*slots)[i], chain * 100 + i, from.staging->base());
      entries.push_back({(*slots)[i], ChainKey(chain, i), ChainParent(chain, i)});
    }
    return entries;
  }
  absl::StatusOr<LeasedBlocks> Seal(const DeviceWorker& from,
                                    const std::vector<SealEntry>& entries) {
    return engine.SealBlocks(from.worker.session, entries,
                             SealOptions{.from_device_staging = true});
  }
  int32_t FreeSlots(const DeviceWorker& of) {
    int32_t count = 0;
    while (engine.ReserveBlocks(of.worker.session, 1).ok()) ++count;
    return count;
  }

  // Originals that follow from a seed, all finite and small.
  void Fill(const SlabLayout& layout, int32_t slot, uint32_t seed, uint8_t* base) const {
    std::mt19937 random(seed);
    auto* const numbers = reinterpret_cast<uint16_t*>(base + layout.key_offset(slot, 0, 0));
    for (int64_t i = 0; i < layout.slot_bytes() / 2; ++i) {
      numbers[i] = FloatToOriginal(spec.original_dtype,
                                   std::uniform_real_distribution<float>(-4, 4)(random));
    }
  }
  // The originals are those of the seed.
  bool HasOriginals(const Worker& worker, const BlockHandle& block, uint32_t seed) const {
    const SlabLayout one(spec, SlabKind::kBacking, 1);
    std::vector<uint8_t> expected(static_cast<size_t>(one.slab_bytes()));
    Fill(one, 0, seed, expected.data());
    return std::memcmp(worker.backing.data() + backing_layout.key_offset(block.backing.slot, 0, 0),
                       expected.data() + one.key_offset(0, 0, 0),
                       static_cast<size_t>(one.slot_bytes())) == 0;
  }
  // How many tiles of the block aren't, byte for byte, what QuantizeTile makes of the originals in
  // its backing slot; of their codes and scales alone where not `whole`.
  int WrongRecords(const Worker& worker, const BlockHandle& block, Backend backend,
                   bool whole) const;
  // How many tiles are other in the slab's copy at `base`.
  int DifferentRecords(const Worker& worker, const BlockHandle& block, const uint8_t* base) const;

 private:
  Worker AttachWith(const AttachRequest& request);
};

inline StoreHarness::Worker SealHarness::AttachWith(const AttachRequest& request) {
  auto attached = engine.AttachWorker(request);
  CERTKV_CHECK(attached.ok(), "a worker of a test is attached");
  auto slabs = engine.ConnectSession(attached->fd_token);
  CERTKV_CHECK(slabs.ok(), "a worker of a test is connected");
  Worker worker;
  worker.session = attached->session;
  worker.staging = slabs->staging;
  worker.device_memory = slabs->device;
  worker.backing_memory = slabs->backing;
  worker.device = *Mapping::Map(slabs->device->export_fd(), Mapping::Access::kReadOnly);
  worker.backing = *Mapping::Map(slabs->backing->export_fd(), Mapping::Access::kReadOnly);
  worker.mapped_staging = *Mapping::Map(slabs->staging->export_fd(), Mapping::Access::kReadWrite);
  return worker;
}

inline int SealHarness::DifferentRecords(const Worker& worker, const BlockHandle& block,
                                         const uint8_t* base) const {
  int different = 0;
  for (int64_t i = 0; i < PlanesPerBlock(spec) * spec.tiles_per_block(); ++i) {
    const Plane plane = PlaneAt(spec, i / spec.tiles_per_block());
    const auto tile = static_cast<int32_t>(i % spec.tiles_per_block());
    const TileLayout& layout = device_layout.tile_layout(plane.layer);
    const auto differs = [&](int64_t offset, int64_t size_bytes) {
      return std::memcmp(base + offset, worker.device.data() + offset,
                         static_cast<size_t>(size_bytes)) != 0;
    };
    const int32_t slot = block.device.slot;
    const bool is_other =
        differs(device_layout.scan_offset(slot, plane.layer, plane.kv_head, tile),
                layout.scan_bytes) ||
        differs(device_layout.detail_offset(slot, plane.layer, plane.kv_head, tile),
                layout.detail_bytes);
    different += is_other ? 1 : 0;
  }
  return different;
}

inline int SealHarness::WrongRecords(const Worker& worker, const BlockHandle& block,
                                     Backend backend, bool whole) const {
  const uint8_t* const base = worker.device.data();
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  int wrong = 0;
  for (int64_t i = 0; i < PlanesPerBlock(spec); ++i) {
    const Plane plane = PlaneAt(spec, i);
    const TileLayout& layout = device_layout.tile_layout(plane.layer);
    std::vector<Line> made(static_cast<size_t>(layout.tile_bytes() / 64));
    for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
      const OriginalTile original = OriginalTileAt(worker.backing.data(), backing_layout, spec,
                                                   block.backing.slot, plane, tile);
      QuantizeTileArgs args{};
      args.spec = &spec;
      args.layer = plane.layer;
      args.layout = &layout;
      args.keys = original.keys;
      args.values = original.values;
      args.witness_weights = WitnessWeightsOf(spec, plane.layer, plane.kv_head);
      args.key_stride = spec.head_dim;
      args.value_stride = spec.value_dim;
      args.identity_tag = TileIdentityTag(block.key, plane.layer, plane.kv_head, tile);
      args.scan = made[0].bytes;
      args.detail = args.scan + layout.scan_bytes;
      CERTKV_CHECK(QuantizeTile(backend, args).ok(), "originals of a test can be sealed");
      const uint8_t* const scan =
          base + device_layout.scan_offset(block.device.slot, plane.layer, plane.kv_head, tile);
      const uint8_t* const detail =
          base + device_layout.detail_offset(block.device.slot, plane.layer, plane.kv_head, tile);
      const auto differs = [&](int64_t begin, int64_t end) {
        return std::memcmp(scan + begin, args.scan + begin, static_cast<size_t>(end - begin)) != 0;
      };
      const bool is_wrong =
          std::memcmp(detail, args.detail, static_cast<size_t>(layout.detail_bytes)) != 0 ||
          (whole ? differs(0, layout.scan_bytes)
                 : differs(layout.scale_offset, layout.witness_offset) ||
                       differs(layout.coarse_offset, layout.scan_bytes));
      wrong += is_wrong ? 1 : 0;
    }
  }
  return wrong;
}

}  // namespace certkv::kvstore

#endif  // CERTKV_TESTS_DEVICE_SEAL_HARNESS_H_
