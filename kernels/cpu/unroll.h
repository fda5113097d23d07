// Compile-time loops for arrays that must live in registers (gcc spills arrays that a pragma
// unrolls). Everything is always inlined, so that no copy compiled for one instruction set can be
// linked into code for another.
#ifndef CERTKV_KERNELS_CPU_UNROLL_H_
#define CERTKV_KERNELS_CPU_UNROLL_H_

namespace certkv::cpu {

template <int kValue>
struct Index {
  static constexpr int value = kValue;
  [[gnu::always_inline]] constexpr operator int() const { return kValue; }  // NOLINT: an index
};

// Calls body(Index<0>()), ..., body(Index<kCount - 1>()). `body` is an always_inline lambda.
template <int kCount, int kFirst = 0, typename Body>
[[gnu::always_inline]] inline void Unroll(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>());
    Unroll<kCount, kFirst + 1>(body);
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_UNROLL_H_
