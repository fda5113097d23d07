// Fuzzes the frames of the bulk plane. What comes over the network is refused with a reason, or is
// a frame that is written as it was read, with no length over its limit.
#include <string>

#include "kernels/core/check.h"
#include "services/kvstore/bulk_frame.h"
#include "tests/fuzz/fuzz_checks.h"

namespace certkv {
namespace {

using kvstore::BulkFrameType;

void CheckSame(const std::string& encoded, absl::string_view body) {
  CERTKV_CHECK(absl::string_view(encoded).substr(kvstore::kBulkHeaderBytes) == body,
               "a body is written as it is read");
}

// The body of a frame of each type, whether or not its checksum is right: fuzzers find no hashes.
void ParseBody(BulkFrameType type, absl::string_view body, int64_t data_bytes) {
  if (type == BulkFrameType::kHello) {
    const auto hello = kvstore::ParseBulkHello(body);
    CheckRefusal(hello.status());
    if (hello.ok()) CheckSame(kvstore::EncodeBulkHello(*hello), body);
    if (hello.ok()) CheckRefusal(kvstore::ChooseBulkVersion(*hello).status());
  } else if (type == BulkFrameType::kWelcome) {
    const auto welcome = kvstore::ParseBulkWelcome(body);
    CheckRefusal(welcome.status());
    if (welcome.ok()) CheckSame(kvstore::EncodeBulkWelcome(*welcome), body);
  } else if (type == BulkFrameType::kGet) {
    const auto get = kvstore::ParseBulkGet(body);
    CheckRefusal(get.status());
    if (get.ok()) CheckSame(kvstore::EncodeBulkGet(1, *get), body);
  } else if (type == BulkFrameType::kBlock) {
    const auto block = kvstore::ParseBulkBlock(body, data_bytes);
    CheckRefusal(block.status());
    if (block.ok()) {
      CheckSame(kvstore::EncodeBulkBlock(1, *block), body);
      CERTKV_CHECK(block->offset >= 0 && block->total_bytes - block->offset == data_bytes,
                   "a block has the bytes that it says");
    }
  } else {
    absl::Status error;
    const absl::Status status = kvstore::ParseBulkError(body, &error);
    CheckRefusal(status);
    if (status.ok()) {
      CERTKV_CHECK(!error.ok(), "an error is one");
      CheckRefusal(error);
    }
  }
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto header =
      certkv::kvstore::ParseBulkHeader(bytes.substr(0, certkv::kvstore::kBulkHeaderBytes));
  certkv::CheckRefusal(header.status());
  if (!header.ok()) return 0;
  CERTKV_CHECK(header->body_bytes <= certkv::kvstore::kBulkBodyBytesMax &&
                   header->data_bytes <= certkv::kvstore::kBulkDataBytesMax,
               "no length is absurd");
  const absl::string_view rest = bytes.substr(certkv::kvstore::kBulkHeaderBytes);
  const absl::string_view body = rest.substr(0, static_cast<size_t>(header->body_bytes));
  certkv::CheckRefusal(
      certkv::kvstore::CheckBulkBody(bytes.substr(0, certkv::kvstore::kBulkHeaderBytes), body));
  certkv::ParseBody(header->type, body, header->data_bytes);
  return 0;
}
