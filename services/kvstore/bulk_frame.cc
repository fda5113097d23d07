#include "services/kvstore/bulk_frame.h"

#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/identity.h"
#include "services/common/private_file.h"
#include "services/common/retry_delay.h"

namespace certkv::kvstore {
namespace {

constexpr uint32_t kMagic = 0x46424b43;  // "CKBF"
constexpr uint16_t kFrameVersion = 1;    // of the header
constexpr size_t kReasonBytesMax = 64;
constexpr size_t kMessageBytesMax = 512;
constexpr int64_t kTotalBytesMax = kBulkDataBytesMax;

// As they are on the wire, little-endian.
struct WireHeader {
  uint32_t magic;
  uint16_t frame_version;
  uint16_t type;
  uint32_t request_id;
  uint32_t body_bytes;
  uint64_t data_bytes;
  uint64_t checksum;
};
static_assert(sizeof(WireHeader) == kBulkHeaderBytes && offsetof(WireHeader, checksum) == 24);

struct WireHello {  // then tenant, token
  uint16_t version_min;
  uint16_t version_max;
  uint16_t tenant_bytes;
  uint16_t token_bytes;
  uint8_t spec[32];
};
static_assert(sizeof(WireHello) == 40);

struct WireWelcome {
  uint16_t version;
  uint16_t reserved[3];
  uint64_t plane_bytes;
  uint64_t original_bytes;
};
static_assert(sizeof(WireWelcome) == 24);

struct WireGet {
  uint8_t key[32];
  uint32_t parts;
  uint32_t reserved;
  uint64_t offset;
};
static_assert(sizeof(WireGet) == 48);

struct WireBlock {
  uint8_t key[32];
  uint8_t parent[32];
  uint64_t originals_digest;
  int64_t seal_time_ms;
  uint32_t parts;
  uint32_t reserved;
  uint64_t total_bytes;
  uint64_t offset;
};
static_assert(sizeof(WireBlock) == 104);

struct WireError {  // then reason, message
  uint32_t code;
  uint16_t reason_bytes;
  uint16_t message_bytes;
  uint64_t retry_delay_ms;
};
static_assert(sizeof(WireError) == 16);

static_assert(sizeof(WireHello) + kTenantNameBytesMax + kTokenBytesMax <= kBulkBodyBytesMax);
static_assert(sizeof(WireError) + kReasonBytesMax + kMessageBytesMax <= kBulkBodyBytesMax);

absl::Status Invalid(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BULK_FRAME_INVALID",
                   absl::StrCat("what came is no frame of the bulk plane: ", what,
                                "; is the address that of a store's bulk_address, and TLS on or "
                                "off on both sides?"));
}

uint64_t ChecksumOf(absl::string_view header, absl::string_view body) {
  struct FreeState {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  const std::unique_ptr<XXH3_state_t, FreeState> state(XXH3_createState());
  XXH3_64bits_reset(state.get());
  XXH3_64bits_update(state.get(), header.data(), offsetof(WireHeader, checksum));
  XXH3_64bits_update(state.get(), body.data(), body.size());
  return XXH3_64bits_digest(state.get());
}

template <typename T>
std::string BytesOf(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

std::string Frame(BulkFrameType type, uint32_t request_id, const std::string& body,
                  int64_t data_bytes = 0) {
  WireHeader header{};
  header.magic = kMagic;
  header.frame_version = kFrameVersion;
  header.type = static_cast<uint16_t>(type);
  header.request_id = request_id;
  header.body_bytes = static_cast<uint32_t>(body.size());
  header.data_bytes = static_cast<uint64_t>(data_bytes);
  header.checksum = ChecksumOf(BytesOf(header), body);
  return BytesOf(header) + body;
}

// The fixed part of a body, which may be followed by texts.
template <typename T>
absl::Status ReadFixed(absl::string_view body, absl::string_view name, T* fixed) {
  if (body.size() < sizeof(T)) {
    return Invalid(absl::StrCat("a ", name, " of ", body.size(), " bytes, must have ", sizeof(T)));
  }
  std::memcpy(fixed, body.data(), sizeof(T));
  return absl::OkStatus();
}

absl::Status CheckSize(absl::string_view body, absl::string_view name, size_t expected) {
  if (body.size() == expected) return absl::OkStatus();
  return Invalid(
      absl::StrCat("a ", name, " of ", body.size(), " bytes says that it has ", expected));
}

absl::Status CheckParts(uint32_t parts) {
  if (parts >= 1 && parts <= kBulkAllParts) return absl::OkStatus();
  return Invalid(absl::StrCat("parts are ", parts, ", must be in [1, ", kBulkAllParts, "]"));
}

absl::Status CheckBytes(absl::string_view name, uint64_t bytes) {
  if (bytes <= static_cast<uint64_t>(kTotalBytesMax)) return absl::OkStatus();
  return Invalid(absl::StrCat(name, " is ", bytes, ", must be in [0, ", kTotalBytesMax, "]"));
}

absl::Status CheckReserved(uint64_t reserved) {
  if (reserved == 0) return absl::OkStatus();
  return Invalid(absl::StrCat("a reserved field is ", reserved, ", must be 0"));
}

}  // namespace

std::string EncodeBulkHello(const BulkHello& hello) {
  WireHello fixed{};
  fixed.version_min = static_cast<uint16_t>(hello.versions.min);
  fixed.version_max = static_cast<uint16_t>(hello.versions.max);
  fixed.tenant_bytes = static_cast<uint16_t>(hello.tenant.size());
  fixed.token_bytes = static_cast<uint16_t>(hello.token.size());
  std::memcpy(fixed.spec, hello.spec.bytes.data(), sizeof(fixed.spec));
  return Frame(BulkFrameType::kHello, 0, BytesOf(fixed) + hello.tenant + hello.token);
}

std::string EncodeBulkWelcome(const BulkWelcome& welcome) {
  WireWelcome fixed{};
  fixed.version = static_cast<uint16_t>(welcome.version);
  fixed.plane_bytes = static_cast<uint64_t>(welcome.plane_bytes);
  fixed.original_bytes = static_cast<uint64_t>(welcome.original_bytes);
  return Frame(BulkFrameType::kWelcome, 0, BytesOf(fixed));
}

std::string EncodeBulkGet(uint32_t request_id, const BulkGet& get) {
  WireGet fixed{};
  std::memcpy(fixed.key, get.key.bytes.data(), sizeof(fixed.key));
  fixed.parts = get.parts;
  fixed.offset = static_cast<uint64_t>(get.offset);
  return Frame(BulkFrameType::kGet, request_id, BytesOf(fixed));
}

std::string EncodeBulkBlock(uint32_t request_id, const BulkBlock& block) {
  WireBlock fixed{};
  std::memcpy(fixed.key, block.key.bytes.data(), sizeof(fixed.key));
  std::memcpy(fixed.parent, block.parent.bytes.data(), sizeof(fixed.parent));
  fixed.originals_digest = block.originals_digest;
  fixed.seal_time_ms = block.seal_time_ms;
  fixed.parts = block.parts;
  fixed.total_bytes = static_cast<uint64_t>(block.total_bytes);
  fixed.offset = static_cast<uint64_t>(block.offset);
  return Frame(BulkFrameType::kBlock, request_id, BytesOf(fixed), block.total_bytes - block.offset);
}

std::string EncodeBulkError(uint32_t request_id, const absl::Status& error) {
  const std::string reason = ReasonOf(error).substr(0, kReasonBytesMax);
  const std::string message = std::string(error.message().substr(0, kMessageBytesMax));
  WireError fixed{};
  fixed.code = static_cast<uint32_t>(error.code());
  fixed.reason_bytes = static_cast<uint16_t>(reason.size());
  fixed.message_bytes = static_cast<uint16_t>(message.size());
  fixed.retry_delay_ms = static_cast<uint64_t>(RetryDelayMsOf(error));
  return Frame(BulkFrameType::kError, request_id, BytesOf(fixed) + reason + message);
}

absl::StatusOr<BulkHeader> ParseBulkHeader(absl::string_view bytes) {
  WireHeader wire;
  CERTKV_RETURN_IF_ERROR(ReadFixed(bytes, "header", &wire));
  if (wire.magic != kMagic) return Invalid("it does not begin with CKBF");
  if (wire.frame_version != kFrameVersion) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "BULK_VERSION",
        absl::StrCat("a frame is of version ", wire.frame_version, ", this store reads version ",
                     kFrameVersion, "; run versions on both sides that share one"));
  }
  const bool is_known = wire.type >= static_cast<uint16_t>(BulkFrameType::kHello) &&
                        wire.type <= static_cast<uint16_t>(BulkFrameType::kError);
  if (!is_known) return Invalid(absl::StrCat("its type is ", wire.type, ", must be in [1, 5]"));
  if (wire.body_bytes > kBulkBodyBytesMax) {
    return Invalid(absl::StrCat("its body has ", wire.body_bytes, " bytes, at most ",
                                kBulkBodyBytesMax, " are allowed"));
  }
  CERTKV_RETURN_IF_ERROR(CheckBytes("data_bytes", wire.data_bytes));
  BulkHeader header;
  header.type = static_cast<BulkFrameType>(wire.type);
  if (header.type != BulkFrameType::kBlock && wire.data_bytes > 0) {
    return Invalid(absl::StrCat("a frame of type ", wire.type, " has ", wire.data_bytes,
                                " bytes of data, must have none"));
  }
  header.request_id = wire.request_id;
  header.body_bytes = wire.body_bytes;
  header.data_bytes = static_cast<int64_t>(wire.data_bytes);
  header.checksum = wire.checksum;
  return header;
}

