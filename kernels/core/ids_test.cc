#include "kernels/core/ids.h"

#include <type_traits>
#include <unordered_set>

#include "absl/hash/hash.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/sha256.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

static_assert(!std::is_convertible_v<SpecDigest, BlockKey>, "digests and keys are never swapped");
static_assert(!std::is_convertible_v<LeaseId, SessionId>);
static_assert(!std::is_convertible_v<LeaseId, int64_t>);

TEST(IdsTest, HexIsLowerCaseAndCutWhereAsked) {
  BlockKey key;
  key.bytes[0] = 0xab;
  key.bytes[1] = 0x01;
  EXPECT_EQ(ToHex(key.view()), "ab01" + std::string(60, '0'));
  EXPECT_EQ(ToHex(key.view(), 2), "ab01");
  EXPECT_EQ(ToHex("", 8), "");
}

TEST(IdsTest, BytesSurviveARoundTrip) {
  std::string bytes(32, '\0');
  for (int i = 0; i < 32; ++i) bytes[i] = static_cast<char>(255 - i);
  const auto key = BlockKeyFromBytes(bytes);
  ASSERT_TRUE(key.ok());
  EXPECT_EQ(key->view(), bytes);
  const auto digest = SpecDigestFromBytes(bytes);
  ASSERT_TRUE(digest.ok());
  EXPECT_EQ(digest->view(), bytes);
}

TEST(IdsTest, RefusesEveryOtherSize) {
  for (const size_t size : {size_t{0}, size_t{31}, size_t{33}, size_t{64}}) {
    const absl::Status key = BlockKeyFromBytes(std::string(size, 'k')).status();
    EXPECT_EQ(key.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(key), "DIGEST_SIZE");
    EXPECT_THAT(std::string(key.message()), HasSubstr("block key has " + std::to_string(size)));
    EXPECT_EQ(ReasonOf(SpecDigestFromBytes(std::string(size, 'k')).status()), "DIGEST_SIZE");
  }
}

TEST(IdsTest, KeysOrderBytewiseAndHashByContent) {
  BlockKey low;
  BlockKey high;
  low.bytes[31] = 0xff;
  high.bytes[0] = 0x01;
  EXPECT_LT(low, high);
  EXPECT_TRUE(BlockKey{}.is_zero());
  EXPECT_FALSE(low.is_zero());
  std::unordered_set<BlockKey, absl::Hash<BlockKey>> set = {low, high, low};
  EXPECT_EQ(set.size(), 2u);
}

TEST(IdsTest, SlotIsPresentFromSlotZeroOn) {
  EXPECT_FALSE(SlotRef{}.present());
  EXPECT_TRUE((SlotRef{.slot = 0, .generation = 2}).present());
  EXPECT_NE((SlotRef{.slot = 0, .generation = 2}), (SlotRef{.slot = 0, .generation = 4}));
}

// FIPS 180-2, appendix B.
TEST(Sha256Test, MatchesThePublishedVectors) {
  const auto digest_of = [](absl::string_view text) {
    Sha256 hash;
    hash.AddBytes(text);
    return ToHex(SpecDigest{hash.Finish()}.view());
  };
  EXPECT_EQ(digest_of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest_of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

TEST(Sha256Test, NumbersAreLittleEndianBytes) {
  Sha256 numbers;
  numbers.AddU32(0x04030201);
  numbers.AddU64(0x0c0b0a0908070605);
  numbers.AddF32(1.0f);
  numbers.AddSized("ab");
  Sha256 bytes;
  bytes.AddBytes(
      absl::string_view("\1\2\3\4\5\6\7\x8\x9\xa\xb\xc\0\0\x80\x3f\2\0\0\0"
                        "ab",
                        22));
  EXPECT_EQ(numbers.Finish(), bytes.Finish());
}

TEST(Sha256DeathTest, RefusesEverythingAfterFinish) {
  Sha256 hash;
  hash.Finish();
  EXPECT_DEATH(hash.Finish(), "finished once");
  EXPECT_DEATH(hash.AddBytes("x"), "until it is finished");
}

}  // namespace
}  // namespace certkv
