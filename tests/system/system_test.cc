// One suite for both shapes: certkvd, and three processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/request.h"
#include "clients/cpp/store_client.h"
#include "clients/cpp/worker.h"
#include "kernels/core/status.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::Attention;
using client::ReadRequest;
using client::ReadResult;
using client::Request;
using client::Sequence;
using client::StoreClient;
using client::Worker;
using ::testing::HasSubstr;

TEST_P(SystemTest, SecondWorkerSharesTheBlocksOfTheFirst) {
  StartCluster();
  const TestSequence data(SmallSpec(), 300, 1);
  const auto first = AttachWorker(data.spec, "first");
  const auto second = AttachWorker(data.spec, "second");
  const auto put = Put(*first, data);
  EXPECT_EQ(put->shared_block_count(), 0);
  EXPECT_EQ(put->blocks().size(), 4u);
  EXPECT_EQ(put->tail().token_count, 300 - 256);
  const auto shared = Put(*second, data);
  EXPECT_EQ(shared->shared_block_count(), 4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(shared->blocks()[i].device, put->blocks()[i].device);
    EXPECT_EQ(shared->blocks()[i].backing, put->blocks()[i].backing);
  }
}

TEST_P(SystemTest, TenantsWithDifferentSaltShareNothing) {
  StartCluster();
  const TestSequence data(SmallSpec(), 128, 1);
  const auto worker = AttachWorker(data.spec);
  const auto put = Put(*worker, data);
  client::Options options = cluster_->options();
  BlockKeyContext other = client::DefaultKeyContext(data.spec);
  other.tenant_salt = "tenant-b";
  const auto sequence = worker->PutSequence(data.token_ids, data.layers(), other);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ((*sequence)->shared_block_count(), 0);
}

