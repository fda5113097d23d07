// Whatever fails of NCCL, TCP takes over within the same pull: the same blocks, counted and said.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/core/status.h"
#include "tests/nccl/nccl_fixture.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class NcclFailureTest : public NcclPlaneTest {
 protected:
  static NcclConfig Config() {
    NcclConfig config = NcclPlaneTest::Config();
    config.in_flight_bytes = 2 * 50'000;
    return config;
  }
  // Pulls a chain while NCCL fails, and another one while its peer isn't asked any more.
  void ExpectTcpTakesOver(const std::string& reason) {
    source_.PutUnleased(writer_, 1, 0, 20);
    source_.PutUnleased(writer_, 2, 0, 3);
    const auto result = Pull(1, 20);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->pulled_count, 20);
    ExpectSame(1, 20);
    EXPECT_GT(TcpBytes(), 0);
    // Where both ends wait, the one that gives up first is what the other one sees.
    const int64_t others = reason == "NCCL_TIMEOUT" ? FailuresOf("NCCL_FAILED") : 0;
    EXPECT_GE(FailuresOf(reason) + others, 1) << "failures: " << FailureNames();
    EXPECT_TRUE(Soon([this] { return received().links == 0; }));
    const int64_t by_nccl = received().blocks_received;
    const std::string failures = FailureNames();
    ASSERT_TRUE(Pull(2, 3).ok());
    ExpectSame(2, 3);
    EXPECT_EQ(received().blocks_received, by_nccl);
    EXPECT_EQ(FailureNames(), failures) << "it is not tried again so soon";
  }
  std::string FailureNames() const {
    std::string names;
    for (const auto& [name, count] : received().Failures()) {
      absl::StrAppend(&names, name, "=", count, " ");
    }
    return names;
  }
};

struct StubCase {
  const char* failures;
  const char* reason;
};
class NcclStubFailureTest : public NcclFailureTest, public testing::WithParamInterface<StubCase> {};

TEST_P(NcclStubFailureTest, TcpTakesOverInTheSamePull) {
  NcclConfig config = Config();
  // What fails at once is not to fail for being late on a machine that is busy.
  if (std::string(GetParam().reason) == "NCCL_TIMEOUT") config.timeout_ms = 250;
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  failures_.Set(GetParam().failures);
  ExpectTcpTakesOver(GetParam().reason);
}

INSTANTIATE_TEST_SUITE_P(
    Failures, NcclStubFailureTest,
    testing::Values(StubCase{"ncclGetUniqueId=2", "NCCL_FAILED"},
                    StubCase{"ncclCommInitRankConfig=1", "NCCL_FAILED"},
                    StubCase{"ncclCommInitRankConfig=1@2", "NCCL_TIMEOUT"},
                    StubCase{"alone=1", "NCCL_TIMEOUT"}, StubCase{"async=6", "NCCL_FAILED"},
                    StubCase{"ncclCommGetAsyncError=3", "NCCL_FAILED"},
                    StubCase{"ncclSend=3", "NCCL_FAILED"}, StubCase{"ncclSend=3@7", "NCCL_FAILED"},
                    StubCase{"ncclRecv=3@7", "NCCL_FAILED"}, StubCase{"stall=1", "NCCL_TIMEOUT"},
                    StubCase{"stall=1@5", "NCCL_TIMEOUT"}, StubCase{"delay=600", "NCCL_TIMEOUT"},
                    StubCase{"cut=1@5", "NCCL_FAILED"}, StubCase{"flip=1", "NCCL_BYTES_DIFFER"},
                    StubCase{"flip=1@9", "NCCL_BYTES_DIFFER"}),
    [](const auto& info) {
      std::string name = info.param.failures;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return !absl::ascii_isalnum(c); }, '_');
      return name;
    });

class NcclDeviceFailureTest : public NcclFailureTest,
                              public testing::WithParamInterface<StubCase> {};

