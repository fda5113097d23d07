// The C interface against real servers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "clients/c/certkv.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

class CApiTest : public SystemTest {
 protected:
  static constexpr int32_t kTokens = 200;  // three blocks and a tail

  CApiTest() : data_(SmallSpec(), kTokens + 80, 5) {}

  void Open() {
    StartCluster();
    const client::Options options = cluster_->options();
    kvstore_ = options.kvstore_target;
    certifier_ = options.certifier_target;
    gate_ = options.gate_target;
    options_ = {.struct_size = sizeof(options_),
                .kvstore_target = kvstore_.c_str(),
                .certifier_target = certifier_.c_str(),
                .gate_target = gate_.c_str(),
                .rpc_timeout_ms = options.rpc_timeout_ms};
    spec_ = {.struct_size = sizeof(spec_),
             .model = data_.spec.model.c_str(),
             .layer_count = 2,
             .kv_head_count = 2,
             .group_size = 3,
             .head_dim = 64,
             .rotary_dim = 64};
    ASSERT_EQ(certkv_worker_attach(&options_, &spec_, &worker_), CERTKV_OK)
        << certkv_error_message();
    const std::vector<certkv_layer_kv> layers = LayersAt(0);
    ASSERT_EQ(certkv_worker_put_sequence(worker_, data_.token_ids.data(), kTokens, layers.data(), 2,
                                         &sequence_),
              CERTKV_OK)
        << certkv_error_message();
    ASSERT_EQ(certkv_request_open(&options_, "c-api", nullptr, &request_), CERTKV_OK)
        << certkv_error_message();
    ASSERT_EQ(certkv_attention_open(sequence_, request_, &attention_), CERTKV_OK)
        << certkv_error_message();
  }
  void TearDown() override {
    // In the order that is worst for what needs what.
    certkv_worker_close(worker_);
    certkv_sequence_close(sequence_);
    certkv_request_close(request_);
    certkv_attention_close(attention_);
    SystemTest::TearDown();
  }

  std::vector<certkv_layer_kv> LayersAt(int64_t token) const {
    std::vector<certkv_layer_kv> layers;
    for (const client::LayerKv& kv : data_.layers_at(token)) layers.push_back({kv.keys, kv.values});
    return layers;
  }

  // One read with room for what comes back.
  struct Read {
    explicit Read(int32_t layer, int64_t position)
        : queries(TestQueries(SmallSpec(), 7 + layer)),
          outputs(6 * 64, 123.0f),
          certificates(6),
          read{.struct_size = sizeof(read),
               .queries = queries.data(),
               .query_position = position,
               .layer = layer},
          result{.struct_size = sizeof(result),
                 .outputs = outputs.data(),
                 .certificates = certificates.data(),
                 .certificate_size = sizeof(certkv_certificate)} {}
    std::vector<float> queries;
    std::vector<float> outputs;
    std::vector<certkv_certificate> certificates;
    certkv_read read;
    certkv_read_result result;
  };

  // Holds a read against the truth; "" when all is well.
  std::string Check(const Read& read) const {
    client::ReadRequest request;
    request.layer = read.read.layer;
    request.query_position = read.read.query_position;
    request.queries = read.read.queries;
    client::ReadResult result;
    result.outputs = read.outputs;
    for (const certkv_certificate& c : read.certificates) {
      ReadCertificate certificate;
      certificate.outcome = static_cast<Outcome>(c.outcome);
      certificate.worst_case_tv = c.worst_case_tv;
      certificate.value_term = c.value_term;
      certificate.value_radius = c.value_radius;
      certificate.output_error_bound = c.output_error_bound;
      result.certificates.push_back(certificate);
    }
    return CheckReadAgainstTruth(data_, request, result, Tolerances());
  }

  TestSequence data_;
  std::string kvstore_;
  std::string certifier_;
  std::string gate_;
  certkv_options options_ = {};
  certkv_cache_spec spec_ = {};
  certkv_worker* worker_ = nullptr;
  certkv_sequence* sequence_ = nullptr;
  certkv_request* request_ = nullptr;
  certkv_attention* attention_ = nullptr;
};

TEST_P(CApiTest, ReadsAreAsTheirCertificatesSay) {
  Open();
  Read first(0, kTokens - 1);
  Read second(1, 70);
  const certkv_read reads[] = {first.read, second.read};
  certkv_read_result results[] = {first.result, second.result};
  ASSERT_EQ(certkv_attention_attend(attention_, reads, 2, results), CERTKV_OK)
      << certkv_error_message();
  EXPECT_EQ(Check(first), "");
  EXPECT_EQ(Check(second), "");
  EXPECT_EQ(results[1].status, CERTKV_OK);
  EXPECT_EQ(results[0].is_in_process, 0);
  EXPECT_EQ(second.certificates[5].layer, 1);
  EXPECT_EQ(second.certificates[5].query_head, 5);
  EXPECT_EQ(second.certificates[5].query_position, 70);
}

