#include "services/common/wire_version.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<int32_t> Choose(const WireVersions& theirs, const WireVersions& ours) {
  return ChooseWireVersion(theirs, "the client", ours, "the server");
}

TEST(WireVersionTest, TheHighestOfBothIsChosen) {
  EXPECT_EQ(*Choose({1, 1}, {1, 1}), 1);
  EXPECT_EQ(*Choose({1, 2}, {1, 1}), 1);
  EXPECT_EQ(*Choose({1, 1}, {1, 2}), 1);
  EXPECT_EQ(*Choose({2, 3}, {1, 2}), 2);
  EXPECT_EQ(*Choose({1, 2}, {2, 3}), 2);
  EXPECT_EQ(*Choose({4, 5}, {4, 5}), 5);
}

TEST(WireVersionTest, WhoeverIsOlderIsToBeUpgraded) {
  const absl::Status older = Choose({1, 2}, {3, 4}).status();
  EXPECT_EQ(older.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(older), "WIRE_VERSION");
  EXPECT_THAT(std::string(older.message()),
              HasSubstr("the client speaks wire versions 1 to 2, the server 3 to 4"));
  EXPECT_THAT(std::string(older.message()), HasSubstr("upgrade the client to a release that "
                                                      "speaks version 3"));
  const absl::Status newer = Choose({5, 6}, {3, 3}).status();
  EXPECT_THAT(std::string(newer.message()),
              HasSubstr("the client speaks wire versions 5 to 6, the server 3;"));
  EXPECT_THAT(std::string(newer.message()), HasSubstr("upgrade the server to a release that "
                                                      "speaks version 5"));
}

TEST(WireVersionTest, TextComesBackAsItWent) {
  for (const WireVersions& versions : {WireVersions{1, 1}, WireVersions{65534, 65535}}) {
    EXPECT_EQ(*WireVersionsFromText(WireVersionsToText(versions)), versions);
  }
}

TEST(WireVersionTest, TextThatIsNoRangeIsRefused) {
  for (const char* text : {"", "-", "1", "1-", "-1", "0-1", "2-1", "1-65536", "1-2-3", "a-b",
                           "1-00000000002", "99999999999999999999-99999999999999999999"}) {
    const absl::Status status = WireVersionsFromText(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_EQ(ReasonOf(status), "WIRE_VERSION") << text;
  }
}

// What a release promises: it understands the one before.
TEST(WireVersionTest, ThisReleaseSpeaksItsOwnVersionAndTheOneBefore) {
  const WireVersions ours = SupportedWireVersions();
  EXPECT_EQ(ours.min, std::max(1, ours.max - 1));
}

}  // namespace
}  // namespace certkv