TEST_P(NcclDeviceFailureTest, TcpTakesOverInTheSamePull) {
  ASSERT_NO_FATAL_FAILURE(StartNccl(Config()));
  cuda_sharing::InjectFailures(GetParam().failures);
  source_.PutUnleased(writer_, 1, 0, 20);
  ASSERT_TRUE(Pull(1, 20).ok());
  ExpectSame(1, 20);
  EXPECT_GT(TcpBytes(), 0);
  EXPECT_GE(FailuresOf(GetParam().reason), 1) << FailureNames();
}

INSTANTIATE_TEST_SUITE_P(Failures, NcclDeviceFailureTest,
                         testing::Values(StubCase{"cudaMalloc=2", "DEVICE_MEMORY_FULL"},
                                         StubCase{"cudaHostRegister=2", "DEVICE_MEMORY_FULL"},
                                         StubCase{"cudaStreamCreateWithFlags=46", "DEVICE_FAILED"},
                                         StubCase{"cudaStreamQuery=719", "DEVICE_FAILED"},
                                         StubCase{"*=46", "DEVICE_FAILED"}),
                         [](const auto& info) {
                           std::string name = info.param.failures;
                           std::replace_if(
                               name.begin(), name.end(),
                               [](char c) { return !absl::ascii_isalnum(c); }, '_');
                           return name;
                         });

struct OfferCase {
  const char* reason;
  std::function<void(NcclOffer*)> change;
};

TEST_F(NcclFailureTest, OfferThatThePeerRefusesLeavesBlocksToTcp) {
  const OfferCase cases[] = {
      {"NCCL_VERSION", [](NcclOffer* offer) { offer->version = 22808; }},
      {"NCCL_SAME_DEVICE", [](NcclOffer* offer) { offer->device_uuid[0] ^= 1; }},
      {"NCCL_OFFER_INVALID", [](NcclOffer* offer) { offer->movement_bytes = 0; }},
      {"BULK_PEER_MISMATCH", [](NcclOffer* offer) { ++offer->plane_bytes; }},
      {"BULK_PEER_MISMATCH", [](NcclOffer* offer) { --offer->original_bytes; }},
      {"CACHE_NOT_FOUND", [](NcclOffer* offer) { offer->spec = SpecDigest{}; }},
  };
  int32_t chain = 1;
  for (const OfferCase& one : cases) {
    SCOPED_TRACE(one.reason);
    client_ = nullptr;
    changes_.offer = one.change;
    ASSERT_NO_FATAL_FAILURE(StartNccl(Config()));
    source_.PutUnleased(writer_, chain, 0, 4);
    ASSERT_TRUE(Pull(chain, 4).ok());
    ExpectSame(chain++, 4);
    EXPECT_EQ(FailuresOf(one.reason), 1) << FailureNames();
    EXPECT_EQ(received().blocks_received, 0);
    client_ = nullptr;
    server_ = nullptr;
    EXPECT_EQ(source_.engine.GetStats().session_count, 1) << "none of a link";
  }
}

TEST_F(NcclFailureTest, PeerThatContradictsItselfIsGivenUp) {
  using Sent = absl::StatusOr<std::vector<BulkBlock>>;
  const std::function<void(Sent*)> changes[] = {
      [](Sent* sent) { (*sent)->front().key = ChainKey(9, 9); },
      [](Sent* sent) { (*sent)->front().parts = kBulkPlanes; },
      [](Sent* sent) { ++(*sent)->front().total_bytes; },
      [](Sent* sent) { (*sent)->resize(100); },
  };
  int32_t chain = 1;
  for (const auto& change : changes) {
    SCOPED_TRACE(chain);
    client_ = nullptr;
    changes_.sent = change;
    ASSERT_NO_FATAL_FAILURE(StartNccl(Config()));
    source_.PutUnleased(writer_, chain, 0, 4);
    ASSERT_TRUE(Pull(chain, 4).ok());
    ExpectSame(chain++, 4);
    EXPECT_EQ(FailuresOf("NCCL_ANSWER_INVALID"), 1) << FailureNames();
    server_ = nullptr;
  }
  client_ = nullptr;
  changes_.sent = [](Sent*) {};
  changes_.joined = [](absl::StatusOr<NcclJoined>* joined) { (*joined)->movement_bytes *= 2; };
  ASSERT_NO_FATAL_FAILURE(StartNccl(Config()));
  source_.PutUnleased(writer_, chain, 0, 4);
  ASSERT_TRUE(Pull(chain, 4).ok());
  EXPECT_EQ(FailuresOf("NCCL_ANSWER_INVALID"), 1) << FailureNames();
}

