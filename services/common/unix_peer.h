// Who is at the other end of a Unix socket, as the kernel says, and who may be.
#ifndef CERTKV_SERVICES_COMMON_UNIX_PEER_H_
#define CERTKV_SERVICES_COMMON_UNIX_PEER_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace certkv {

struct UnixPeer {
  uid_t user = 0;
  pid_t process = 0;
  std::vector<gid_t> groups;  // all of the process when it connected
};
// Errors: FailedPrecondition [PEER_UNKNOWN], the socket has no such peer.
absl::StatusOr<UnixPeer> PeerOf(int socket);

struct UnixPeerList {
  std::vector<uid_t> users;
  std::vector<gid_t> groups;

  bool Allows(const UnixPeer& peer) const;
  // Only this process's user: then nobody else can open the socket either.
  bool IsOwnUserOnly() const;
};
// Names or numbers with commas between; without any, this process's user.
// Errors: InvalidArgument [CONFIG_INVALID], a name that the system does not know.
absl::StatusOr<UnixPeerList> ParseUnixPeers(const std::string& users, const std::string& groups);
UnixPeerList OwnUserOnly();

// The mode of a socket file for these peers: 0600, or 0666 where the list decides.
// Errors: Unavailable [LISTEN_FAILED].
absl::Status SetSocketMode(const std::string& path, const UnixPeerList& peers);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_UNIX_PEER_H_
