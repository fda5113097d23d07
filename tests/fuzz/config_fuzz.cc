// Fuzzes config files, as certkvd reads them: any text is refused with a reason, or what was read
// is printed as a file that reads as the same.
#include "kernels/core/check.h"
#include "services/certifier/config.h"
#include "services/common/access_config.h"
#include "services/common/config_reader.h"
#include "services/gate/config.h"
#include "services/kvstore/config.h"
#include "tests/fuzz/fuzz_checks.h"

namespace certkv {
namespace {

// All settings of a certkvd but where it listens.
struct Settings {
  Settings() {
    ConfigSection section("server", "How it is reached.");
    AddAccessFields(&access, &section);
    reader.AddSection(std::move(section));
    reader.AddSection(KvStoreConfigSection(&kvstore));
    reader.AddSection(CertifierConfigSection(&certifier));
    reader.AddSection(GateConfigSection(&gate));
    reader.AddList(KvStorePoolsList(&kvstore));
    reader.AddList(GateOverridesList(&gate));
  }
  AccessConfig access;
  KvStoreConfig kvstore;
  CertifierConfig certifier;
  GateConfig gate;
  ConfigReader reader;
};

void ReadOne(const std::string& text) {
  Settings first;
  const absl::Status status = first.reader.ReadText("fuzz.yaml", text);
  CheckRefusal(status);
  if (!status.ok()) return;
  const std::string printed = first.reader.ToYaml();
  Settings second;
  CERTKV_CHECK(second.reader.ReadText("printed.yaml", printed).ok(), "what is printed is read");
  CERTKV_CHECK(second.reader.ToYaml() == printed, "and says the same");
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  certkv::ReadOne(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
