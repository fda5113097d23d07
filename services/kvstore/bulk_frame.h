// The frames of the bulk plane: what two stores say to each other over TCP (docs/bulk.md).
//
//   frame = header, 32 bytes | body, at most 1024 bytes | data (kBlock only)
//
// Data are bytes of slabs and no part of what is encoded here; they carry checksums of their own.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_FRAME_H_
#define CERTKV_SERVICES_KVSTORE_BULK_FRAME_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/core/ids.h"
#include "services/common/wire_version.h"

namespace certkv::kvstore {

inline constexpr int64_t kBulkHeaderBytes = 32;
inline constexpr int64_t kBulkBodyBytesMax = 1024;
inline constexpr int64_t kBulkDataBytesMax = int64_t{1} << 36;

enum class BulkFrameType : uint16_t {
  kHello = 1,    // client: who it is, and blocks of which cache it wants
  kWelcome = 2,  // server: what they look like
  kGet = 3,      // client: one block
  kBlock = 4,    // server: that block
  kError = 5,    // server: why not; request_id 0: why the connection ends
};

// Which representations of a block. Bits.
enum BulkParts : uint32_t { kBulkPlanes = 1, kBulkOriginals = 2 };
inline constexpr uint32_t kBulkAllParts = 3;

struct BulkHeader {
  BulkFrameType type{};
  uint32_t request_id = 0;  // of the GET that is answered; 0: of the connection
  int64_t body_bytes = 0;   // at most kBulkBodyBytesMax
  int64_t data_bytes = 0;   // 0, but for kBlock; at most kBulkDataBytesMax
  uint64_t checksum = 0;    // XXH3-64 of the header's first 24 bytes, continued over the body
};

struct BulkHello {
  WireVersions versions = SupportedWireVersions();  // what the client speaks
  SpecDigest spec;
  std::string tenant;  // "": the caller's only one, or nobody's
  std::string token;   // "": none
};

struct BulkWelcome {
  int32_t version = 1;      // of all that follows
  int64_t plane_bytes = 0;  // of a block
  int64_t original_bytes = 0;
};

struct BulkGet {
  BlockKey key;
  uint32_t parts = kBulkAllParts;
  int64_t offset = 0;  // bytes that the client has of these parts already
};

struct BulkBlock {
  BlockKey key;
  BlockKey parent;  // zeros: first of a chain
  uint64_t originals_digest = 0;
  int64_t seal_time_ms = 0;
  uint32_t parts = 0;       // as asked for
  int64_t total_bytes = 0;  // of these parts
  int64_t offset = 0;       // as asked for; data_bytes are the rest
};

// The whole frame but its data. Texts of the error that are too long are cut.
std::string EncodeBulkHello(const BulkHello& hello);
std::string EncodeBulkWelcome(const BulkWelcome& welcome);
std::string EncodeBulkGet(uint32_t request_id, const BulkGet& get);
std::string EncodeBulkBlock(uint32_t request_id, const BulkBlock& block);
std::string EncodeBulkError(uint32_t request_id, const absl::Status& error);

// What came over the network. `header` has kBulkHeaderBytes.
// Errors: InvalidArgument [BULK_FRAME_INVALID], not such a header, or a length over its limit;
//         FailedPrecondition [BULK_VERSION], another version of frames.
absl::StatusOr<BulkHeader> ParseBulkHeader(absl::string_view header);
// Is `body`, of header.body_bytes, what was sent with it? Errors: InvalidArgument
// [BULK_FRAME_INVALID].
absl::Status CheckBulkBody(absl::string_view header, absl::string_view body);

// Bodies, checked before. Errors: InvalidArgument [BULK_FRAME_INVALID], a field is out of range.
absl::StatusOr<BulkHello> ParseBulkHello(absl::string_view body);
absl::StatusOr<BulkWelcome> ParseBulkWelcome(absl::string_view body);
absl::StatusOr<BulkGet> ParseBulkGet(absl::string_view body);
absl::StatusOr<BulkBlock> ParseBulkBlock(absl::string_view body, int64_t data_bytes);
// OK: the body is an error, which is in `error`, with its reason; what was sent of an unknown code
// is Unknown.
absl::Status ParseBulkError(absl::string_view body, absl::Status* error);

// The version that the client and this store speak, the highest. Errors: FailedPrecondition
// [BULK_VERSION].
absl::StatusOr<int32_t> ChooseBulkVersion(const BulkHello& hello);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_FRAME_H_
