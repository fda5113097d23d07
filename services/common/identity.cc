#include "services/common/identity.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

constexpr Scope kScopes[] = {Scope::kRead, Scope::kWrite, Scope::kAdmin, Scope::kRisk};

absl::Status Denied(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kPermissionDenied, reason, message);
}

}  // namespace

absl::string_view ScopeName(Scope scope) {
  switch (scope) {
    case Scope::kRead:
      return "read";
    case Scope::kWrite:
      return "write";
    case Scope::kAdmin:
      return "admin";
    case Scope::kRisk:
      return "risk";
  }
  return "?";
}

absl::StatusOr<uint8_t> ParseScopes(absl::string_view text) {
  uint8_t scopes = 0;
  for (const std::string& name : SplitNames(text)) {
    const auto* known = std::find_if(std::begin(kScopes), std::end(kScopes),
                                     [&name](Scope one) { return ScopeName(one) == name; });
    if (known == std::end(kScopes)) {
      return MakeError(absl::StatusCode::kInvalidArgument, "ACCESS_FILE_INVALID",
                       absl::StrCat("scope ", name,
                                    " is unknown, must be read, write, admin or "
                                    "risk"));
    }
    scopes |= static_cast<uint8_t>(*known);
  }
  if (scopes != 0) return scopes;
  return MakeError(absl::StatusCode::kInvalidArgument, "ACCESS_FILE_INVALID",
                   "scopes are empty, must be some of read, write, admin and risk");
}

bool IsTenantName(absl::string_view tenant) {
  return tenant.size() <= kTenantNameBytesMax &&
         std::all_of(tenant.begin(), tenant.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ||
                  c == '-';
         });
}

absl::Status CheckTenantName(absl::string_view tenant) {
  if (IsTenantName(tenant)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "TENANT_INVALID",
                   absl::StrCat("tenant has ", tenant.size(), " bytes, must be at most ",
                                kTenantNameBytesMax, " of [a-zA-Z0-9._-]"));
}

std::vector<std::string> SplitNames(absl::string_view text) {
  std::vector<std::string> names;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const absl::string_view name = absl::StripAsciiWhitespace(part);
    if (!name.empty()) names.emplace_back(name);
  }
  return names;
}

absl::Status Identity::CheckScope(Scope scope) const {
  if ((scopes & static_cast<uint8_t>(scope)) != 0) return absl::OkStatus();
  return Denied("SCOPE_MISSING",
                absl::StrCat("the call needs the scope ", ScopeName(scope), ", which ", name,
                             " does not have; use another identity, or add the scope in the "
                             "server's access file"));
}

bool Identity::MayUse(absl::string_view tenant) const {
  return any_tenant || std::find(tenants.begin(), tenants.end(), tenant) != tenants.end();
}

absl::StatusOr<std::string> Identity::ResolveTenant(absl::string_view asked) const {
  CERTKV_RETURN_IF_ERROR(CheckTenantName(asked));
  if (asked.empty() && tenants.size() == 1) return tenants[0];
  if (MayUse(asked)) return std::string(asked);
  return Denied(
      "TENANT_FORBIDDEN",
      absl::StrCat("the call is for ", asked.empty() ? "no tenant" : "tenant ", asked, ", ", name,
                   " may only act for ", absl::StrJoin(tenants, ", "), "; name one of these"));
}

absl::Status Identity::CheckAllTenants(absl::string_view what) const {
  if (any_tenant) return absl::OkStatus();
  return Denied("TENANT_FORBIDDEN",
                absl::StrCat(what, " concerns all tenants, ", name, " may only act for ",
                             absl::StrJoin(tenants, ", ")));
}

const Identity& OwnerIdentity() {
  static const Identity kOwner{"owner", kAllScopes, true, {}};
  return kOwner;
}

}  // namespace certkv