TEST_P(CApiTest, GateCountsWhatWasRead) {
  Open();
  Read read(0, kTokens - 1);
  ASSERT_EQ(certkv_attention_attend(attention_, &read.read, 1, &read.result), CERTKV_OK);
  ASSERT_EQ(certkv_request_flush(request_), CERTKV_OK) << certkv_error_message();
  certkv_risk risk = {.struct_size = sizeof(risk)};
  ASSERT_EQ(certkv_request_get_risk(request_, &risk), CERTKV_OK) << certkv_error_message();
  EXPECT_EQ(risk.read_count, 6);
  EXPECT_EQ(risk.is_closed, 0);
  EXPECT_GT(risk.max_worst_case_tv, 0);
  ASSERT_EQ(certkv_request_finish(request_, &risk), CERTKV_OK) << certkv_error_message();
  EXPECT_EQ(risk.is_closed, 1);
}

TEST_P(CApiTest, AFailedReadHasItsReasonAndNoNumbers) {
  Open();
  Read good(0, kTokens - 1);
  Read bad(0, 100000);
  const certkv_read reads[] = {good.read, bad.read};
  certkv_read_result results[] = {good.result, bad.result};
  EXPECT_EQ(certkv_attention_attend(attention_, reads, 2, results), CERTKV_INVALID_ARGUMENT);
  EXPECT_STREQ(certkv_error_reason(), "POSITION_OUTSIDE");
  EXPECT_EQ(results[0].status, CERTKV_OK);
  EXPECT_EQ(Check(good), "");
  EXPECT_EQ(results[1].status, CERTKV_INVALID_ARGUMENT);
  EXPECT_STREQ(results[1].reason, "POSITION_OUTSIDE");
  EXPECT_THAT(results[1].message, HasSubstr("100000"));
  for (const float output : bad.outputs) EXPECT_TRUE(std::isnan(output));
}

TEST_P(CApiTest, BadArgumentsAreRefusedAndNothingIsWritten) {
  Open();
  Read read(0, kTokens - 1);
  const auto expect = [](certkv_status status, const char* reason, const char* text) {
    EXPECT_EQ(status, CERTKV_INVALID_ARGUMENT);
    EXPECT_STREQ(certkv_error_reason(), reason);
    EXPECT_THAT(certkv_error_message(), HasSubstr(text));
  };
  const auto attend = [&](const certkv_read& in, certkv_read_result out, int32_t count = 1) {
    return certkv_attention_attend(attention_, &in, count, &out);
  };
  expect(certkv_attention_attend(nullptr, &read.read, 1, &read.result), "ARGUMENT_MISSING",
         "attention is NULL");
  expect(certkv_attention_attend(attention_, nullptr, 1, &read.result), "ARGUMENT_MISSING",
         "reads is NULL");
  expect(certkv_attention_attend(attention_, &read.read, 1, nullptr), "ARGUMENT_MISSING",
         "results is NULL");
  expect(attend(read.read, read.result, 0), "READ_INVALID", "read_count is 0");
  expect(attend(read.read, read.result, -5), "READ_INVALID", "read_count is -5");
  expect(attend(read.read, read.result, 2147483647), "READ_INVALID", "read_count is 2147483647");
  certkv_read in = read.read;
  in.queries = nullptr;
  expect(attend(in, read.result), "ARGUMENT_MISSING", "reads[0].queries is NULL");
  in = read.read;
  in.struct_size = 8;
  expect(attend(in, read.result), "STRUCT_SIZE_INVALID", "reads[0] has struct_size 8");
  certkv_read_result out = read.result;
  out.outputs = nullptr;
  expect(attend(read.read, out), "ARGUMENT_MISSING", "results[0].outputs is NULL");
  out = read.result;
  out.certificate_size = 0;
  expect(attend(read.read, out), "STRUCT_SIZE_INVALID", "certificate_size 0");
  const certkv_read uneven[] = {read.read, {}};
  certkv_read_result results[] = {read.result, read.result};
  expect(certkv_attention_attend(attention_, uneven, 2, results), "STRUCT_SIZE_INVALID",
         "reads[1] has struct_size 0");
  EXPECT_EQ(read.outputs[0], 123.0f);
  EXPECT_EQ(read.certificates[0].outcome, 0);
}

