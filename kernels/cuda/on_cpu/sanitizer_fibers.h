// What sanitizers have to be told about fibers; nothing in other builds. Internal to on_cpu, for
// files that are compiled without -fsanitize=thread.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_SANITIZER_FIBERS_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_SANITIZER_FIBERS_H_

#include <cstddef>

// Of the sanitizers' runtimes; null in other builds.
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack,
                                                  size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** stack,
                                                   size_t* size);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* address, size_t size);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}

namespace certkv::cuda_on_cpu {

inline constexpr unsigned kSwitchWithoutOrder = 1;  // of __tsan_switch_to_fiber

// What was done before a Release of a tag comes before what is done after an Acquire of it.
inline void Acquire(void* tag) {
  if (__tsan_acquire != nullptr) __tsan_acquire(tag);
}
inline void Release(void* tag) {
  if (__tsan_release != nullptr) __tsan_release(tag);
}

}  // namespace certkv::cuda_on_cpu

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_SANITIZER_FIBERS_H_
