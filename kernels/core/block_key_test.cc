#include "kernels/core/block_key.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

namespace certkv {
namespace {

template <typename Id>
Id FromHex(const std::string& hex) {
  Id id;
  const std::string bytes = absl::HexStringToBytes(hex);
  std::memcpy(id.bytes.data(), bytes.data(), id.bytes.size());
  return id;
}

BlockKeyContext Context() {
  BlockKeyContext context;
  context.spec_digest.bytes.fill(0x5a);
  context.tenant_salt = "tenant";
  return context;
}

std::vector<int32_t> Tokens(int count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

TEST(BlockKeyTest, KeysAndTagsAreTheGoldenOnes) {
  std::ifstream file("tests/golden/core_identities.json");
  ASSERT_TRUE(file.good()) << "run from the repository root";
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_GE(golden["blocks"].size(), 6u);
  for (const auto& row : golden["blocks"]) {
    const BlockKeyContext context = {.spec_digest = FromHex<SpecDigest>(row["spec_digest"]),
                                     .rank = row["rank"],
                                     .tenant_salt = row["tenant_salt"]};
    const auto tokens = row["tokens"].get<std::vector<int32_t>>();
    const BlockKey key =
        ComputeBlockKey(context, FromHex<BlockKey>(row["parent"]), tokens,
                        absl::HexStringToBytes(row["extra_keys"].get<std::string>()));
    EXPECT_EQ(ToHex(key.view()), row["key"]);
    for (const auto& tag : row["tags"]) {
      const auto& place = tag["place"];
      EXPECT_EQ(absl::StrFormat("%016x", TileIdentityTag(key, place[0], place[1], place[2])),
                tag["tag"]);
    }
  }
}

TEST(BlockKeyTest, ChainEqualsKeysComputedOneByOne) {
  const BlockKeyContext context = Context();
  const std::vector<int32_t> tokens = Tokens(3 * 64 + 63);
  const std::vector<BlockKey> keys = ComputeBlockKeys(context, tokens, 64);
  ASSERT_EQ(keys.size(), 3u) << "the 63 tokens at the end are no block";
  BlockKey parent;
  for (size_t i = 0; i < keys.size(); ++i) {
    parent = ComputeBlockKey(context, parent, absl::MakeConstSpan(tokens).subspan(i * 64, 64));
    EXPECT_EQ(keys[i], parent);
  }
}

TEST(BlockKeyTest, ChainsShareExactlyTheirCommonPrefix) {
  const BlockKeyContext context = Context();
  const std::vector<int32_t> tokens = Tokens(256);
  std::vector<int32_t> other = tokens;
  other[64 + 10] = 7;
  const std::vector<BlockKey> a = ComputeBlockKeys(context, tokens, 64);
  const std::vector<BlockKey> b = ComputeBlockKeys(context, other, 64);
  EXPECT_EQ(a[0], b[0]);
  for (int i = 1; i < 4; ++i) EXPECT_NE(a[i], b[i]) << i;
}

TEST(BlockKeyTest, SequenceShorterThanABlockHasNoKeys) {
  EXPECT_TRUE(ComputeBlockKeys(Context(), Tokens(63), 64).empty());
  EXPECT_TRUE(ComputeBlockKeys(Context(), {}, 64).empty());
  EXPECT_EQ(ComputeBlockKeys(Context(), Tokens(64), 64).size(), 1u);
}

TEST(BlockKeyTest, EveryInputSeparatesKeys) {
  const std::vector<int32_t> tokens = Tokens(64);
  const BlockKeyContext base = Context();
  BlockKeyContext digest = base;
  digest.spec_digest.bytes[31] ^= 1;
  BlockKeyContext rank = base;
  rank.rank = 1;
  BlockKeyContext salt = base;
  salt.tenant_salt = "tenanu";
  BlockKeyContext shorter_salt = base;
  shorter_salt.tenant_salt = "tenan";
  BlockKey parent;
  parent.bytes[0] = 1;
  std::vector<int32_t> swapped = tokens;
  std::swap(swapped[0], swapped[1]);
  const std::set<BlockKey> keys = {
      ComputeBlockKey(base, BlockKey{}, tokens), ComputeBlockKey(digest, BlockKey{}, tokens),
      ComputeBlockKey(rank, BlockKey{}, tokens), ComputeBlockKey(salt, BlockKey{}, tokens),
      // The 't' moves from the salt to the extra keys.
      ComputeBlockKey(shorter_salt, BlockKey{}, tokens, "t"), ComputeBlockKey(base, parent, tokens),
      ComputeBlockKey(base, BlockKey{}, swapped), ComputeBlockKey(base, BlockKey{}, Tokens(63)),
      ComputeBlockKey(base, BlockKey{}, tokens, "x")};
  EXPECT_EQ(keys.size(), 9u);
}

TEST(BlockKeyDeathTest, RefusesABlockWithoutTokensAndSaltOverTheLimit) {
  EXPECT_DEATH(ComputeBlockKey(Context(), BlockKey{}, {}), "a block holds tokens");
  BlockKeyContext context = Context();
  context.tenant_salt = std::string(65, 's');
  EXPECT_DEATH(ComputeBlockKey(context, BlockKey{}, {1}), "checked against their limits");
  EXPECT_DEATH(ComputeBlockKey(Context(), BlockKey{}, {1}, std::string(1025, 'x')),
               "checked against their limits");
}

TEST(BlockKeyTest, TileTagsDifferAtEachPlaceAndForEachKey) {
  BlockKey key;
  BlockKey other;
  other.bytes[7] = 1;
  std::set<uint64_t> tags;
  size_t count = 0;
  for (const BlockKey& one : {key, other}) {
    for (int layer = 0; layer < 32; ++layer) {
      for (int head = 0; head < 32; ++head) {
        for (int tile = 0; tile < 16; ++tile, ++count) {
          tags.insert(TileIdentityTag(one, layer, head, tile));
        }
      }
    }
  }
  EXPECT_EQ(tags.size(), count);
}

}  // namespace
}  // namespace certkv