absl::Status CheckBulkBody(absl::string_view header, absl::string_view body) {
  WireHeader wire;
  CERTKV_RETURN_IF_ERROR(ReadFixed(header, "header", &wire));
  CERTKV_RETURN_IF_ERROR(CheckSize(body, "body", wire.body_bytes));
  const uint64_t checksum = ChecksumOf(header, body);
  if (checksum == wire.checksum) return absl::OkStatus();
  return Invalid(absl::StrCat("its checksum is ", wire.checksum, ", its bytes have ", checksum));
}

absl::StatusOr<BulkHello> ParseBulkHello(absl::string_view body) {
  WireHello fixed;
  CERTKV_RETURN_IF_ERROR(ReadFixed(body, "HELLO", &fixed));
  CERTKV_RETURN_IF_ERROR(
      CheckSize(body, "HELLO", sizeof(fixed) + fixed.tenant_bytes + fixed.token_bytes));
  BulkHello hello;
  hello.versions = {fixed.version_min, fixed.version_max};
  if (hello.versions.min < 1 || hello.versions.max < hello.versions.min) {
    return Invalid(
        absl::StrCat("a HELLO offers versions ", hello.versions.min, " to ", hello.versions.max));
  }
  std::memcpy(hello.spec.bytes.data(), fixed.spec, sizeof(fixed.spec));
  hello.tenant = std::string(body.substr(sizeof(fixed), fixed.tenant_bytes));
  hello.token = std::string(body.substr(sizeof(fixed) + fixed.tenant_bytes));
  if (!IsTenantName(hello.tenant)) return Invalid("a HELLO names no valid tenant");
  if (hello.token.size() > kTokenBytesMax) {
    return Invalid(absl::StrCat("a HELLO has a token of ", hello.token.size(), " bytes, at most ",
                                kTokenBytesMax, " are allowed"));
  }
  return hello;
}

