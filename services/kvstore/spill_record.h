// A block's record on disk (docs/formats.md).
#ifndef CERTKV_SERVICES_KVSTORE_SPILL_RECORD_H_
#define CERTKV_SERVICES_KVSTORE_SPILL_RECORD_H_

#include <string>

#include "absl/strings/string_view.h"
#include "services/kvstore/spill_store.h"

namespace certkv::kvstore {

std::string EncodeSpillRecord(const SpilledBlock& block);
// False when the bytes are no record, or not as they were written; `*block` is then as before.
bool ParseSpillRecord(absl::string_view bytes, SpilledBlock* block);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SPILL_RECORD_H_
