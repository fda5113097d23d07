#include "services/kvstore/bulk_frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;

absl::string_view HeaderOf(const std::string& frame) {
  return absl::string_view(frame).substr(0, kBulkHeaderBytes);
}
absl::string_view BodyOf(const std::string& frame) {
  return absl::string_view(frame).substr(kBulkHeaderBytes);
}

// Writes over a number in a frame, whose checksum is then wrong.
template <typename T>
std::string With(std::string frame, size_t at, T value) {
  std::memcpy(frame.data() + at, &value, sizeof(value));
  return frame;
}

BulkBlock SomeBlock() {
  BulkBlock block;
  block.key = ChainKey(1, 1);
  block.parent = ChainKey(1, 0);
  block.originals_digest = 77;
  block.seal_time_ms = 1234;
  block.parts = kBulkAllParts;
  block.total_bytes = 1000;
  block.offset = 64;
  return block;
}

TEST(BulkFrameTest, HelloAndWelcomeComeBackAsTheyWent) {
  BulkHello hello;
  hello.versions = {1, 7};
  hello.spec.bytes.fill(3);
  hello.tenant = "a";
  hello.token = "secret";
  const std::string frame = EncodeBulkHello(hello);
  const auto header = ParseBulkHeader(HeaderOf(frame));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->type, BulkFrameType::kHello);
  EXPECT_EQ(header->data_bytes, 0);
  EXPECT_TRUE(CheckBulkBody(HeaderOf(frame), BodyOf(frame)).ok());
  const auto back = ParseBulkHello(BodyOf(frame));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->versions, hello.versions);
  EXPECT_EQ(back->spec, hello.spec);
  EXPECT_EQ(back->tenant, "a");
  EXPECT_EQ(back->token, "secret");
  const std::string welcome = EncodeBulkWelcome({1, 100, 200});
  const auto sizes = ParseBulkWelcome(BodyOf(welcome));
  ASSERT_TRUE(sizes.ok()) << sizes.status();
  EXPECT_EQ(sizes->plane_bytes, 100);
  EXPECT_EQ(sizes->original_bytes, 200);
}

TEST(BulkFrameTest, GetAndBlockComeBackAsTheyWent) {
  const std::string get = EncodeBulkGet(9, {ChainKey(1, 2), kBulkOriginals, 4096});
  const auto asked = ParseBulkGet(BodyOf(get));
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_EQ(asked->key, ChainKey(1, 2));
  EXPECT_EQ(asked->parts, kBulkOriginals);
  EXPECT_EQ(asked->offset, 4096);
  const std::string frame = EncodeBulkBlock(9, SomeBlock());
  const auto header = ParseBulkHeader(HeaderOf(frame));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->request_id, 9u);
  EXPECT_EQ(header->data_bytes, 936);
  const auto block = ParseBulkBlock(BodyOf(frame), header->data_bytes);
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(block->key, ChainKey(1, 1));
  EXPECT_EQ(block->parent, ChainKey(1, 0));
  EXPECT_EQ(block->originals_digest, 77u);
  EXPECT_EQ(block->seal_time_ms, 1234);
  EXPECT_EQ(block->total_bytes, 1000);
  EXPECT_EQ(block->offset, 64);
}

TEST(BulkFrameTest, ErrorKeepsCodeReasonMessageAndDelay) {
  const absl::Status sent = WithRetryDelay(
      MakeError(absl::StatusCode::kResourceExhausted, "STORE_FULL", "all is leased"), 250);
  absl::Status got;
  ASSERT_TRUE(ParseBulkError(BodyOf(EncodeBulkError(3, sent)), &got).ok());
  EXPECT_EQ(got.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(got), "STORE_FULL");
  EXPECT_EQ(got.message(), "all is leased");
  EXPECT_EQ(RetryDelayMsOf(got), 250);
}

