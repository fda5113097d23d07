// Fuzzes access files and certificates: any text is refused with a reason, and what is read keeps
// the promises of an identity. The first byte says which.
#include "kernels/core/check.h"
#include "services/common/access_file.h"
#include "services/common/certificate.h"
#include "services/common/unix_peer.h"
#include "tests/fuzz/fuzz_checks.h"

namespace certkv {
namespace {

void ReadAccessFile(const std::string& text) {
  const auto table = AccessTable::Parse("access.yaml", text);
  CheckRefusal(table.status());
  if (!table.ok()) return;
  CERTKV_CHECK((*table)->size() <= kIdentitiesMax, "the list has its limit");
  for (const char* name : {"engine", "operator", ""}) {
    const IdentityPtr found = (*table)->FindCertificate({name});
    if (found == nullptr) continue;
    CERTKV_CHECK(*name != '\0', "nobody has the empty name");
    CERTKV_CHECK(found->scopes != 0 && (found->any_tenant == found->tenants.empty()),
                 "an identity has scopes, and tenants or all");
    CERTKV_CHECK(found->any_tenant || !found->MayUse(""), "nobody is no tenant");
  }
  CERTKV_CHECK((*table)->FindToken("") == nullptr, "the empty token is nobody's");
}

void ReadCertificateText(const std::string& text) {
  const auto info = ParseCertificate(text);
  CheckRefusal(info.status());
  if (info.ok()) CheckRefusal(CheckValidity(*info, info->not_after_ms + 1, "it"));
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  certkv::FuzzInput input(data, size);
  switch (input.Take<uint8_t>()) {
    case 'c':
      certkv::ReadCertificateText(input.Rest());
      break;
    case 's':
      certkv::CheckRefusal(certkv::ParseScopes(input.Rest()).status());
      break;
    default:
      certkv::ReadAccessFile(input.Rest());
  }
  return 0;
}
