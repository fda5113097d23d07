// A store engine in a test: a small cache, a clock that stands still, blocks whose bytes follow
// from their keys.
#ifndef CERTKV_TESTS_SUPPORT_STORE_HARNESS_H_
#define CERTKV_TESTS_SUPPORT_STORE_HARNESS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/config.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/fake_clock.h"

namespace certkv {

// 2 layers, 1 KV head, d 64, K8V4: 32 KiB of originals per block. `model` makes it another cache.
CacheSpec TinySpec(const std::string& model = "tiny");

// Key of a block, and of the blocks before it, by the number of its chain.
BlockKey ChainKey(int32_t chain, int32_t index);
BlockKey ChainParent(int32_t chain, int32_t index);  // zeros when index is 0
std::vector<BlockKey> ChainKeys(int32_t chain, int32_t count);

// Writes the originals that follow from `key` into a slot of a staging (or backing) slab.
void FillOriginals(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key,
                   int32_t slot, uint8_t* base);
// Are the originals in the slot those of `key`? Reads every byte.
bool HasOriginalsOf(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key,
                    int32_t slot, const uint8_t* base);
// Are the device tier planes in the slot a valid encoding of the originals of `key`?
absl::Status CheckDevicePlanes(const SlabLayout& layout, const CacheSpec& spec, const BlockKey& key,
                               int32_t slot, const uint8_t* base);

// Where the copies of device slabs are in this run of the tests: nowhere, or, where the environment
// has kTestDevice, on the device that on_cpu/sharing makes of host memory.
kvstore::DevicePlace DeviceOfTests();
inline constexpr char kTestDevice[] = "CERTKV_TEST_DEVICE";

// What a test changes about the store.
struct StoreShape {
  int32_t device_slots = 8;
  int32_t backing_slots = 16;
  KvStoreConfig config;  // its memory sizes are overwritten
  kvstore::SpillTier* spill = nullptr;
  kvstore::DevicePlace device = DeviceOfTests();
};

// The engine and one cache. Every worker's staging memory is mapped through its descriptor, as a
// worker would.
class StoreHarness {
 public:
  struct Worker {
    SessionId session{};
    std::string fd_token;
    int64_t staging_id = 0;
    std::shared_ptr<kvstore::SlabMemory> staging;
    // The store's own memory, to break things with.
    std::shared_ptr<kvstore::SlabMemory> device_memory;
    std::shared_ptr<kvstore::SlabMemory> backing_memory;
    Mapping device;   // read-only
    Mapping backing;  // read-only
    Mapping mapped_staging;
  };

  explicit StoreHarness(const StoreShape& shape = {}, const CacheSpec& spec = TinySpec());

  // Attaches and connects a worker, or (staging_slots 0) a reader.
  Worker Attach(const std::string& name, int32_t staging_slots = 16,
                const std::string& tenant = "");
  // Reserves, fills and names blocks [first, first + count) of a chain; not sealed yet.
  std::vector<kvstore::SealEntry> Write(Worker& worker, int32_t chain, int32_t first,
                                        int32_t count);
  // Writes and seals them.
  absl::StatusOr<kvstore::LeasedBlocks> Put(Worker& worker, int32_t chain, int32_t first,
                                            int32_t count, int64_t lease_duration_ms = 0);
  // Put that must succeed, and whose lease is released.
  void PutUnleased(Worker& worker, int32_t chain, int32_t first, int32_t count);
  // Looks the first `count` blocks of the chain up, at once or, where it must, with promotion.
  absl::StatusOr<kvstore::LeasedBlocks> Lookup(const Worker& worker, int32_t chain, int32_t count);
  // How many leading blocks of the chain the store has; changes nothing.
  int32_t CountPrefix(int32_t chain, int32_t count);
  // Does the handle still name the block of `key`, in every tier it names?
  bool IsReadable(const Worker& worker, const BlockHandle& handle) const;
  kvstore::BlockInfo Info(int32_t chain, int32_t index);

  const CacheSpec spec;
  FakeClock clock;
  kvstore::ComputePool pool{2, 64};
  kvstore::StoreEngine engine;
  CacheId cache{};
  SlabLayout device_layout;  // with the store's dither secret, once a worker is attached
  const SlabLayout backing_layout;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_STORE_HARNESS_H_