TEST(BulkFrameTest, ErrorOfALongMessageFitsAFrame) {
  const absl::Status sent =
      MakeError(absl::StatusCode::kInternal, "STORE_FULL", std::string(10'000, 'x'));
  const std::string frame = EncodeBulkError(0, sent);
  ASSERT_TRUE(ParseBulkHeader(HeaderOf(frame)).ok());
  absl::Status got;
  ASSERT_TRUE(ParseBulkError(BodyOf(frame), &got).ok());
  EXPECT_EQ(got.message(), std::string(512, 'x'));
}

TEST(BulkFrameTest, HeaderIsRefusedWhenItIsNoneOrTooLong) {
  const std::string good = EncodeBulkBlock(1, SomeBlock());
  struct Case {
    std::string frame;
    std::string reason;
    std::string text;
  };
  const std::vector<Case> cases = {
      {good.substr(0, 31), "BULK_FRAME_INVALID", "31 bytes"},
      {With<uint32_t>(good, 0, 0x20544547), "BULK_FRAME_INVALID", "CKBF"},
      {With<uint16_t>(good, 4, 2), "BULK_VERSION", "version 2"},
      {With<uint16_t>(good, 6, 0), "BULK_FRAME_INVALID", "type is 0"},
      {With<uint16_t>(good, 6, 6), "BULK_FRAME_INVALID", "type is 6"},
      {With<uint16_t>(good, 6, 3), "BULK_FRAME_INVALID", "936 bytes of data"},
      {With<uint32_t>(good, 12, 1025), "BULK_FRAME_INVALID", "1025"},
      {With<uint64_t>(good, 16, uint64_t{1} << 63), "BULK_FRAME_INVALID", "data_bytes"},
  };
  for (const Case& one : cases) {
    const auto header = ParseBulkHeader(HeaderOf(one.frame));
    EXPECT_EQ(ReasonOf(header.status()), one.reason) << one.text;
    EXPECT_THAT(std::string(header.status().message()), HasSubstr(one.text));
  }
}

TEST(BulkFrameTest, EveryBitThatFlipsInHeaderOrBodyIsFound) {
  const std::string good = EncodeBulkBlock(5, SomeBlock());
  ASSERT_TRUE(CheckBulkBody(HeaderOf(good), BodyOf(good)).ok());
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    const bool is_found =
        !ParseBulkHeader(HeaderOf(bad)).ok() || !CheckBulkBody(HeaderOf(bad), BodyOf(bad)).ok();
    EXPECT_TRUE(is_found) << "bit " << bit;
  }
}

TEST(BulkFrameTest, BodyIsRefusedWhenAFieldIsOutOfRange) {
  BulkHello hello;
  hello.tenant = "a";
  hello.token = "secret";
  const std::string h(BodyOf(EncodeBulkHello(hello)));
  const std::string w(BodyOf(EncodeBulkWelcome({1, 100, 200})));
  const std::string g(BodyOf(EncodeBulkGet(1, {ChainKey(1, 0), kBulkPlanes, 0})));
  const std::string b(BodyOf(EncodeBulkBlock(1, SomeBlock())));
  const std::string e(
      BodyOf(EncodeBulkError(1, MakeError(absl::StatusCode::kInternal, "A_B", "m"))));
  absl::Status ignored;
  const std::vector<std::pair<std::string, absl::Status>> cases = {
      {"HELLO cut", ParseBulkHello(h.substr(0, 39)).status()},
      {"HELLO with bytes left over", ParseBulkHello(h + "x").status()},
      {"HELLO without its token's end", ParseBulkHello(h.substr(0, h.size() - 1)).status()},
      {"HELLO of no version", ParseBulkHello(With<uint16_t>(h, 0, 0)).status()},
      {"HELLO of versions in reverse", ParseBulkHello(With<uint16_t>(h, 0, 2)).status()},
      {"HELLO of a tenant that is none", ParseBulkHello(With<char>(h, 40, '/')).status()},
      {"WELCOME cut", ParseBulkWelcome(w.substr(1)).status()},
      {"WELCOME of absurd size", ParseBulkWelcome(With<int64_t>(w, 8, -1)).status()},
      {"WELCOME with a reserved field", ParseBulkWelcome(With<uint16_t>(w, 2, 1)).status()},
      {"GET cut", ParseBulkGet(g.substr(1)).status()},
      {"GET of nothing", ParseBulkGet(With<uint32_t>(g, 32, 0)).status()},
      {"GET of an unknown part", ParseBulkGet(With<uint32_t>(g, 32, 4)).status()},
      {"GET from a negative offset", ParseBulkGet(With<int64_t>(g, 40, -1)).status()},
      {"GET with a reserved field", ParseBulkGet(With<uint32_t>(g, 36, 1)).status()},
      {"BLOCK cut", ParseBulkBlock(b.substr(1), 936).status()},
      {"BLOCK with other data", ParseBulkBlock(b, 935).status()},
      {"BLOCK from beyond its end", ParseBulkBlock(With<int64_t>(b, 96, 1001), 0).status()},
      {"BLOCK of nothing", ParseBulkBlock(With<uint32_t>(b, 80, 0), 936).status()},
      {"ERROR cut", ParseBulkError(e.substr(0, e.size() - 1), &ignored)},
      {"ERROR without a reason", ParseBulkError(With<char>(e, 16, ' '), &ignored)},
  };
  for (const auto& [name, status] : cases) {
    EXPECT_EQ(ReasonOf(status), "BULK_FRAME_INVALID") << name;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

TEST(BulkFrameTest, VersionIsTheOneThatBothSpeak) {
  BulkHello hello;
  const WireVersions ours = SupportedWireVersions();
  hello.versions = {ours.max, ours.max + 1};  // of the next release
  EXPECT_EQ(*ChooseBulkVersion(hello), ours.max);
  hello.versions = {ours.max + 1, ours.max + 2};
  const absl::Status status = ChooseBulkVersion(hello).status();
  EXPECT_EQ(ReasonOf(status), "BULK_VERSION");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the store that pulls speaks wire versions 2 to 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("upgrade the one asked"));
}

// The bytes of docs/bulk.md, written down apart from the code.
TEST(BulkFrameTest, GetHasTheBytesOfTheDocument) {
  const std::string frame = EncodeBulkGet(0x01020304, {BlockKey{}, kBulkPlanes, 5});
  const std::string fixed("CKBF\x01\0\x03\0\x04\x03\x02\x01\x30\0\0\0\0\0\0\0\0\0\0\0", 24);
  EXPECT_EQ(frame.substr(0, 24), fixed);
  EXPECT_EQ(frame.substr(32, 32), std::string(32, '\0'));
  EXPECT_EQ(frame.substr(64), std::string("\x01\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0", 16));
}

}  // namespace
}  // namespace certkv::kvstore
