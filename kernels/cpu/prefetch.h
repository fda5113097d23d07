// Prefetch cursor: walks the bytes of the next tile strictly in address order, a few cache lines
// per inner step of whatever loop is running, so that memory is read at an even pace.
#ifndef CERTKV_KERNELS_CPU_PREFETCH_H_
#define CERTKV_KERNELS_CPU_PREFETCH_H_

#include <cstdint>

namespace certkv::cpu {

// Most lines that one step asks for.
inline constexpr int kPrefetchLinesMax = 8;

template <typename V>
struct Prefetcher {
  const uint8_t* at;
  const uint8_t* end;
  const uint8_t* next_begin;  // a second range, after the first
  const uint8_t* next_end;
  // Cache lines per step of the loops over keys and over values, at most kPrefetchLinesMax.
  int key_lines;
  int value_lines;

  // Past the second range the cursor starts it again: lines that are in the cache cost nothing,
  // lines beyond the range would.
  [[gnu::always_inline]] void Step(int lines) {
    // In integers: the cursor may be null or beyond its range, where pointers must not be moved.
    const uintptr_t p = reinterpret_cast<uintptr_t>(at) - 64 * (kPrefetchLinesMax - lines);
    switch (lines) {
      case 8:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p));
        [[fallthrough]];
      case 7:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 64));
        [[fallthrough]];
      case 6:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 128));
        [[fallthrough]];
      case 5:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 192));
        [[fallthrough]];
      case 4:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 256));
        [[fallthrough]];
      case 3:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 320));
        [[fallthrough]];
      case 2:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 384));
        [[fallthrough]];
      case 1:
        V::Prefetch(reinterpret_cast<const uint8_t*>(p + 448));
        [[fallthrough]];
      default:
        break;
    }
    at = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(at) + 64 * lines);
    if (__builtin_expect(at >= end, 0)) {
      at = next_begin;
      end = next_end;
    }
  }
  [[gnu::always_inline]] void KeyStep() { Step(key_lines); }
  [[gnu::always_inline]] void ValueStep() { Step(value_lines); }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_PREFETCH_H_
