// The process at the other end of a Unix socket, watched by a pidfd.
#ifndef CERTKV_SERVICES_KVSTORE_PEER_PROCESS_H_
#define CERTKV_SERVICES_KVSTORE_PEER_PROCESS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/shared_memory.h"

namespace certkv::kvstore {

// Can this kernel watch processes at all? Errors: Unimplemented [PIDFD_MISSING] (before Linux 5.3).
absl::Status CheckPidfdSupport();

// A pidfd of the process that connected `socket`: poll(2) says readable once it has ended, whoever
// else holds the socket still. Where the kernel hands the pidfd over with the socket (Linux 6.5) it
// is that process for certain; elsewhere it is opened by the process's number, which another
// process may have by then if the first one is dead, and then only the socket tells.
// Errors: Unimplemented [PIDFD_MISSING]; FailedPrecondition [PEER_UNKNOWN], the peer is in a PID
// namespace that this process does not see, or no descriptor is left; Unavailable [PEER_ENDED].
absl::StatusOr<UniqueFd> OpenPeerPidfd(int socket);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_PEER_PROCESS_H_
