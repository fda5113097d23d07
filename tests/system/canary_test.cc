// The output canary: an engine says which outputs it used, and gate learns when they are not what
// was served.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cpp/rpc.h"
#include "kernels/core/status.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

class CanaryTest : public SystemTest {
 protected:
  void SetUp() override {
    StartCluster("gate:\n  canary_share: 1\n");
    worker_ = AttachWorker(SmallSpec());
    sequence_ = Put(*worker_, data_);
  }
  // Reads both layers with an engine that does `breaks` to the outputs of the first one before it
  // uses them. Returns what gate then knows.
  template <typename Breaks>
  gate::v1::RequestRisk ReadWith(const std::string& id, const Breaks& breaks) {
    const auto request = OpenRequest(id);
    const auto attention = client::Attention::Open(*worker_, *sequence_, *request);
    EXPECT_TRUE(attention.ok()) << attention.status();
    const std::vector<float> queries = TestQueries(data_.spec, 3, 1.0f);
    for (int32_t layer = 0; layer < 2; ++layer) {
      client::ReadRequest read;
      read.layer = layer;
      read.query_position = sequence_->token_count() - 1;
      read.queries = queries.data();
      const auto results = (*attention)->Attend({&read, 1});
      EXPECT_TRUE(results.ok() && (*results)[0].status.ok());
      EXPECT_TRUE((*results)[0].canary);  // the share is 1
      std::vector<float> used = (*results)[0].outputs;
      if (layer == 0) breaks(&used, (*results)[0].certificates);
      const absl::Status checked = (*attention)->CheckUsed(read, (*results)[0], used);
      EXPECT_TRUE(checked.ok()) << checked;
    }
    EXPECT_TRUE(request->Flush().ok());
    return Risk(id);
  }
  gate::v1::RequestRisk Risk(const std::string& id) {
    const auto stub = gate::v1::Gate::NewStub(client::MakeChannel(cluster_->options().gate_target));
    gate::v1::GetRequestRiskRequest ask;
    ask.set_request("requests/" + id);
    gate::v1::RequestRisk risk;
    const absl::Status status = client::CallUnary(
        5000, client::Retry::kIdempotent,
        [&](grpc::ClientContext& context) { return stub->GetRequestRisk(&context, ask, &risk); });
    EXPECT_TRUE(status.ok()) << status;
    return risk;
  }
  static bool HasEvent(const gate::v1::RequestRisk& risk) {
    return std::any_of(risk.events().begin(), risk.events().end(),
                       [](const auto& event) { return event.kind() == "CANARY_MISMATCH"; });
  }

  const TestSequence data_{SmallSpec(), 64 * 3 + 10, 7};
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
};

TEST_P(CanaryTest, SoundEngineMatches) {
  const auto risk = ReadWith("sound", [](std::vector<float>*, const auto&) {});
  EXPECT_EQ(risk.canary_checks(), 2 * data_.spec.query_head_count());
  EXPECT_EQ(risk.canary_mismatches(), 0);
  EXPECT_LT(risk.risk_score(), 1);
  EXPECT_FALSE(HasEvent(risk));
}

TEST_P(CanaryTest, BrokenEngineRaisesTheRiskAndAnEvent) {
  // A head whose output is off by more than its certificate and the arithmetic explain.
  const auto off = ReadWith("off", [this](std::vector<float>* used, const auto& certificates) {
    (*used)[static_cast<size_t>(data_.spec.value_dim)] +=
        4 * certificates[1].output_error_bound + 4 * certificates[1].value_radius;
  });
  EXPECT_EQ(off.canary_mismatches(), 1);
  EXPECT_EQ(off.risk_score(), 1);
  EXPECT_TRUE(HasEvent(off));
  // A kernel that makes a NaN.
  const auto nan = ReadWith("nan", [](std::vector<float>* used, const auto&) {
    used->front() = std::numeric_limits<float>::quiet_NaN();
  });
  EXPECT_EQ(nan.canary_mismatches(), 1);
  EXPECT_TRUE(HasEvent(nan));
  // A kernel that reads another head's values everywhere.
  const auto none = ReadWith("garbage", [](std::vector<float>* used, const auto& certificates) {
    for (float& value : *used) value = 10 * certificates[0].value_radius - value;
  });
  EXPECT_EQ(none.canary_mismatches(), data_.spec.query_head_count());
}

TEST_P(CanaryTest, RefusesOutputsOfAnotherShape) {
  const auto request = OpenRequest("shape");
  const auto attention = client::Attention::Open(*worker_, *sequence_, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  const std::vector<float> queries = TestQueries(data_.spec, 3, 1.0f);
  client::ReadRequest read;
  read.query_position = sequence_->token_count() - 1;
  read.queries = queries.data();
  const auto results = (*attention)->Attend({&read, 1});
  ASSERT_TRUE(results.ok() && (*results)[0].status.ok());
  EXPECT_EQ(ReasonOf((*attention)->CheckUsed(read, (*results)[0], {})), "READ_INVALID");
  client::ReadResult failed;
  failed.status = absl::InternalError("no outputs");
  EXPECT_EQ(ReasonOf((*attention)->CheckUsed(read, failed, (*results)[0].outputs)), "READ_INVALID");
}

INSTANTIATE_TEST_SUITE_P(Shapes, CanaryTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
