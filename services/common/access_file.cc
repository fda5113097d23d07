#include "services/common/access_file.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/sha256.h"
#include "kernels/core/status.h"
#include "services/common/private_file.h"

namespace certkv {
namespace {

constexpr size_t kSha256Bytes = 32;

// An identity as it is written.
struct EntryText {
  std::string name;
  std::string token_sha256;
  std::string certificate;
  std::string scopes;
  std::string tenants;
};

ConfigSection EntrySection(EntryText* entry) {
  ConfigSection section("identities", "Who may call.");
  section.AddString("name", &entry->name, 64, "for people and logs; required");
  section.AddString("token_sha256", &entry->token_sha256, 64,
                    "SHA-256 of the identity's bearer token, 64 hexadecimal digits; empty means "
                    "that it has none");
  section.AddString("certificate", &entry->certificate, 256,
                    "common name or alternative name of the client certificate that it shows; "
                    "empty means none");
  section.AddString("scopes", &entry->scopes, 64,
                    "some of read, write, admin and risk, with commas between; required");
  section.AddString("tenants", &entry->tenants, 65536,
                    "names of the tenants that it may act for, with commas between; \"*\" means "
                    "all; required");
  return section;
}

ConfigList EntryList(std::deque<EntryText>* entries) {
  static EntryText sample;  // what an element is by default
  return {.name = "identities",
          .description =
              "The access file, server.access_file: each identity with a token, a certificate, or "
              "both, and what it may do.",
          .count_max = kIdentitiesMax,
          .clear = [entries] { entries->clear(); },
          .add = [entries] { return EntrySection(&entries->emplace_back()); },
          .elements = [] { return std::vector<ConfigSection>(); },
          .sample = EntrySection(&sample)};
}

absl::Status Invalid(const EntryText& entry, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "ACCESS_FILE_INVALID",
                   absl::StrCat("identity '", entry.name, "': ", message));
}

absl::StatusOr<Identity> ParseIdentity(const EntryText& entry) {
  Identity identity;
  if (entry.name.empty()) return Invalid(entry, "it has no name; give each one");
  identity.name = entry.name;
  const absl::StatusOr<uint8_t> scopes = ParseScopes(entry.scopes);
  if (!scopes.ok()) return Invalid(entry, scopes.status().message());
  identity.scopes = *scopes;
  identity.any_tenant = entry.tenants == "*";
  if (identity.any_tenant) return identity;
  identity.tenants = SplitNames(entry.tenants);
  if (identity.tenants.empty()) {
    return Invalid(entry, "it has no tenants; name some, or write \"*\" for all");
  }
  for (const std::string& tenant : identity.tenants) {
    if (!IsTenantName(tenant)) {
      return Invalid(entry, absl::StrCat("tenant ", tenant, " is no name: at most ",
                                         kTenantNameBytesMax, " of [a-zA-Z0-9._-]"));
    }
  }
  return identity;
}

absl::StatusOr<std::string> ParseSha256(const EntryText& entry) {
  const std::string& hex = entry.token_sha256;
  if (hex.empty()) return std::string();
  const bool is_hex = std::all_of(hex.begin(), hex.end(), [](char c) {
    return absl::ascii_isxdigit(static_cast<unsigned char>(c));
  });
  if (is_hex && hex.size() == 2 * kSha256Bytes) return absl::HexStringToBytes(hex);
  return Invalid(entry, absl::StrCat("token_sha256 has ", hex.size(),
                                     " characters, must be 64 hexadecimal digits; write what "
                                     "sha256sum prints of the token without a line end"));
}

std::string Sha256Of(absl::string_view text) {
  Sha256 hash;
  hash.AddBytes(text);
  const auto digest = hash.Finish();
  return std::string(digest.begin(), digest.end());
}

}  // namespace

absl::StatusOr<std::shared_ptr<const AccessTable>> AccessTable::Parse(absl::string_view file_name,
                                                                      const std::string& text) {
  std::deque<EntryText> texts;
  ConfigReader reader;
  reader.AddList(EntryList(&texts));
  CERTKV_RETURN_IF_ERROR(reader.ReadText(file_name, text));
  auto table = std::make_shared<AccessTable>();
  absl::flat_hash_set<std::string> taken;
  for (const EntryText& entry : texts) {
    CERTKV_ASSIGN_OR_RETURN(Identity identity, ParseIdentity(entry));
    CERTKV_ASSIGN_OR_RETURN(std::string token, ParseSha256(entry));
    if (token.empty() && entry.certificate.empty()) {
      return Invalid(entry, "it has neither token_sha256 nor certificate; give it one");
    }
    // Two that answer to one name would make the order of the file matter.
    for (const std::string& mark :
         {"name " + entry.name, token.empty() ? "" : "token " + token,
          entry.certificate.empty() ? "" : "certificate " + entry.certificate}) {
      if (mark.empty() || taken.insert(mark).second) continue;
      return Invalid(entry, "another identity has its name, token or certificate; leave one");
    }
    table->entries_.push_back({std::make_shared<const Identity>(std::move(identity)),
                               std::move(token), entry.certificate});
  }
  return std::shared_ptr<const AccessTable>(std::move(table));
}

absl::StatusOr<std::shared_ptr<const AccessTable>> AccessTable::ReadFile(const std::string& path) {
  CERTKV_RETURN_IF_ERROR(CheckPrivateFile(path));
  CERTKV_ASSIGN_OR_RETURN(const std::string text, ReadConfigText(path));
  return Parse(path, text);
}

IdentityPtr AccessTable::FindToken(absl::string_view token) const {
  const std::string sha256 = Sha256Of(token);
  IdentityPtr found;
  for (const Entry& entry : entries_) {
    if (entry.token_sha256.empty()) continue;
    if (CRYPTO_memcmp(entry.token_sha256.data(), sha256.data(), kSha256Bytes) == 0) {
      found = entry.identity;
    }
  }
  return found;
}

IdentityPtr AccessTable::FindCertificate(absl::Span<const std::string> names) const {
  for (const Entry& entry : entries_) {
    if (entry.certificate.empty()) continue;
    if (std::find(names.begin(), names.end(), entry.certificate) != names.end()) {
      return entry.identity;
    }
  }
  return nullptr;
}

std::string AccessFileMarkdown() {
  std::deque<EntryText> none;
  ConfigReader reader;
  reader.AddList(EntryList(&none));
  return reader.ToMarkdown();
}

}  // namespace certkv
