#include "services/kvstore/spill_open.h"

#include <utility>

#include "services/common/log.h"
#include "services/kvstore/spill_rocksdb.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kNsPerProgressLine = 1'000'000'000;

void LogOff(absl::string_view directory, const absl::Status& why) {
  Log(LogLevel::kError, "spill_off", {{"directory", directory}, {"why", why.message()}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<SpillTier>> OpenSpill(const KvStoreConfig& config,
                                                     const Clock* clock) {
  if (config.spill_directory.empty()) return std::unique_ptr<SpillTier>();
  const SpillLimits limits{config.spill_size_bytes, config.spill_ttl_ms, config.tenant_quotas};
  absl::StatusOr<std::unique_ptr<SpillStore>> store = OpenRocksDbSpill(config.spill_directory);
  if (absl::IsFailedPrecondition(store.status())) return store.status();
  const absl::Status status = store.status();
  if (!status.ok()) LogOff(config.spill_directory, status);
  return std::make_unique<SpillTier>(store.ok() ? *std::move(store) : nullptr, limits, clock,
                                     status);
}

SpillLoader::SpillLoader(SpillTier* tier, std::string directory, const Clock* clock)
    : tier_(tier),
      directory_(std::move(directory)),
      clock_(clock),
      start_ns_(clock->MonotonicNs()),
      said_ns_(start_ns_),
      thread_([this] { Run(); }) {}

SpillLoader::~SpillLoader() {
  is_stopping_.store(true);
  thread_.join();
}

bool SpillLoader::Report(const SpillProgress& progress) {
  const int64_t now_ns = clock_->MonotonicNs();
  if (now_ns - said_ns_ >= kNsPerProgressLine) {
    said_ns_ = now_ns;
    Log(LogLevel::kInfo, "spill_opening",
        {{"directory", directory_}, {"blocks", progress.blocks}, {"bytes", progress.bytes}});
  }
  return !is_stopping_.load();
}

void SpillLoader::Run() {
  if (tier_->GetStats().opening) {  // else it is off, which was logged
    const absl::Status status =
        tier_->Load([this](const SpillProgress& progress) { return Report(progress); });
    if (absl::IsCancelled(status)) return;
    if (!status.ok()) LogOff(directory_, status);
    const SpillStats stats = tier_->GetStats();
    Log(LogLevel::kInfo, "spill_open",
        {{"directory", directory_},
         {"blocks", stats.blocks},
         {"bytes", stats.bytes},
         {"milliseconds", (clock_->MonotonicNs() - start_ns_) / 1'000'000}});
  }
  absl::MutexLock lock(&mutex_);
  is_loaded_ = true;
  for (const auto& loaded : when_loaded_) loaded();
}

void SpillLoader::WhenLoaded(std::function<void()> loaded) {
  absl::MutexLock lock(&mutex_);
  if (is_loaded_) return loaded();
  when_loaded_.push_back(std::move(loaded));
}

void SpillLoader::WaitUntilLoaded(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&is_loaded_), timeout);
}

}  // namespace certkv::kvstore
