// Prefetch cursor: walks the bytes of the next tile strictly in address order, a few cache lines
// per inner step of whatever loop is running, so that memory is read at an even pace.
#ifndef CERTKV_KERNELS_CPU_PREFETCH_H_
#define CERTKV_KERNELS_CPU_PREFETCH_H_

#include <cstdint>

namespace certkv::cpu {

template <typename V>
struct Prefetcher {
  const uint8_t* at;
  const uint8_t* end;
  const uint8_t* next_begin;  // a second range, after the first
  const uint8_t* next_end;
  int lines;  // cache lines per step

  // Past the second range the cursor starts it again: lines that are in the cache cost nothing,
  // lines beyond the range would.
  [[gnu::always_inline]] void Step() {
    for (int i = 0; i < lines; ++i) V::Prefetch(at + 64 * i);
    at += 64 * lines;
    if (__builtin_expect(at >= end, 0)) {
      at = next_begin;
      end = next_end;
    }
  }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_PREFETCH_H_
