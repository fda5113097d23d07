#include "services/common/unix_peer.h"

#include <grp.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/identity.h"

namespace certkv {
namespace {

std::optional<uint32_t> UserNumber(const std::string& name) {
  const passwd* user = getpwnam(name.c_str());  // at start, on one thread
  return user == nullptr ? std::nullopt : std::optional<uint32_t>(user->pw_uid);
}

std::optional<uint32_t> GroupNumber(const std::string& name) {
  const group* found = getgrnam(name.c_str());
  return found == nullptr ? std::nullopt : std::optional<uint32_t>(found->gr_gid);
}

template <typename Find>
absl::StatusOr<std::vector<uint32_t>> ParseNumbers(const std::string& text, const char* what,
                                                   const Find& find) {
  std::vector<uint32_t> numbers;
  for (const std::string& name : SplitNames(text)) {
    uint32_t number = 0;
    if (!absl::SimpleAtoi(name, &number)) {
      const std::optional<uint32_t> known = find(name);
      if (!known.has_value()) {
        return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                         absl::StrCat(what, " ", name,
                                      " is not known to this system; name one that is, or its "
                                      "number"));
      }
      number = *known;
    }
    numbers.push_back(number);
  }
  return numbers;
}

}  // namespace

absl::StatusOr<UnixPeer> PeerOf(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 ||
      credentials.uid == static_cast<uid_t>(-1)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PEER_UNKNOWN",
                     "the kernel doesn't say who is at the other end of the socket");
  }
  UnixPeer peer{credentials.uid, credentials.pid, {credentials.gid}};
  std::vector<gid_t> groups(65536);  // NGROUPS_MAX
  size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) == 0) {
    peer.groups.insert(peer.groups.end(), groups.begin(), groups.begin() + size / sizeof(gid_t));
  }
  return peer;
}

bool UnixPeerList::Allows(const UnixPeer& peer) const {
  if (std::find(users.begin(), users.end(), peer.user) != users.end()) return true;
  return std::any_of(peer.groups.begin(), peer.groups.end(), [this](gid_t group) {
    return std::find(groups.begin(), groups.end(), group) != groups.end();
  });
}

bool UnixPeerList::IsOwnUserOnly() const {
  return groups.empty() && users == std::vector<uid_t>{geteuid()};
}

absl::StatusOr<UnixPeerList> ParseUnixPeers(const std::string& users, const std::string& groups) {
  UnixPeerList peers;
  CERTKV_ASSIGN_OR_RETURN(peers.users, ParseNumbers(users, "user", UserNumber));
  CERTKV_ASSIGN_OR_RETURN(peers.groups, ParseNumbers(groups, "group", GroupNumber));
  return peers.users.empty() && peers.groups.empty() ? OwnUserOnly() : peers;
}

UnixPeerList OwnUserOnly() { return UnixPeerList{{geteuid()}, {}}; }

absl::Status SetSocketMode(const std::string& path, const UnixPeerList& peers) {
  if (chmod(path.c_str(), peers.IsOwnUserOnly() ? 0600 : 0666) == 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                   absl::StrCat("can't set the mode of ", path, ": ", std::strerror(errno)));
}

}  // namespace certkv
