#include "services/kvstore/spill_record.h"

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "services/kvstore/tenant_table.h"

namespace certkv::kvstore {
namespace {

constexpr uint64_t kRecordMagic = 0x314c4c4950534b43;  // "CKSPILL1"

// Little-endian. The name of the tenant stands between payload_checksum and record_checksum.
struct DiskRecord {
  uint64_t magic;
  uint8_t key[32];
  uint8_t parent[32];
  uint64_t originals_digest;
  int64_t seal_time_ms;
  int64_t write_time_ms;
  int64_t payload_bytes;
  uint64_t payload_checksum;
};
static_assert(sizeof(DiskRecord) == 112);
using RecordChecksum = uint64_t;  // XXH3-64 of what comes before

}  // namespace

std::string EncodeSpillRecord(const SpilledBlock& block) {
  DiskRecord record{};
  record.magic = kRecordMagic;
  std::memcpy(record.key, block.key.bytes.data(), sizeof(record.key));
  std::memcpy(record.parent, block.parent.bytes.data(), sizeof(record.parent));
  record.originals_digest = block.originals_digest;
  record.seal_time_ms = block.seal_time_ms;
  record.write_time_ms = block.write_time_ms;
  record.payload_bytes = block.payload_bytes;
  record.payload_checksum = block.payload_checksum;
  std::string bytes(reinterpret_cast<const char*>(&record), sizeof(record));
  bytes += block.tenant;
  const RecordChecksum checksum = XXH3_64bits(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  return bytes;
}

bool ParseSpillRecord(absl::string_view bytes, SpilledBlock* block) {
  DiskRecord record{};
  RecordChecksum checksum = 0;
  if (bytes.size() < sizeof(record) + sizeof(checksum)) return false;
  const size_t checked_size = bytes.size() - sizeof(checksum);
  std::memcpy(&record, bytes.data(), sizeof(record));
  std::memcpy(&checksum, bytes.data() + checked_size, sizeof(checksum));
  const absl::string_view tenant = bytes.substr(sizeof(record), checked_size - sizeof(record));
  if (record.magic != kRecordMagic || checksum != XXH3_64bits(bytes.data(), checked_size) ||
      record.payload_bytes <= 0 || !CheckTenantName(tenant).ok()) {
    return false;
  }
  std::memcpy(block->key.bytes.data(), record.key, sizeof(record.key));
  std::memcpy(block->parent.bytes.data(), record.parent, sizeof(record.parent));
  block->originals_digest = record.originals_digest;
  block->seal_time_ms = record.seal_time_ms;
  block->write_time_ms = record.write_time_ms;
  block->payload_bytes = record.payload_bytes;
  block->payload_checksum = record.payload_checksum;
  block->tenant = std::string(tenant);
  return true;
}

}  // namespace certkv::kvstore
