// The boundary between C callers and the C++ client: no exception goes out, an error stays with its
// thread, and structs of other versions come in and go out.
#ifndef CERTKV_CLIENTS_C_BOUNDARY_H_
#define CERTKV_CLIENTS_C_BOUNDARY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "clients/c/certkv.h"

namespace certkv::capi {

// Keeps `status` as this thread's last error. Allocates nothing for an OK status.
certkv_status Keep(const absl::Status& status);
// The same of parts, for when there is no memory. Allocates nothing.
certkv_status KeepText(certkv_status code, const char* reason, const char* message);

// What an exported function does: function(), which returns an absl::Status, and its outcome kept.
template <typename Function>
certkv_status RunGuarded(const Function& function) noexcept {
  try {
    return Keep(function());
  } catch (const std::bad_alloc&) {
    return KeepText(CERTKV_RESOURCE_EXHAUSTED, "OUT_OF_MEMORY",
                    "this process has no memory left for the call; free some and call again");
  } catch (const std::exception& error) {
    return KeepText(CERTKV_INTERNAL, "UNEXPECTED_EXCEPTION", error.what());
  } catch (...) {
    return KeepText(CERTKV_INTERNAL, "UNEXPECTED_EXCEPTION", "an exception of an unknown type");
  }
}

// Copies text and a terminating zero into `size` bytes, cut where it is too long.
void CopyText(absl::string_view text, char* to, size_t size);

// Errors: InvalidArgument [ARGUMENT_MISSING].
absl::Status RequirePointer(const void* pointer, absl::string_view name);

// How long the structs of the first version were; none that a caller has is shorter. A field that
// is added begins at or after this: what an older caller leaves in the padding before it is
// nothing.
template <typename T>
inline constexpr size_t kFirstBytes = 0;
template <>
inline constexpr size_t kFirstBytes<certkv_options> = 120;
template <>
inline constexpr size_t kFirstBytes<certkv_layer_spec> = 32;
template <>
inline constexpr size_t kFirstBytes<certkv_cache_spec> = 72;
template <>
inline constexpr size_t kFirstBytes<certkv_store_stats> = 64;
template <>
inline constexpr size_t kFirstBytes<certkv_sequence_info> = 40;
template <>
inline constexpr size_t kFirstBytes<certkv_request_terms> = 64;
template <>
inline constexpr size_t kFirstBytes<certkv_risk> = 144;
template <>
inline constexpr size_t kFirstBytes<certkv_read> = 40;
template <>
inline constexpr size_t kFirstBytes<certkv_certificate> = 96;
template <>
inline constexpr size_t kFirstBytes<certkv_read_result> = 632;

// A struct that begins with struct_size, which this library knows with `known` bytes and which
// began with `first`.
// Errors: InvalidArgument [STRUCT_SIZE_INVALID], smaller, or larger with something set beyond.
absl::Status CheckStructSize(const void* from, size_t first, size_t known, absl::string_view name);

// What the caller's struct says; fields that it does not have yet are zero.
// Errors: InvalidArgument [ARGUMENT_MISSING | STRUCT_SIZE_INVALID].
template <typename T>
absl::StatusOr<T> ReadStruct(const T* from, absl::string_view name) {
  static_assert(std::is_trivially_copyable_v<T> && offsetof(T, struct_size) == 0);
  static_assert(kFirstBytes<T> > 0 && kFirstBytes<T> <= sizeof(T));
  const absl::Status missing = RequirePointer(from, name);
  if (!missing.ok()) return missing;
  const absl::Status size = CheckStructSize(from, kFirstBytes<T>, sizeof(T), name);
  if (!size.ok()) return size;
  T copy{};
  std::memcpy(&copy, from, std::min(from->struct_size, sizeof(T)));
  return copy;
}

// Writes as much of `value` as the caller's struct, whose size was checked, has room for.
template <typename T>
void WriteStruct(T value, T* to) {
  value.struct_size = to->struct_size;
  std::memcpy(to, &value, std::min(to->struct_size, sizeof(T)));
}

// Element `index` of an array whose elements are `stride` bytes apart.
template <typename T>
T* ElementAt(T* first, size_t stride, int32_t index) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + stride * index);
}

}  // namespace certkv::capi

#endif  // CERTKV_CLIENTS_C_BOUNDARY_H_
