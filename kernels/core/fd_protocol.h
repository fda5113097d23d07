// The messages of the store's descriptor socket (docs/architecture.md, "Memory").
//
// A client connects to AttachWorkerResponse.fd_socket and sends an FdRequest with its session's
// token and staging_id 0. The store answers with an FdReply and, when it accepts, these
// descriptors:
//   WORKER  device slab, backing slab (both sealed, read-only), staging slab (read-write)
//   READER  device slab, backing slab
// The connection then stands for the session: when it closes, or the process that connected ends,
// the session ends and all that it holds is released. A READER may ask on the same connection for a
// worker's staging slab, read-only, with that worker's staging_id. When the store itself ends the
// session, its last word is an FdReply with reason kFdSessionEnded that says why; then it closes.
#ifndef CERTKV_KERNELS_CORE_FD_PROTOCOL_H_
#define CERTKV_KERNELS_CORE_FD_PROTOCOL_H_

#include <cstdint>

namespace certkv {

inline constexpr uint32_t kFdMagic = 0x44464b43;  // "CKFD"
inline constexpr char kFdSessionEnded[] = "SESSION_ENDED";

struct FdRequest {
  uint32_t magic;      // kFdMagic
  uint32_t reserved;   // 0
  uint8_t token[16];   // AttachWorkerResponse.fd_token
  int64_t staging_id;  // 0, or a worker's staging_id
};
static_assert(sizeof(FdRequest) == 32);

struct FdReply {
  uint32_t magic;  // kFdMagic
  int32_t code;    // absl::StatusCode; 0 = the descriptors are attached
  int32_t fd_count;
  int32_t staging_slot_count;  // of the staging slab that was asked for; 0 otherwise
  char reason[64];             // zero-terminated
  char message[432];           // zero-terminated
};
static_assert(sizeof(FdReply) == 512);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_FD_PROTOCOL_H_