absl::StatusOr<BulkWelcome> ParseBulkWelcome(absl::string_view body) {
  WireWelcome fixed;
  CERTKV_RETURN_IF_ERROR(ReadFixed(body, "WELCOME", &fixed));
  CERTKV_RETURN_IF_ERROR(CheckSize(body, "WELCOME", sizeof(fixed)));
  for (const uint16_t reserved : fixed.reserved) CERTKV_RETURN_IF_ERROR(CheckReserved(reserved));
  CERTKV_RETURN_IF_ERROR(CheckBytes("plane_bytes", fixed.plane_bytes));
  CERTKV_RETURN_IF_ERROR(CheckBytes("original_bytes", fixed.original_bytes));
  BulkWelcome welcome;
  welcome.version = fixed.version;
  welcome.plane_bytes = static_cast<int64_t>(fixed.plane_bytes);
  welcome.original_bytes = static_cast<int64_t>(fixed.original_bytes);
  return welcome;
}

absl::StatusOr<BulkGet> ParseBulkGet(absl::string_view body) {
  WireGet fixed;
  CERTKV_RETURN_IF_ERROR(ReadFixed(body, "GET", &fixed));
  CERTKV_RETURN_IF_ERROR(CheckSize(body, "GET", sizeof(fixed)));
  CERTKV_RETURN_IF_ERROR(CheckReserved(fixed.reserved));
  CERTKV_RETURN_IF_ERROR(CheckParts(fixed.parts));
  CERTKV_RETURN_IF_ERROR(CheckBytes("offset", fixed.offset));
  BulkGet get;
  std::memcpy(get.key.bytes.data(), fixed.key, sizeof(fixed.key));
  get.parts = fixed.parts;
  get.offset = static_cast<int64_t>(fixed.offset);
  return get;
}

