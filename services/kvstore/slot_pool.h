// SlotPool: which slots of a sealed slab are free, and the generations that readers check.
#ifndef CERTKV_SERVICES_KVSTORE_SLOT_POOL_H_
#define CERTKV_SERVICES_KVSTORE_SLOT_POOL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/core/ids.h"
#include "services/kvstore/slab_memory.h"

namespace certkv::kvstore {

// A slot is free, being written, or sealed.
//
// Invariants:
//  1. A slot is in one state; free + writing + sealed = slot_count.
//  2. Its generation is even exactly while it is sealed.
//  3. A generation never comes back: a SlotRef that Seal() returned is never returned again.
//  4. Where the slab has a copy in a GPU's memory, a slot's bytes are there before it is sealed.
//  5. Only the holder of a slot in state "being written" writes its bytes, after BeginWrite().
//
// Threads: the caller serializes all calls but BeginWrite(). Readers in other processes see
// generations by atomic loads only.
class SlotPool {
 public:
  // A device or backing slab; all slots free.
  explicit SlotPool(std::shared_ptr<SlabMemory> memory);

  const SlabLayout& layout() const { return memory_->layout(); }
  const std::shared_ptr<SlabMemory>& memory() const { return memory_; }
  uint8_t* base() const { return memory_->base(); }
  int32_t slot_count() const { return memory_->layout().slot_count(); }
  int32_t free_count() const { return static_cast<int32_t>(free_slots_.size()); }
  int32_t writing_count() const { return writing_count_; }

  // Takes `count` <= free_count() slots, in ascending order: a sequence in neighbouring slots is
  // read in address order. They are being written from now on.
  std::vector<int32_t> Take(int32_t count);
  // To be called by the thread that writes, before its first write to a slot that is being written:
  // whoever sees its bytes afterwards also sees that the generation is odd.
  static void BeginWrite() { FenceBeforeWrites(); }
  // Makes the bytes of a written slot readable under the returned reference.
  SlotRef Seal(int32_t slot);
  // Gives back a slot, sealed or being written. References to it are stale from now on.
  void Free(int32_t slot);
  // Of a sealed slot.
  SlotRef RefOf(int32_t slot) const;

 private:
  enum class State : uint8_t { kFree, kWriting, kSealed };

  const std::shared_ptr<SlabMemory> memory_;
  std::vector<int32_t> free_slots_;  // a stack
  std::vector<State> states_;        // per slot
  int32_t writing_count_ = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SLOT_POOL_H_
