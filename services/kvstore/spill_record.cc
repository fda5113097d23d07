#include "services/kvstore/spill_record.h"

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace certkv::kvstore {
namespace {

constexpr uint64_t kRecordMagic = 0x314c4c4950534b43;  // "CKSPILL1"

// Little-endian.
struct DiskRecord {
  uint64_t magic;
  uint8_t key[32];
  uint8_t parent[32];
  uint64_t originals_digest;
  int64_t seal_time_ms;
  int64_t write_time_ms;
  int64_t payload_bytes;
  uint64_t payload_checksum;
  uint64_t record_checksum;  // XXH3-64 of what comes before
};
static_assert(sizeof(DiskRecord) == 120);

uint64_t RecordChecksum(const DiskRecord& record) {
  return XXH3_64bits(&record, offsetof(DiskRecord, record_checksum));
}

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
  record.record_checksum = RecordChecksum(record);
  return std::string(reinterpret_cast<const char*>(&record), sizeof(record));
}

bool ParseSpillRecord(absl::string_view bytes, SpilledBlock* block) {
  DiskRecord record{};
  if (bytes.size() != sizeof(record)) return false;
  std::memcpy(&record, bytes.data(), sizeof(record));
  if (record.magic != kRecordMagic || record.record_checksum != RecordChecksum(record) ||
      record.payload_bytes <= 0) {
    return false;
  }
  std::memcpy(block->key.bytes.data(), record.key, sizeof(record.key));
  std::memcpy(block->parent.bytes.data(), record.parent, sizeof(record.parent));
  block->originals_digest = record.originals_digest;
  block->seal_time_ms = record.seal_time_ms;
  block->write_time_ms = record.write_time_ms;
  block->payload_bytes = record.payload_bytes;
  block->payload_checksum = record.payload_checksum;
  return true;
}

}  // namespace certkv::kvstore
