#include "services/kvstore/spill_open.h"

#include <utility>

#include "services/common/log.h"
#include "services/kvstore/spill_rocksdb.h"

namespace certkv::kvstore {

absl::StatusOr<std::unique_ptr<SpillTier>> OpenSpill(const KvStoreConfig& config,
                                                     const Clock* clock) {
  if (config.spill_directory.empty()) return std::unique_ptr<SpillTier>();
  const int64_t start_ns = clock->MonotonicNs();
  const SpillLimits limits{config.spill_size_bytes, config.spill_ttl_ms};
  absl::StatusOr<std::unique_ptr<SpillStore>> store = OpenRocksDbSpill(config.spill_directory);
  if (absl::IsFailedPrecondition(store.status())) return store.status();
  absl::Status status = store.status();
  auto tier =
      std::make_unique<SpillTier>(store.ok() ? *std::move(store) : nullptr, limits, clock, status);
  if (status.ok()) {
    status = tier->Load([](int64_t blocks) {
      Log(LogLevel::kInfo, "spill_opening", {{"blocks", blocks}});
    });
  }
  const SpillStats stats = tier->GetStats();
  if (!status.ok()) {
    Log(LogLevel::kError, "spill_off",
        {{"directory", config.spill_directory}, {"why", status.message()}});
  } else {
    Log(LogLevel::kInfo, "spill_open",
        {{"directory", config.spill_directory},
         {"blocks", stats.blocks},
         {"bytes", stats.bytes},
         {"milliseconds", (clock->MonotonicNs() - start_ns) / 1'000'000}});
  }
  return tier;
}

}  // namespace certkv::kvstore