TEST_F(NcclFailureTest, ParentThatIsNotTheKeyBeforeEndsThePullAsByTcp) {
  source_.PutUnleased(writer_, 1, 0, 4);
  ASSERT_NO_FATAL_FAILURE(StartNccl(Config()));
  PullRequest request = Request(1, 4);
  std::swap(request.keys[1], request.keys[2]);
  EXPECT_EQ(ReasonOf(Pull(request).status()), "PARENT_MISMATCH");
}

TEST_F(NcclFailureTest, PeerThatStopsWhileItSendsLeavesBlocksToTcp) {
  source_.PutUnleased(writer_, 1, 0, 20);
  ASSERT_NO_FATAL_FAILURE(StartNccl(Config()));
  failures_.Set("stall=1@4");
  std::thread stop([this] {
    EXPECT_TRUE(Soon([this] { return sent().links == 1; }));
    poll(nullptr, 0, 50);
    source_nccl_->Stop();
  });
  const absl::Time begin = absl::Now();
  ASSERT_TRUE(Pull(1, 20).ok());
  stop.join();
  ExpectSame(1, 20);
  EXPECT_GE(FailuresOf("NCCL_FAILED"), 1) << FailureNames();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(4)) << "it was seen, not waited for";
}

TEST_F(NcclFailureTest, StopEndsATransferThatHangs) {
  source_.PutUnleased(writer_, 1, 0, 20);
  NcclConfig config = Config();
  config.timeout_ms = 60'000;
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  failures_.Set("stall=1@2");
  std::thread stop([this] {
    EXPECT_TRUE(Soon([this] { return received().links == 1; }));
    target_nccl_->Stop();
  });
  ASSERT_TRUE(Pull(1, 20).ok()) << "by TCP";
  stop.join();
  ExpectSame(1, 20);
  EXPECT_TRUE(received().Failures().empty()) << FailureNames();
}

TEST_F(NcclFailureTest, NcclIsTriedAgainAfterTheRetryTime) {
  source_.PutUnleased(writer_, 1, 0, 3);
  source_.PutUnleased(writer_, 2, 0, 3);
  NcclConfig config = Config();
  config.retry_ms = 50;
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  failures_.Set("ncclGetUniqueId=2");
  ASSERT_TRUE(Pull(1, 3).ok());
  EXPECT_EQ(FailuresOf("NCCL_FAILED"), 1);
  EXPECT_EQ(received().blocks_received, 0);
  failures_.Set("");
  poll(nullptr, 0, 60);
  ASSERT_TRUE(Pull(2, 3).ok());
  ExpectSame(2, 3);
  EXPECT_EQ(received().blocks_received, 3);
}

TEST_F(NcclFailureTest, EachCauseIsSaidOnce) {
  NcclConfig config = Config();
  config.retry_ms = 1;
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  failures_.Set("ncclGetUniqueId=2");
  testing::internal::CaptureStderr();
  for (int32_t chain = 1; chain <= 3; ++chain) {
    source_.PutUnleased(writer_, chain, 0, 2);
    ASSERT_TRUE(Pull(chain, 2).ok());
    poll(nullptr, 0, 5);
  }
  failures_.Set("ncclCommInitRankConfig=1");
  source_.PutUnleased(writer_, 4, 0, 2);
  ASSERT_TRUE(Pull(4, 2).ok());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_GE(FailuresOf("NCCL_FAILED"), 4);
  const size_t first = log.find("event=nccl_given_up");
  ASSERT_NE(first, std::string::npos) << log;
  EXPECT_THAT(log.substr(first), HasSubstr("reason=NCCL_FAILED"));
  EXPECT_THAT(log.substr(first), HasSubstr("instead=TCP"));
  EXPECT_THAT(log.substr(first + 1), Not(HasSubstr("event=nccl_given_up"))) << log;
}

}  // namespace
}  // namespace certkv::kvstore
