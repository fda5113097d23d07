// What dense and progressive reads share before and after their kernels run. Not for translation
// units of one instruction set.
#ifndef CERTKV_KERNELS_CPU_ATTEND_PREPARE_H_
#define CERTKV_KERNELS_CPU_ATTEND_PREPARE_H_

#include <cstdint>

#include "kernels/cpu/attend_state.h"

namespace certkv::cpu {

// Hands out 64-byte aligned pieces of the workspace. With a null base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <typename T>
  T* Take(int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

// Takes every array, with room for `atom_count` atoms a head; returns the state, or null with a
// null base.
AttendState* LayOut(const AttendArgs& args, int32_t atom_count, Arena* arena);

// Fills in all but the workspace pointers, for a dense read.
void Prepare(const AttendArgs& args, const AttendResult& result, AttendState* s);

// Turns head g's sums into results; its sink's atom is number `sink_atom`.
void FinishHead(const AttendState& s, const AttendKernels& kernels, int32_t sink_atom, int g);

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_PREPARE_H_
