// Clock, ids, log lines, errors and conversions.
#include <grpcpp/grpcpp.h>

#include <limits>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/common/clock.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/common/random_id.h"
#include "tests/support/fake_clock.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

TEST(ClockTest, RealClockMovesOn) {
  const int64_t begin_ns = RealClock()->MonotonicNs();
  const int64_t begin_ms = RealClock()->NowMs();
  EXPECT_GT(begin_ms, FakeClock::kStartMs);
  while (RealClock()->MonotonicNs() - begin_ns < 2'000'000) {
  }
  EXPECT_GT(RealClock()->NowMs(), begin_ms);
}

TEST(RandomIdTest, GivesPositiveIdsThatDiffer) {
  std::set<int64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const int64_t id = RandomId();
    ASSERT_GT(id, 0);
    seen.insert(id);
  }
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_NE(RandomBytes(16), RandomBytes(16));
}

TEST(LogTest, QuotesWhatWouldBreakTheLine) {
  EXPECT_EQ(FormatLogLine(LogLevel::kInfo, "opened", {{"port", 80}, {"name", "plain"}}),
            "level=info event=opened port=80 name=plain");
  EXPECT_EQ(
      FormatLogLine(LogLevel::kError, "e", {{"a", "two words"}, {"b", "x\ny=\"z\""}, {"c", ""}}),
      "level=error event=e a=\"two words\" b=\"x\\ny=\\\"z\\\"\" c=\"\"");
}

TEST(ErrorsTest, CodeReasonAndMessageSurviveTheWire) {
  const absl::Status status =
      MakeError(absl::StatusCode::kResourceExhausted, "STORE_FULL", "no room");
  const grpc::Status wire = ToGrpcStatus(status, "kvstore.certkv");
  EXPECT_EQ(wire.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(FromGrpcStatus(wire), status);
  type::ErrorDetail detail;
  ASSERT_TRUE(detail.ParseFromString(wire.error_details()));
  EXPECT_EQ(detail.domain(), "kvstore.certkv");
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus(), "x").ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(ErrorsTest, CutsLongMessages) {
  const absl::Status status = absl::InternalError(std::string(10000, 'x'));
  const grpc::Status wire = ToGrpcStatus(status, "gate.certkv");
  EXPECT_LE(wire.error_message().size(), kErrorMessageBytesMax);
  EXPECT_THAT(wire.error_message(), HasSubstr("(cut)"));
}

TEST(ErrorsTest, ReadsStatusesThatAreNotOurs) {
  EXPECT_EQ(ReasonOf(FromGrpcStatus({grpc::StatusCode::UNAVAILABLE, "down", "\xff garbage"})), "");
  // One beyond the last that gRPC names.
  EXPECT_EQ(FromGrpcStatus({static_cast<grpc::StatusCode>(17), "odd"}).code(),
            absl::StatusCode::kUnknown);
  type::ErrorDetail detail;
  detail.set_reason(std::string(500, 'R'));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(
                {grpc::StatusCode::INTERNAL, "long reason", detail.SerializeAsString()})),
            "");
}

CacheSpec SampleSpec() {
  CacheSpec spec;
  spec.model = "m";
  spec.kv_head_count = 3;
  spec.group_size = 3;
  spec.head_dim = 64;
  spec.value_dim = 80;
  spec.block_tokens = 128;
  spec.rope_pairing = RopePairing::kHalfSplit;
  spec.rotary_dim = 32;
  spec.rope_theta = 5e5f;
  spec.logit_scale = 0.125f;
  spec.soft_cap = 50;
  spec.original_dtype = OriginalDtype::kBf16;
  spec.layers = {{.key_format = KeyFormat::kFp8E4m3,
                  .value_format = ValueFormat::kV8,
                  .witness_bands = 4,
                  .fp8_key_scale = 0.5f,
                  .sliding_window = 100},
                 {}};
  for (int i = 0; i < spec.kv_head_count * spec.head_dim; ++i) {
    spec.layers[0].witness_weights.push_back(0.5f + 0.01f * static_cast<float>(i));
  }
  return spec;
}

