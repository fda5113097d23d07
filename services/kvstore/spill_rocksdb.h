// Blocks in RocksDB: one column family per CacheSpec digest, payloads in blob files.
#ifndef CERTKV_SERVICES_KVSTORE_SPILL_ROCKSDB_H_
#define CERTKV_SERVICES_KVSTORE_SPILL_ROCKSDB_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/kvstore/spill_store.h"

namespace certkv::kvstore {

// Bumped when a record, a payload or a tile changes its meaning.
inline constexpr int32_t kSpillFormatVersion = 1;

// Opens the database in `directory`, making both where they are missing. The log of writes is on:
// what Put returned for survives the process, and a crash of the machine but for the last moments.
// Errors: FailedPrecondition [SPILL_FOREIGN], the directory holds something else; [SPILL_FORMAT],
// blocks of another format version; [SPILL_SPEC_MISMATCH], a column family's name is not the digest
// of the spec in it; [SPILL_IN_USE], another process has it open. DataLoss [SPILL_DAMAGED];
// Unavailable [SPILL_FAILED].
absl::StatusOr<std::unique_ptr<SpillStore>> OpenRocksDbSpill(const std::string& directory);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SPILL_ROCKSDB_H_
