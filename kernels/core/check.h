// CERTKV_CHECK: assertions for programmer errors, on in every build.
//
// A failed check prints the condition with its place and aborts. It is never the answer to bad
// input: what comes over a wire, from a file or from shared memory gets an absl::Status.
#ifndef CERTKV_KERNELS_CORE_CHECK_H_
#define CERTKV_KERNELS_CORE_CHECK_H_

namespace certkv::internal {

// Prints "<file>:<line>: check failed: <condition>: <message>" to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const char* message);

}  // namespace certkv::internal

// `message` is a string literal which says what the violated rule is.
#define CERTKV_CHECK(condition, message)                                        \
  do {                                                                          \
    if (__builtin_expect(!(condition), 0)) {                                    \
      ::certkv::internal::CheckFailed(__FILE__, __LINE__, #condition, message); \
    }                                                                           \
  } while (false)

#endif  // CERTKV_KERNELS_CORE_CHECK_H_
