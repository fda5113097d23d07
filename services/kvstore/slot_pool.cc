#include "services/kvstore/slot_pool.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "kernels/core/check.h"

namespace certkv::kvstore {

SlotPool::SlotPool(std::shared_ptr<SlabMemory> memory) : memory_(std::move(memory)) {
  CERTKV_CHECK(layout().kind() != SlabKind::kStaging, "staging slots have no generations");
  states_.assign(slot_count(), State::kFree);
  free_slots_.reserve(slot_count());
  for (int32_t slot = slot_count() - 1; slot >= 0; --slot) {
    free_slots_.push_back(slot);
    GenerationAt(base(), layout(), slot).store(1, std::memory_order_relaxed);
  }
}

std::vector<int32_t> SlotPool::Take(int32_t count) {
  CERTKV_CHECK(count >= 0 && count <= free_count(), "only free slots are taken");
  std::vector<int32_t> slots(free_slots_.end() - count, free_slots_.end());
  free_slots_.resize(free_slots_.size() - count);
  std::sort(slots.begin(), slots.end());
  for (const int32_t slot : slots) {
    CERTKV_CHECK(states_[slot] == State::kFree, "a slot on the free list is free");
    states_[slot] = State::kWriting;
    ++writing_count_;
    if (memory_->device_copy() != nullptr) memory_->device_copy()->Forget(slot);
  }
  return slots;
}

SlotRef SlotPool::Seal(int32_t slot) {
  CERTKV_CHECK(states_[slot] == State::kWriting, "only a slot that is being written is sealed");
  CERTKV_CHECK(memory_->device_copy() == nullptr || memory_->device_copy()->Has(slot),
               "a slot is copied to the device before it is sealed");
  std::atomic<uint64_t>& generation = GenerationAt(base(), layout(), slot);
  const uint64_t sealed = generation.load(std::memory_order_relaxed) + 1;
  CERTKV_CHECK(sealed % 2 == 0, "the generation is odd while a slot is written");
  generation.store(sealed, std::memory_order_release);
  states_[slot] = State::kSealed;
  --writing_count_;
  return SlotRef{slot, sealed};
}

void SlotPool::Free(int32_t slot) {
  CERTKV_CHECK(states_[slot] != State::kFree, "a free slot is not freed again");
  if (states_[slot] == State::kSealed) {
    std::atomic<uint64_t>& generation = GenerationAt(base(), layout(), slot);
    generation.store(generation.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  } else {
    --writing_count_;
  }
  states_[slot] = State::kFree;
  free_slots_.push_back(slot);
}

SlotRef SlotPool::RefOf(int32_t slot) const {
  CERTKV_CHECK(states_[slot] == State::kSealed, "only sealed slots have references");
  return SlotRef{slot, GenerationAt(base(), layout(), slot).load(std::memory_order_relaxed)};
}

}  // namespace certkv::kvstore
