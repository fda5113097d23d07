// Who calls, and what that caller may do. No wire: services decide with it, engines know tenants
// by name only.
#ifndef CERTKV_SERVICES_COMMON_IDENTITY_H_
#define CERTKV_SERVICES_COMMON_IDENTITY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

// What a call needs. Values are bits.
enum class Scope : uint8_t {
  kRead = 1,   // find and read blocks; certified reads, and their reports to gate
  kWrite = 2,  // register caches; write, pin and drop blocks
  kAdmin = 4,  // change the policy; see what concerns all tenants
  kRisk = 8,   // the risk of requests, the policy in force
};
inline constexpr uint8_t kAllScopes = 15;

// "read", "write", "admin" or "risk".
absl::string_view ScopeName(Scope scope);
// "read, write" and the like, as they are written in an access file. Errors: InvalidArgument
// [ACCESS_FILE_INVALID], an unknown scope, or none.
absl::StatusOr<uint8_t> ParseScopes(absl::string_view text);

inline constexpr size_t kTenantNameBytesMax = 64;
// At most 64 of [a-zA-Z0-9._-]; "" is nobody in particular.
bool IsTenantName(absl::string_view tenant);
// Errors: InvalidArgument [TENANT_INVALID].
absl::Status CheckTenantName(absl::string_view tenant);
// The names in "a, b". Nothing is checked.
std::vector<std::string> SplitNames(absl::string_view text);

// Invariant: an identity with any_tenant has no tenants, any other at least one, none empty.
struct Identity {
  std::string name;  // for logs; never a secret
  uint8_t scopes = 0;
  bool any_tenant = false;
  std::vector<std::string> tenants;

  // Errors: PermissionDenied [SCOPE_MISSING].
  absl::Status CheckScope(Scope scope) const;
  bool MayUse(absl::string_view tenant) const;
  // Whom the call is for: the tenant that it names, or the identity's only one.
  // Errors: InvalidArgument [TENANT_INVALID]; PermissionDenied [TENANT_FORBIDDEN].
  absl::StatusOr<std::string> ResolveTenant(absl::string_view asked) const;
  // Errors: PermissionDenied [TENANT_FORBIDDEN], `what` concerns all tenants and the identity is
  // limited to some.
  absl::Status CheckAllTenants(absl::string_view what) const;
};

// May do everything for everybody: who owns the process, where nothing else is asked for.
const Identity& OwnerIdentity();

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_IDENTITY_H_