TEST_P(SystemTest, ReadsAreCertifiedAndGateKnowsTheirRisk) {
  StartCluster();
  const TestSequence data(SmallSpec(), 500, 2);
  const auto worker = AttachWorker(data.spec);
  const auto sequence = Put(*worker, data);
  const auto request = OpenRequest("certified");
  auto attention = Attention::Open(*worker, *sequence, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  float worst = 0;
  int64_t certified_first = 0;
  for (uint32_t seed = 0; seed < 10; ++seed) {
    for (const ReadResult& result : ReadAndCheck(**attention, data, 500, seed)) {
      EXPECT_FALSE(result.in_process);
      for (const ReadCertificate& certificate : result.certificates) {
        // Random values are as hard as values get: a few reads repair them.
        EXPECT_LE(certificate.rung, Rung::kValues);
        if (certificate.rung == Rung::kNone) ++certified_first;
        EXPECT_GT(certificate.worst_case_tv, 0);
        worst = std::max(worst, certificate.worst_case_tv);
      }
    }
  }
  const auto risk = request->Close();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_EQ(risk->read_count, 10 * 2 * 6);
  EXPECT_GT(certified_first, 10 * 2 * 6 / 2);
  EXPECT_EQ(risk->reads_certified_first, certified_first);
  EXPECT_EQ(risk->reads_repaired_values, risk->read_count - certified_first);
  EXPECT_EQ(risk->max_worst_case_tv, worst);
  EXPECT_GE(risk->sum_worst_case_tv, worst);
  EXPECT_TRUE(risk->closed);
}

TEST_P(SystemTest, ReadsOutOfToleranceAreRepaired) {
  StartCluster();
  const TestSequence data(SmallSpec(KeyFormat::kK4), 500, 3);
  const auto worker = AttachWorker(data.spec);
  const auto sequence = Put(*worker, data);
  const auto request = OpenRequest("repaired", 0.01f);
  auto attention = Attention::Open(*worker, *sequence, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  int64_t repaired = 0;
  for (uint32_t seed = 0; seed < 5; ++seed) {
    for (const ReadResult& result : ReadAndCheck(**attention, data, 500, seed, 2.0f)) {
      for (const ReadCertificate& certificate : result.certificates) {
        if (certificate.rung == Rung::kNone) continue;
        ++repaired;
        EXPECT_GT(certificate.repair_bytes, 0);
        EXPECT_GT(certificate.first_worst_case_tv, 0.01f);
      }
    }
  }
  EXPECT_GT(repaired, 0);
  const auto risk = request->Close();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_EQ(risk->reads_repaired_values + risk->reads_repaired_keys + risk->reads_repaired_head +
                risk->reads_repaired_layer,
            repaired);
  EXPECT_GT(risk->risk_score, 0.01f);
  EXPECT_LE(risk->max_worst_case_tv, 0.01f + 0.01f);  // served: within tolerance, or exact
}

TEST_P(SystemTest, ASequenceGrowsTokenByTokenAcrossABlock) {
  StartCluster();
  const TestSequence data(SmallSpec(), 140, 4);
  const auto worker = AttachWorker(data.spec);
  TestSequence prefix(data.spec, 120, 4);
  // The same random stream gives other numbers for another length: take the prefix of `data`.
  prefix.token_ids.assign(data.token_ids.begin(), data.token_ids.begin() + 120);
  const BlockKeyContext context = client::DefaultKeyContext(data.spec);
  auto sequence = worker->PutSequence(prefix.token_ids, data.layers(), context);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  const auto request = OpenRequest("growing");
  auto attention = Attention::Open(*worker, **sequence, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  for (int64_t count = 121; count <= 140; ++count) {
    const std::vector<int32_t> ids(data.token_ids.begin(), data.token_ids.begin() + count);
    ASSERT_TRUE(worker->AppendToken(**sequence, ids, data.layers_at(count - 1), context).ok());
    ASSERT_TRUE((*attention)->Refresh().ok());
    ReadAndCheck(**attention, data, count, static_cast<uint32_t>(count));
  }
  EXPECT_EQ((*sequence)->blocks().size(), 2u);
  EXPECT_EQ((*sequence)->tail().token_count, 12);
}

TEST_P(SystemTest, ALeaseThatIsNotRenewedExpires) {
  StartCluster();
  const TestSequence data(SmallSpec(), 128, 5);
  const auto worker = AttachWorker(data.spec);
  const auto sequence = Put(*worker, data);
  client::Options options = cluster_->options();
  options.lease_duration_ms = 200;
  StoreClient store(options);
  const auto cache = store.RegisterCache(data.spec);
  ASSERT_TRUE(cache.ok()) << cache.status();
  const auto session = store.AttachWorker(cache->cache);
  ASSERT_TRUE(session.ok()) << session.status();
  const auto keys = ComputeBlockKeys(client::DefaultKeyContext(data.spec), data.token_ids, 64);
  const auto found = store.LookupAndLease(session->session, keys);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->blocks.size(), 2u);
  EXPECT_TRUE(store.RenewLease(session->session, found->lease).ok());
  absl::SleepFor(absl::Milliseconds(400));
  const auto renewed = store.RenewLease(session->session, found->lease);
  EXPECT_EQ(ReasonOf(renewed.status()), "LEASE_NOT_FOUND") << renewed.status();
  EXPECT_FALSE(store.RenewLease(session->session, LeaseId{12345}).ok());
}

TEST_P(SystemTest, ANanInAKeyIsRefusedAndNothingStays) {
  StartCluster();
  TestSequence data(SmallSpec(), 200, 6);
  data.keys[1][(100 * 2 + 1) * 64 + 7] = 0x7e00;  // token 100, KV head 1, channel 7
  const auto worker = AttachWorker(data.spec);
  const auto sequence =
      worker->PutSequence(data.token_ids, data.layers(), client::DefaultKeyContext(data.spec));
  ASSERT_FALSE(sequence.ok());
  EXPECT_EQ(sequence.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(sequence.status()), "NON_FINITE_KEY") << sequence.status();
  EXPECT_THAT(std::string(sequence.status().message()), HasSubstr("channel 7"));
  StoreClient store(cluster_->options());
  const auto stats = store.GetStats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->caches(0).device_slots_used(), 0);
  EXPECT_EQ(stats->caches(0).backing_slots_used(), 0);
  EXPECT_EQ(stats->lease_count(), 0);
}

TEST_P(SystemTest, AClientThatDiesInMidWriteLeavesNothing) {
  StartCluster();
  const TestSequence data(SmallSpec(), 256, 7);
  StoreClient store(cluster_->options());
  {
    // A session with reservations whose descriptor socket closes: what a killed client looks like.
    const auto worker = AttachWorker(data.spec, "doomed");
    const auto sequence = Put(*worker, data);
    ASSERT_NE(sequence, nullptr);
  }
  for (int i = 0; i < 200; ++i) {
    const auto stats = store.GetStats();
    ASSERT_TRUE(stats.ok());
    if (stats->session_count() == 0 && stats->lease_count() == 0) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  const auto stats = store.GetStats();
  EXPECT_EQ(stats->session_count(), 0);
  EXPECT_EQ(stats->lease_count(), 0);
  EXPECT_EQ(stats->caches(0).device_slots_used(), 4) << "sealed blocks stay";
}

TEST_P(SystemTest, ServersDrainToExitStatusZero) {
  StartCluster();
  const TestSequence data(SmallSpec(), 128, 8);
  {
    const auto worker = AttachWorker(data.spec);
    const auto sequence = Put(*worker, data);
  }
  EXPECT_TRUE(cluster_->Stop().ok());
}

INSTANTIATE_TEST_SUITE_P(Shapes, SystemTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