TEST(ConvertTest, CacheSpecGoesThereAndBack) {
  const CacheSpec spec = SampleSpec();
  ASSERT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
  const auto back = CacheSpecFromProto(CacheSpecToProto(spec));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(DigestCacheSpec(*back), DigestCacheSpec(spec));  // covers every field
}

TEST(ConvertTest, CacheSpecZerosMeanDefaults) {
  type::CacheSpec proto = CacheSpecToProto(SampleSpec());
  proto.set_block_tokens(0);
  proto.set_rope_theta(0);
  proto.mutable_layers(0)->set_fp8_key_scale(0);
  const auto spec = CacheSpecFromProto(proto);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->block_tokens, 64);
  EXPECT_EQ(spec->rope_theta, 10000.0f);
  EXPECT_EQ(spec->layers[0].fp8_key_scale, 1.0f);
}

TEST(ConvertTest, CacheSpecRefusesUnknownEnumsAndNan) {
  const auto reason_after = [](auto change) {
    type::CacheSpec proto = CacheSpecToProto(SampleSpec());
    change(&proto);
    return ReasonOf(CacheSpecFromProto(proto).status());
  };
  // 257 is K8 when cut to a byte.
  EXPECT_EQ(reason_after([](type::CacheSpec* p) {
              p->mutable_layers(1)->set_key_format(static_cast<type::KeyFormat>(257));
            }),
            "CACHE_SPEC_INVALID");
  EXPECT_EQ(reason_after([](type::CacheSpec* p) {
              p->mutable_layers(1)->set_value_format(type::VALUE_FORMAT_UNSPECIFIED);
            }),
            "CACHE_SPEC_INVALID");
  EXPECT_EQ(reason_after([](type::CacheSpec* p) {
              p->set_original_dtype(type::ORIGINAL_DTYPE_UNSPECIFIED);
            }),
            "CACHE_SPEC_INVALID");
  EXPECT_EQ(reason_after([](type::CacheSpec* p) {
              p->set_rope_pairing(static_cast<type::RopePairing>(258));
            }),
            "CACHE_SPEC_INVALID");
  EXPECT_EQ(reason_after([](type::CacheSpec* p) {
              p->set_logit_scale(std::numeric_limits<float>::quiet_NaN());
            }),
            "CACHE_SPEC_INVALID");
  EXPECT_EQ(reason_after([](type::CacheSpec* p) {
              for (int i = 0; i < 300; ++i) p->add_layers();
            }),
            "CACHE_SPEC_INVALID");
  EXPECT_EQ(reason_after([](type::CacheSpec*) {}), "");
}

TEST(ConvertTest, BlockHandleGoesThereAndBack) {
  BlockHandle handle;
  handle.key.bytes[0] = 7;
  handle.device = {.slot = 3, .generation = 8};
  const auto back = BlockHandleFromProto(BlockHandleToProto(handle));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->key, handle.key);
  EXPECT_EQ(back->device, handle.device);
  EXPECT_FALSE(back->backing.present());
}

TEST(ConvertTest, BlockHandleWithoutASlotIsInNoTier) {
  type::BlockHandle proto;
  proto.set_block_key(std::string(32, 'k'));
  const auto handle = BlockHandleFromProto(proto);
  ASSERT_TRUE(handle.ok());
  EXPECT_FALSE(handle->device.present());
}

TEST(ConvertTest, BlockHandleRefusesForgeries) {
  type::BlockHandle proto = BlockHandleToProto(BlockHandle{});
  proto.set_block_key("short");
  EXPECT_EQ(ReasonOf(BlockHandleFromProto(proto).status()), "DIGEST_SIZE");
  const struct {
    int32_t slot;
    int64_t generation;
  } kForged[] = {{-2, 0}, {1, 3}, {1, -2}};
  for (const auto& forged : kForged) {
    proto = BlockHandleToProto(BlockHandle{});
    proto.mutable_backing()->set_slot(forged.slot);
    proto.mutable_backing()->set_generation(forged.generation);
    EXPECT_EQ(ReasonOf(BlockHandleFromProto(proto).status()), "HANDLE_INVALID")
        << forged.slot << " " << forged.generation;
  }
}