absl::StatusOr<BulkBlock> ParseBulkBlock(absl::string_view body, int64_t data_bytes) {
  WireBlock fixed;
  CERTKV_RETURN_IF_ERROR(ReadFixed(body, "BLOCK", &fixed));
  CERTKV_RETURN_IF_ERROR(CheckSize(body, "BLOCK", sizeof(fixed)));
  CERTKV_RETURN_IF_ERROR(CheckReserved(fixed.reserved));
  CERTKV_RETURN_IF_ERROR(CheckParts(fixed.parts));
  CERTKV_RETURN_IF_ERROR(CheckBytes("total_bytes", fixed.total_bytes));
  CERTKV_RETURN_IF_ERROR(CheckBytes("offset", fixed.offset));
  if (fixed.offset > fixed.total_bytes ||
      fixed.total_bytes - fixed.offset != static_cast<uint64_t>(data_bytes)) {
    return Invalid(absl::StrCat("a BLOCK of ", fixed.total_bytes, " bytes from ", fixed.offset,
                                " on has ", data_bytes, " bytes of data"));
  }
  BulkBlock block;
  std::memcpy(block.key.bytes.data(), fixed.key, sizeof(fixed.key));
  std::memcpy(block.parent.bytes.data(), fixed.parent, sizeof(fixed.parent));
  block.originals_digest = fixed.originals_digest;
  block.seal_time_ms = fixed.seal_time_ms;
  block.parts = fixed.parts;
  block.total_bytes = static_cast<int64_t>(fixed.total_bytes);
  block.offset = static_cast<int64_t>(fixed.offset);
  return block;
}

absl::Status ParseBulkError(absl::string_view body, absl::Status* error) {
  WireError fixed;
  CERTKV_RETURN_IF_ERROR(ReadFixed(body, "ERROR", &fixed));
  CERTKV_RETURN_IF_ERROR(
      CheckSize(body, "ERROR", sizeof(fixed) + fixed.reason_bytes + fixed.message_bytes));
  if (fixed.reason_bytes > kReasonBytesMax || fixed.message_bytes > kMessageBytesMax) {
    return Invalid(absl::StrCat("an ERROR has a reason of ", fixed.reason_bytes,
                                " and a message of ", fixed.message_bytes, " bytes"));
  }
  const bool is_known = fixed.code >= 1 && fixed.code <= 16;
  const absl::string_view reason = body.substr(sizeof(fixed), fixed.reason_bytes);
  const auto is_upper_snake = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  if (reason.empty() || !std::all_of(reason.begin(), reason.end(), is_upper_snake)) {
    return Invalid("an ERROR has no reason");
  }
  *error =
      MakeError(is_known ? static_cast<absl::StatusCode>(fixed.code) : absl::StatusCode::kUnknown,
                reason, body.substr(sizeof(fixed) + fixed.reason_bytes));
  if (fixed.retry_delay_ms > 0) {
    const auto delay_ms = std::min<uint64_t>(fixed.retry_delay_ms, kRetryDelayMaxMs);
    *error = WithRetryDelay(*error, static_cast<int64_t>(delay_ms));
  }
  return absl::OkStatus();
}

absl::StatusOr<int32_t> ChooseBulkVersion(const BulkHello& hello) {
  return ChooseWireVersion(hello.versions, "the store that pulls", SupportedWireVersions(),
                           "the one asked", "BULK_VERSION");
}

}  // namespace certkv::kvstore
