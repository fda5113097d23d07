#include "services/kvstore/staging_area.h"

#include <utility>

#include "kernels/core/check.h"

namespace certkv::kvstore {

StagingArea::StagingArea(std::shared_ptr<SlabMemory> memory) : memory_(std::move(memory)) {
  states_.assign(slot_count(), State::kFree);
  free_slots_.reserve(slot_count());
  for (int32_t slot = slot_count() - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

std::vector<int32_t> StagingArea::Reserve(int32_t count) {
  CERTKV_CHECK(count >= 0 && count <= free_count(), "only free slots are reserved");
  std::vector<int32_t> slots(free_slots_.rbegin(), free_slots_.rbegin() + count);
  free_slots_.resize(free_slots_.size() - count);
  for (const int32_t slot : slots) states_[slot] = State::kReserved;
  reserved_count_ += count;
  return slots;
}

bool StagingArea::IsReserved(int32_t slot) const {
  return slot >= 0 && slot < slot_count() && states_[slot] == State::kReserved;
}

bool StagingArea::Abort(int32_t slot) {
  if (!IsReserved(slot)) return false;
  states_[slot] = State::kFree;
  --reserved_count_;
  free_slots_.push_back(slot);
  return true;
}

void StagingArea::BeginSeal(int32_t slot) {
  CERTKV_CHECK(IsReserved(slot), "only reserved slots are sealed");
  states_[slot] = State::kSealing;
  --reserved_count_;
}

void StagingArea::FinishSeal(int32_t slot) {
  CERTKV_CHECK(states_[slot] == State::kSealing, "only a seal that has begun is finished");
  states_[slot] = State::kFree;
  free_slots_.push_back(slot);
}

}  // namespace certkv::kvstore
