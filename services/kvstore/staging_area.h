// StagingArea: the memory in which one worker writes originals before they are sealed.
#ifndef CERTKV_SERVICES_KVSTORE_STAGING_AREA_H_
#define CERTKV_SERVICES_KVSTORE_STAGING_AREA_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "services/kvstore/device_staging.h"
#include "services/kvstore/slab_memory.h"

namespace certkv::kvstore {

// A staging slot is free, reserved by its worker, or being sealed by a running call.
//
// Invariants:
//  1. A slot is in one state; only the store changes it. Nothing of it lies in shared memory.
//  2. A slot that is being sealed is neither reserved nor aborted until FinishSeal().
// Threads: the caller serializes, but for Abandon() and is_abandoned(). The memory outlives the
// session while a seal reads it.
class StagingArea {
 public:
  // A staging slab; all slots free.
  explicit StagingArea(std::shared_ptr<SlabMemory> memory);

  // Gives the worker the slots on a GPU, too. To be called once, before the slab is shared.
  void SetOnDevice(std::unique_ptr<DeviceStaging> on_device) { on_device_ = std::move(on_device); }
  const DeviceStaging* on_device() const { return on_device_.get(); }  // null: there is none

  const std::shared_ptr<SlabMemory>& memory() const { return memory_; }
  int32_t slot_count() const { return memory_->layout().slot_count(); }
  int32_t free_count() const { return static_cast<int32_t>(free_slots_.size()); }
  int32_t reserved_count() const { return reserved_count_; }

  // `count` <= free_count().
  std::vector<int32_t> Reserve(int32_t count);
  bool IsReserved(int32_t slot) const;  // any number is a fair question
  // Frees a reserved slot. False when it is not reserved.
  bool Abort(int32_t slot);
  void BeginSeal(int32_t slot);   // of a reserved slot
  void FinishSeal(int32_t slot);  // frees it
  // The session has ended: what still works on the slots may stop, nobody wants its outcome.
  void Abandon() { is_abandoned_.store(true, std::memory_order_relaxed); }
  bool is_abandoned() const { return is_abandoned_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { kFree, kReserved, kSealing };

  const std::shared_ptr<SlabMemory> memory_;
  std::unique_ptr<DeviceStaging> on_device_;  // ends before the slab
  std::vector<int32_t> free_slots_;           // a stack
  std::vector<State> states_;                 // per slot
  int32_t reserved_count_ = 0;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_STAGING_AREA_H_
