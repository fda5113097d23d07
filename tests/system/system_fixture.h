// The fixture of the system suites: a cluster, and helpers that put, read and check.
#ifndef CERTKV_TESTS_SYSTEM_SYSTEM_FIXTURE_H_
#define CERTKV_TESTS_SYSTEM_SYSTEM_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "clients/cpp/attention.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "tests/system/cluster.h"
#include "tests/system/sequence_fixture.h"

namespace certkv {

class SystemTest : public ::testing::TestWithParam<ClusterShape> {
 protected:
  void StartCluster(const std::string& config = "") {
    auto cluster = Cluster::Start(GetParam(), config);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) std::cerr << cluster_->Logs();
  }
  std::unique_ptr<client::Worker> AttachWorker(const CacheSpec& spec,
                                               const std::string& name = "worker") {
    client::Options options = cluster_->options();
    options.worker_name = name;
    auto worker = client::Worker::Attach(options, spec);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  std::unique_ptr<client::Sequence> Put(client::Worker& worker, const TestSequence& data) {
    auto sequence =
        worker.PutSequence(data.token_ids, data.layers(), client::DefaultKeyContext(worker.spec()));
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return sequence.ok() ? *std::move(sequence) : nullptr;
  }
  std::unique_ptr<client::Request> OpenRequest(const std::string& id, float tv_tolerance = 0.2f,
                                               ReadMode mode = ReadMode::kEnforce) {
    tolerances_.tv_tolerance = tv_tolerance;
    client::RequestOptions options;
    options.tolerances = &tolerances_;
    options.read_mode = mode;
    auto request = client::Request::Open(cluster_->options(), id, options);
    EXPECT_TRUE(request.ok()) << request.status();
    return request.ok() ? *std::move(request) : nullptr;
  }
  // Reads the last position of both layers and checks the results against the truth.
  std::vector<client::ReadResult> ReadAndCheck(client::Attention& attention,
                                               const TestSequence& data, int64_t token_count,
                                               uint32_t seed, float sharpness = 1.0f) {
    const std::vector<float> queries = TestQueries(data.spec, seed, sharpness);
    std::vector<client::ReadRequest> reads(2);
    for (int32_t layer = 0; layer < 2; ++layer) {
      reads[layer].layer = layer;
      reads[layer].query_position = token_count - 1;
      reads[layer].queries = queries.data();
    }
    auto results = attention.Attend(reads);
    EXPECT_TRUE(results.ok()) << results.status();
    for (size_t i = 0; results.ok() && i < reads.size(); ++i) {
      EXPECT_TRUE((*results)[i].status.ok()) << (*results)[i].status;
      if (!(*results)[i].status.ok()) continue;
      EXPECT_EQ(CheckReadAgainstTruth(data, reads[i], (*results)[i], tolerances_), "");
    }
    return results.ok() ? *std::move(results) : std::vector<client::ReadResult>();
  }

  Tolerances tolerances_;
  std::unique_ptr<Cluster> cluster_;
};

// Names a parameter's test.
inline std::string ShapeName(const ::testing::TestParamInfo<ClusterShape>& info) {
  return ClusterShapeName(info.param);
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_SYSTEM_FIXTURE_H_