TEST(ConvertTest, PolicyLeaseGoesThereAndBack) {
  const PolicyLease lease{.request = "requests/a",
                          .lease_id = 5,
                          .read_mode = ReadMode::kObserve,
                          .tolerances = {0.1f, 0.01f, 2.0f},
                          .risk_mode = RiskMode::kCumulative,
                          .budget_slice = 1.5,
                          .expire_time_ms = 77,
                          .policy_version = 8,
                          .sequence = 9};
  const auto back = PolicyLeaseFromProto(PolicyLeaseToProto(lease, 0), 0);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(PolicyLeaseToProto(*back, 0).SerializeAsString(),
            PolicyLeaseToProto(lease, 0).SerializeAsString());
  type::PolicyLease bad = PolicyLeaseToProto(lease, 0);
  bad.set_read_mode(static_cast<type::ReadMode>(257));
  EXPECT_EQ(ReasonOf(PolicyLeaseFromProto(bad, 0).status()), "POLICY_LEASE_INVALID");
  bad = PolicyLeaseToProto(lease, 0);
  bad.mutable_tolerances()->set_tv_tolerance(std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(ReasonOf(PolicyLeaseFromProto(bad, 0).status()), "TOLERANCE_INVALID");
}

// Gate's clock and the reader's differ by an hour, either way.
TEST(ConvertTest, ALeaseHoldsAsLongByAnotherClock) {
  PolicyLease lease{.request = "requests/a",
                    .lease_id = 5,
                    .read_mode = ReadMode::kEnforce,
                    .tolerances = {0.1f, 0.01f, 2.0f},
                    .risk_mode = RiskMode::kThreshold,
                    .expire_time_ms = 1'000'000'500};
  for (const int64_t skew_ms : {int64_t{-3'600'000}, int64_t{0}, int64_t{3'600'000}}) {
    const type::PolicyLease sent = PolicyLeaseToProto(lease, 1'000'000'000);
    EXPECT_EQ(PolicyLeaseFromProto(sent, 1'000'000'000 + skew_ms)->expire_time_ms,
              1'000'000'500 + skew_ms);
  }
  // One that has expired stays so.
  const type::PolicyLease expired = PolicyLeaseToProto(lease, 1'000'000'600);
  EXPECT_EQ(PolicyLeaseFromProto(expired, 5000)->expire_time_ms, 4900);
  // A gate of before says when it ends and no more.
  type::PolicyLease old = PolicyLeaseToProto(lease, 1'000'000'000);
  old.clear_time_left_ms();
  EXPECT_EQ(PolicyLeaseFromProto(old, 5000)->expire_time_ms, lease.expire_time_ms);
  // One that never ends has nothing left to count.
  lease.expire_time_ms = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(PolicyLeaseFromProto(PolicyLeaseToProto(lease, 5), 5)->expire_time_ms,
            lease.expire_time_ms);
  old.set_time_left_ms(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(ReasonOf(PolicyLeaseFromProto(old, 5).status()), "POLICY_LEASE_INVALID");
}

TEST(ConvertTest, CertificateGoesThereAndBackWithInfiniteBounds) {
  const ReadCertificate certificate{.layer = 2,
                                    .query_head = 8,
                                    .query_position = 1000,
                                    .worst_case_tv = 0.25f,
                                    .value_term = 0.5f,
                                    .output_error_bound = std::numeric_limits<float>::infinity(),
                                    .value_radius = 3,
                                    .rung = Rung::kKeys,
                                    .outcome = Outcome::kCertified,
                                    .first_worst_case_tv = 0.75f,
                                    .repair_bytes = 4096,
                                    .read_tokens = 100,
                                    .skipped_tokens = 900,
                                    .read_bytes = 123456,
                                    .skipped_share = 0.125f};
  const auto back = ReadCertificateFromProto(ReadCertificateToProto(certificate));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(ReadCertificateToProto(*back).SerializeAsString(),
            ReadCertificateToProto(certificate).SerializeAsString());
  EXPECT_EQ(back->read_tokens, 100);
  EXPECT_EQ(back->skipped_tokens, 900);
  EXPECT_EQ(back->read_bytes, 123456);
  EXPECT_EQ(back->skipped_share, 0.125f);
}

TEST(ConvertTest, SkipTolerancesGoThereAndBackAndAreChecked) {
  type::Tolerances proto = TolerancesToProto({.tv_tolerance = 0.2f, .skip_tolerance = 0.05f});
  EXPECT_EQ(TolerancesFromProto(proto)->skip_tolerance, 0.05f);
  for (const float bad : {-0.1f, 1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    proto.set_skip_tolerance(bad);
    EXPECT_EQ(ReasonOf(TolerancesFromProto(proto).status()), "TOLERANCE_INVALID") << bad;
  }
}

TEST(ConvertTest, CertificateRefusesEveryFieldOutOfRange) {
  const auto message_after = [](auto change) {
    type::Certificate proto = ReadCertificateToProto(
        {.worst_case_tv = 0.1f, .outcome = Outcome::kCertified, .first_worst_case_tv = 0.1f});
    EXPECT_TRUE(ReadCertificateFromProto(proto).ok());
    change(&proto);
    const absl::Status status = ReadCertificateFromProto(proto).status();
    EXPECT_EQ(ReasonOf(status), "CERTIFICATE_INVALID");
    return std::string(status.message());
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  using C = type::Certificate;
  EXPECT_THAT(message_after([](C* c) { c->set_layer(-1); }), HasSubstr("layer is -1"));
  EXPECT_THAT(message_after([](C* c) { c->set_layer(256); }), HasSubstr("layer is 256"));
  EXPECT_THAT(message_after([](C* c) { c->set_query_head(4096); }), HasSubstr("query_head"));
  EXPECT_THAT(message_after([](C* c) { c->set_query_position(-1); }), HasSubstr("query_position"));
  EXPECT_THAT(message_after([](C* c) { c->set_worst_case_tv(kNan); }), HasSubstr("worst_case_tv"));
  EXPECT_THAT(message_after([](C* c) { c->set_worst_case_tv(1.01f); }), HasSubstr("1.01"));
  EXPECT_THAT(message_after([](C* c) { c->set_worst_case_tv(-0.1f); }), HasSubstr("-0.1"));
  EXPECT_THAT(message_after([](C* c) { c->set_first_worst_case_tv(kNan); }), HasSubstr("first_"));
  EXPECT_THAT(message_after([](C* c) { c->set_value_term(kNan); }), HasSubstr("value_term"));
  EXPECT_THAT(message_after([](C* c) { c->set_output_error_bound(kNan); }), HasSubstr("output_"));
  EXPECT_THAT(message_after([](C* c) { c->set_value_radius(-1); }), HasSubstr("value_radius"));
  EXPECT_THAT(message_after([](C* c) { c->set_rung(type::RUNG_UNSPECIFIED); }), HasSubstr("rung"));
  EXPECT_THAT(message_after([](C* c) { c->set_outcome(static_cast<type::Outcome>(9)); }),
              HasSubstr("outcome"));
  EXPECT_THAT(message_after([](C* c) { c->set_repair_bytes(-1); }), HasSubstr("repair_bytes"));
  EXPECT_THAT(message_after([](C* c) { c->set_skipped_tokens(-1); }), HasSubstr("skipped_tokens"));
  EXPECT_THAT(message_after([](C* c) { c->set_skipped_share(kNan); }), HasSubstr("skipped_share"));
}

}  // namespace
}  // namespace certkv
