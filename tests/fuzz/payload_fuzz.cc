// Fuzzes blocks that come back from disk. An input is a list of changes to a good payload: it is
// refused, or the slots hold what was sealed. The records of the database are fuzzed with it.
#include <cstring>
#include <vector>

#include "kernels/core/check.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/block_planes.h"
#include "services/kvstore/block_writer.h"
#include "services/kvstore/spill_record.h"
#include "tests/fuzz/fuzz_checks.h"
#include "tests/support/store_harness.h"

namespace certkv {
namespace {

constexpr int32_t kSlot = 0;  // of both tiers

// A cache, apart from any engine, and a good payload for it.
struct Disk {
  Disk() {
    cache = *kvstore::Cache::Create(CacheId{1}, spec, {int64_t{1} << 20, int64_t{1} << 20}, &hub,
                                    &counters);
    FillOriginals(cache->backing().layout(), spec, key, kSlot, cache->backing_memory()->base());
    write.key = key;
    write.backing_slot = kSlot;
    write.device_slot = kSlot;
    good.resize(static_cast<size_t>(kvstore::OriginalBytesOf(*cache)));
    const SlabLayout& layout = cache->backing().layout();
    // The originals alone are a payload too; the planes are made of them.
    int64_t offset = 0;
    for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
      for (const int64_t from : {layout.key_offset(write.backing_slot, layer, 0),
                                 layout.value_offset(write.backing_slot, layer, 0)}) {
        const int64_t bytes = int64_t{spec.block_tokens} * spec.head_dim * 2;
        std::memcpy(good.data() + offset, cache->backing_memory()->base() + from,
                    static_cast<size_t>(bytes));
        offset += bytes;
      }
    }
    std::vector<uint64_t> checksums;
    for (int64_t i = 0; i < kvstore::PlanesPerBlock(spec); ++i) {
      const kvstore::Plane plane = kvstore::PlaneAt(spec, i);
      for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
        checksums.push_back(0);
        const auto target = kvstore::SlotTarget(*cache, write.device_slot, plane, tile);
        CERTKV_CHECK(kvstore::WriteTile(*cache, write, plane, tile, target, &checksums.back()).ok(),
                     "good originals are quantized");
      }
    }
    write.originals_digest =
        kvstore::DigestOfChecksums(checksums.data(), static_cast<int64_t>(checksums.size()));
  }

  const CacheSpec spec = TinySpec();
  const BlockKey key = ChainKey(1, 0);
  kvstore::EventHub hub{1, 16, 16, 1};
  kvstore::StoreCounters counters;
  std::shared_ptr<kvstore::Cache> cache;
  kvstore::BlockWrite write;
  std::vector<uint8_t> good;
};

void Restore(Disk& disk, FuzzInput input) {
  std::vector<uint8_t> payload = disk.good;
  const auto shape = input.Take<uint8_t>();
  if ((shape & 1) != 0) payload.resize(input.Take<uint32_t>() % (2 * payload.size()));
  if ((shape & 2) != 0) {  // as with planes before it
    payload.insert(payload.begin(), static_cast<size_t>(kvstore::PlaneBytesOf(*disk.cache)), 0);
  }
  while (!input.empty() && !payload.empty()) {
    const auto at = input.Take<uint32_t>();
    payload[at % payload.size()] ^= input.Take<uint8_t>();
  }
  const absl::Status status = kvstore::CopyIn(*disk.cache, disk.write, payload);
  CheckRefusal(status);
  if (!status.ok()) return;
  CERTKV_CHECK(HasOriginalsOf(disk.cache->backing().layout(), disk.spec, disk.key,
                              disk.write.backing_slot, disk.cache->backing_memory()->base()),
               "what is taken back is what was sealed");
  CheckRefusal(CheckDevicePlanes(disk.cache->device().layout(), disk.spec, disk.key,
                                 disk.write.device_slot, disk.cache->device_memory()->base()));
}

void ParseOne(const std::string& bytes) {
  kvstore::SpilledBlock block;
  if (!kvstore::ParseSpillRecord(bytes, &block)) return;
  CERTKV_CHECK(kvstore::EncodeSpillRecord(block) == bytes, "a record is written as it is read");
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* disk = new certkv::Disk;
  certkv::FuzzInput input(data, size);
  if (input.Take<uint8_t>() == 'r') {
    certkv::ParseOne(input.Rest());
  } else {
    certkv::Restore(*disk, input);
  }
  return 0;
}