TEST_P(CApiTest, BadSequencesAreRefused) {
  Open();
  const auto expect = [](certkv_status status, const char* reason, const char* text) {
    EXPECT_EQ(status, CERTKV_INVALID_ARGUMENT);
    EXPECT_STREQ(certkv_error_reason(), reason);
    EXPECT_THAT(certkv_error_message(), HasSubstr(text));
  };
  const int32_t* ids = data_.token_ids.data();
  std::vector<certkv_layer_kv> layers = LayersAt(0);
  certkv_sequence* sequence = nullptr;
  const auto put = [&](int64_t token_count, int32_t layer_count) {
    return certkv_worker_put_sequence(worker_, ids, token_count, layers.data(), layer_count,
                                      &sequence);
  };
  expect(put(0, 2), "SEQUENCE_INVALID", "token_count is 0");
  expect(put(-1, 2), "SEQUENCE_INVALID", "token_count is -1");
  expect(put(int64_t{1} << 62, 2), "SEQUENCE_INVALID", "must be in [1, 16777216]");
  expect(put(10, 3), "SEQUENCE_INVALID", "of 3 layers");
  expect(put(10, -2), "SEQUENCE_INVALID", "of -2 layers");
  layers[1].values = nullptr;
  expect(put(10, 2), "ARGUMENT_MISSING", "layers[1].values is NULL");
  expect(certkv_worker_put_sequence(nullptr, ids, 10, layers.data(), 2, &sequence),
         "ARGUMENT_MISSING", "worker is NULL");
  expect(certkv_worker_lookup(worker_, nullptr, 10, &sequence), "ARGUMENT_MISSING",
         "token_ids is NULL");
  expect(certkv_worker_lookup(worker_, ids, 10, nullptr), "ARGUMENT_MISSING", "sequence is NULL");
  expect(certkv_sequence_write_layer(sequence_, 7, LayersAt(0).data()), "SEQUENCE_INVALID",
         "no token has begun");
  expect(certkv_request_open(&options_, "no spaces", nullptr, &request_), "REQUEST_ID_INVALID", "");
  EXPECT_EQ(sequence, nullptr);
}

TEST_P(CApiTest, TokensAreAppendedAndFillBlocks) {
  Open();
  // The tail of 8 becomes a block with 56 more; half of them layer by layer.
  for (int32_t token = kTokens; token < kTokens + 60; ++token) {
    const std::vector<certkv_layer_kv> layers = LayersAt(token);
    if (token % 2 == 0) {
      ASSERT_EQ(certkv_sequence_append(sequence_, data_.token_ids[token], layers.data(), 2),
                CERTKV_OK)
          << certkv_error_message();
    } else {
      ASSERT_EQ(certkv_sequence_begin_token(sequence_, data_.token_ids[token]), CERTKV_OK);
      for (int32_t layer = 0; layer < 2; ++layer) {
        ASSERT_EQ(certkv_sequence_write_layer(sequence_, layer, &layers[layer]), CERTKV_OK);
      }
      ASSERT_EQ(certkv_sequence_finish_token(sequence_), CERTKV_OK) << certkv_error_message();
    }
  }
  EXPECT_EQ(certkv_attention_refresh(attention_), CERTKV_OK) << certkv_error_message();
  certkv_sequence_info info = {.struct_size = sizeof(info)};
  ASSERT_EQ(certkv_sequence_get_info(sequence_, &info), CERTKV_OK);
  EXPECT_EQ(info.token_count, kTokens + 60);
  EXPECT_EQ(info.block_count, 4);
  EXPECT_EQ(info.tail_token_count, 4);
  EXPECT_EQ(certkv_sequence_check_lease(sequence_), CERTKV_OK);
  Read read(1, kTokens + 59);
  ASSERT_EQ(certkv_attention_attend(attention_, &read.read, 1, &read.result), CERTKV_OK)
      << certkv_error_message();
  EXPECT_EQ(Check(read), "");
}

TEST_P(CApiTest, BlocksAreSharedPinnedAndCounted) {
  Open();
  certkv_sequence* found = nullptr;
  ASSERT_EQ(certkv_worker_lookup(worker_, data_.token_ids.data(), kTokens, &found), CERTKV_OK);
  certkv_sequence_info info = {.struct_size = sizeof(info)};
  ASSERT_EQ(certkv_sequence_get_info(found, &info), CERTKV_OK);
  EXPECT_EQ(info.token_count, 192);
  EXPECT_EQ(info.shared_block_count, 3);
  EXPECT_EQ(info.tail_token_count, 0);
  EXPECT_EQ(certkv_sequence_pin(found, 1, 60000), CERTKV_OK) << certkv_error_message();
  EXPECT_EQ(certkv_sequence_pin(found, 0, 0), CERTKV_OK) << certkv_error_message();
  certkv_sequence_close(found);
  certkv_store_stats stats = {.struct_size = sizeof(stats)};
  ASSERT_EQ(certkv_get_store_stats(&options_, &stats), CERTKV_OK) << certkv_error_message();
  EXPECT_EQ(stats.blocks_sealed, 3);
  EXPECT_GE(stats.lookup_blocks_found, 3);
  EXPECT_GE(stats.session_count, 1);
}

