// A SpillStore in memory that can fail and lie.
#ifndef CERTKV_TESTS_SUPPORT_FAKE_SPILL_STORE_H_
#define CERTKV_TESTS_SUPPORT_FAKE_SPILL_STORE_H_

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "kernels/core/status.h"
#include "services/kvstore/spill_store.h"

namespace certkv {

// What would be on disk: shared by the stores that are opened on it one after the other.
struct FakeDisk {
  struct File {
    kvstore::SpilledBlock block;
    std::vector<uint8_t> payload;
  };
  absl::Mutex mutex;
  std::map<std::pair<SpecDigest, BlockKey>, File> files;
  std::string secret = "of the fake disk";
  bool is_full = false;
  int recover_count = 0;
  std::function<void()> on_get = [] {};
  std::function<void()> on_put = [] {};
  std::function<void()> before_put = [] {};  // others go on meanwhile
  std::function<void()> on_list = [] {};     // before each block of a listing
};

class FakeSpillStore final : public kvstore::SpillStore {
 public:
  explicit FakeSpillStore(FakeDisk* disk) : disk_(disk) {}

  absl::Status ForEach(
      const std::function<bool(const SpecDigest&, const kvstore::SpilledBlock&)>& visit) override {
    absl::MutexLock lock(&disk_->mutex);
    for (const auto& [id, file] : disk_->files) {
      disk_->on_list();
      if (!visit(id.first, file.block)) break;
    }
    return absl::OkStatus();
  }
  absl::Status Put(const SpecDigest& spec, absl::Span<const uint8_t> payload,
                   kvstore::SpilledBlock* block) override {
    disk_->before_put();
    absl::MutexLock lock(&disk_->mutex);
    disk_->on_put();
    if (disk_->is_full) return Full();
    block->payload_bytes = static_cast<int64_t>(payload.size());
    disk_->files[{spec, block->key}] = {*block, {payload.begin(), payload.end()}};
    return absl::OkStatus();
  }
  absl::Status Get(const SpecDigest& spec, const kvstore::SpilledBlock& block,
                   absl::Span<uint8_t> payload) override {
    absl::MutexLock lock(&disk_->mutex);
    disk_->on_get();
    const auto file = disk_->files.find({spec, block.key});
    if (file == disk_->files.end() || file->second.payload.size() != payload.size()) {
      return MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED", "not as it was written");
    }
    std::copy(file->second.payload.begin(), file->second.payload.end(), payload.begin());
    return absl::OkStatus();
  }
  absl::Status Delete(const SpecDigest& spec, absl::Span<const BlockKey> keys) override {
    absl::MutexLock lock(&disk_->mutex);
    if (disk_->is_full) return Full();
    for (const BlockKey& key : keys) disk_->files.erase({spec, key});
    return absl::OkStatus();
  }
  std::string Secret() const override { return disk_->secret; }
  absl::Status Recover() override {
    absl::MutexLock lock(&disk_->mutex);
    ++disk_->recover_count;
    return disk_->is_full ? Full() : absl::OkStatus();
  }

 private:
  static absl::Status Full() {
    return MakeError(absl::StatusCode::kUnavailable, "SPILL_FAILED", "no space left on device");
  }

  FakeDisk* const disk_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_FAKE_SPILL_STORE_H_