TEST_P(CApiTest, WithoutGateReadsAreExact) {
  Open();
  certkv_request* alone = nullptr;
  certkv_attention* attention = nullptr;
  ASSERT_EQ(certkv_request_open_ungoverned("alone", &alone), CERTKV_OK);
  ASSERT_EQ(certkv_attention_open(sequence_, alone, &attention), CERTKV_OK);
  Read read(0, kTokens - 1);
  ASSERT_EQ(certkv_attention_attend(attention, &read.read, 1, &read.result), CERTKV_OK);
  EXPECT_EQ(read.result.is_in_process, 1);
  for (const certkv_certificate& c : read.certificates) EXPECT_EQ(c.outcome, CERTKV_EXACT);
  EXPECT_EQ(Check(read), "");
  certkv_risk risk = {.struct_size = sizeof(risk)};
  EXPECT_EQ(certkv_request_get_risk(alone, &risk), CERTKV_FAILED_PRECONDITION);
  EXPECT_STREQ(certkv_error_reason(), "REQUEST_UNGOVERNED");
  certkv_request_close(alone);
  certkv_attention_close(attention);
}

TEST_P(CApiTest, GateLearnsOfOutputsThatWereUsedOtherwise) {
  Open();
  Read read(0, kTokens - 1);
  ASSERT_EQ(certkv_attention_attend(attention_, &read.read, 1, &read.result), CERTKV_OK);
  ASSERT_EQ(certkv_attention_check_used(attention_, &read.read, &read.result, read.outputs.data()),
            CERTKV_OK)
      << certkv_error_message();
  read.outputs[3] += 1000;
  ASSERT_EQ(certkv_attention_check_used(attention_, &read.read, &read.result, read.outputs.data()),
            CERTKV_OK);
  ASSERT_EQ(certkv_request_flush(request_), CERTKV_OK);
  certkv_risk risk = {.struct_size = sizeof(risk)};
  ASSERT_EQ(certkv_request_get_risk(request_, &risk), CERTKV_OK);
  EXPECT_EQ(risk.canary_checks, 12);
  EXPECT_EQ(risk.canary_mismatches, 1);
  read.result.status = CERTKV_DATA_LOSS;
  EXPECT_EQ(certkv_attention_check_used(attention_, &read.read, &read.result, read.outputs.data()),
            CERTKV_INVALID_ARGUMENT);
  EXPECT_STREQ(certkv_error_reason(), "READ_INVALID");
}

TEST_P(CApiTest, ThreadsShareHandlesAndKeepTheirErrorsApart) {
  Open();
  std::vector<std::thread> threads;
  threads.reserve(4);
  std::vector<std::string> wrong(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this, i, &wrong] {
      for (int round = 0; round < 20; ++round) {
        const bool fails = i % 2 == 1;
        Read read(round % 2, fails ? 100000 + i : kTokens - 1);
        const certkv_status status =
            certkv_attention_attend(attention_, &read.read, 1, &read.result);
        const std::string message = certkv_error_message();
        if (fails && message.find(std::to_string(100000 + i)) == std::string::npos) {
          wrong[i] = "another's error: " + message;
        }
        if (!fails && (status != CERTKV_OK || !message.empty())) wrong[i] = message;
        if (!fails && status == CERTKV_OK) wrong[i] += Check(read);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& what : wrong) EXPECT_EQ(what, "");
}

TEST_P(CApiTest, AStoreThatIsGoneIsAnErrorAndHandlesStillClose) {
  Open();
  cluster_->Kill(ClusterService::kStore);
  certkv_store_stats stats = {.struct_size = sizeof(stats)};
  EXPECT_EQ(certkv_get_store_stats(&options_, &stats), CERTKV_UNAVAILABLE);
  EXPECT_STRNE(certkv_error_message(), "");
  certkv_worker* worker = nullptr;
  EXPECT_EQ(certkv_worker_attach(&options_, &spec_, &worker), CERTKV_UNAVAILABLE);
  EXPECT_EQ(worker, nullptr);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CApiTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
