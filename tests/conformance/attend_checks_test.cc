// What the door of Attend refuses, before anything is computed.
#include <functional>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/quantize_tile.h"
#include "tests/conformance/sequence_case.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Scratch {
  float nan = kNan;
  std::vector<float> queries;
  std::vector<float> sinks;
  std::vector<AttendTile> tiles;
  std::vector<uint8_t> sources;
};

struct BadArgs {
  const char* name;
  const char* reason;
  const char* text;  // part of the message
  std::function<void(AttendArgs*, Scratch*)> change;
};

class AttendChecksTest : public ::testing::TestWithParam<BadArgs> {};

TEST_P(AttendChecksTest, RefusesTheArguments) {
  SequenceShape shape;
  shape.tile_count = 3;
  const SequenceCase sequence(shape, 1, Backend::kReference);
  AttendArgs args = sequence.args();
  ReadResult result(args);
  Scratch scratch;
  scratch.queries.assign(args.queries, args.queries + 3 * 64);
  scratch.sinks.assign(3, 0.5f);
  scratch.tiles.assign(args.tiles, args.tiles + 3);
  scratch.sources.assign(9, 0);
  args.queries = scratch.queries.data();
  args.tiles = scratch.tiles.data();
  GetParam().change(&args, &scratch);
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    const absl::Status status = Attend(backend, args, result.view(), nullptr);
    EXPECT_EQ(ReasonOf(status), GetParam().reason) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(GetParam().text));
  }
}

constexpr char kInvalid[] = "ATTEND_ARGS_INVALID";

INSTANTIATE_TEST_SUITE_P(
    Arguments, AttendChecksTest,
    ::testing::Values(BadArgs{"group_of_0", kInvalid, "group_size is 0",
                              [](AttendArgs* a, Scratch*) { a->group_size = 0; }},
                      BadArgs{"group_of_17", kInvalid, "[1, 16]",
                              [](AttendArgs* a, Scratch*) { a->group_size = 17; }},
                      BadArgs{"negative_tiles", kInvalid, "tile_count is -1",
                              [](AttendArgs* a, Scratch*) { a->tile_count = -1; }},
                      BadArgs{"long_tail", kInvalid, "tail_count is 1025",
                              [](AttendArgs* a, Scratch*) { a->tail_count = 1025; }},
                      BadArgs{"empty_range", kInvalid, "token_begin is 7",
                              [](AttendArgs* a, Scratch*) {
                                a->token_begin = 7;
                                a->token_end = 7;
                              }},
                      BadArgs{"negative_begin", kInvalid, "token_begin is -1",
                              [](AttendArgs* a, Scratch*) { a->token_begin = -1; }},
                      BadArgs{"end_past_the_tail", kInvalid, "token_end is 210",
                              [](AttendArgs* a, Scratch*) { a->token_end = 210; }},
                      BadArgs{"no_tail_keys", kInvalid, "tail_keys",
                              [](AttendArgs* a, Scratch*) { a->tail_keys = nullptr; }},
                      BadArgs{"short_key_stride", kInvalid, "tail_key_stride is 63",
                              [](AttendArgs* a, Scratch*) { a->tail_key_stride = 63; }},
                      BadArgs{"short_value_stride", kInvalid, "tail_value_stride is 0",
                              [](AttendArgs* a, Scratch*) { a->tail_value_stride = 0; }},
                      BadArgs{"logit_scale_of_0", kInvalid, "logit_scale",
                              [](AttendArgs* a, Scratch*) { a->logit_scale = 0; }},
                      BadArgs{"logit_scale_nan", kInvalid, "logit_scale",
                              [](AttendArgs* a, Scratch*) { a->logit_scale = kNan; }},
                      BadArgs{"soft_cap_negative", kInvalid, "soft_cap",
                              [](AttendArgs* a, Scratch*) { a->soft_cap = -1; }},
                      BadArgs{"soft_cap_infinite", kInvalid, "soft_cap",
                              [](AttendArgs* a, Scratch*) { a->soft_cap = kInfinity; }},
                      BadArgs{"unknown_dtype", kInvalid, "original_dtype",
                              [](AttendArgs* a, Scratch*) {
                                a->original_dtype = static_cast<OriginalDtype>(9);
                              }},
                      BadArgs{"query_nan", kInvalid, "head 1 of the group, channel 3",
                              [](AttendArgs*, Scratch* s) { s->queries[64 + 3] = kNan; }},
                      BadArgs{"query_infinite", kInvalid, "must be finite",
                              [](AttendArgs*, Scratch* s) { s->queries[0] = -kInfinity; }},
                      BadArgs{"sink_nan", kInvalid, "sink_logits[2]",
                              [](AttendArgs* a, Scratch* s) {
                                s->sinks[2] = kNan;
                                a->sink_logits = s->sinks.data();
                              }},
                      BadArgs{"sink_infinite", kInvalid, "sink_logits[0]",
                              [](AttendArgs* a, Scratch* s) {
                                s->sinks[0] = kInfinity;
                                a->sink_logits = s->sinks.data();
                              }},
                      BadArgs{"missing_scan", kInvalid, "tile 1",
                              [](AttendArgs*, Scratch* s) { s->tiles[1].scan = nullptr; }},
                      BadArgs{"misaligned_detail", kInvalid, "aligned",
                              [](AttendArgs*, Scratch* s) { s->tiles[2].detail += 16; }},
                      BadArgs{
                          "foreign_tile", "TILE_FORMAT_MISMATCH", "tile 2: ",
                          [](AttendArgs*, Scratch* s) { s->tiles[2].scan = s->tiles[1].detail; }},
                      BadArgs{"unknown_source", kInvalid, "tile_sources of head 0, tile 1 is 4",
                              [](AttendArgs* a, Scratch* s) {
                                s->sources[1] = 4;
                                a->tile_sources = s->sources.data();
                              }},
                      BadArgs{"missing_keys", "ORIGINAL_MISSING", "original keys of tile 0",
                              [](AttendArgs* a, Scratch* s) {
                                s->sources[3] = kSourceOriginalKeys;
                                s->tiles[0].original_keys = nullptr;
                                a->tile_sources = s->sources.data();
                              }},
                      BadArgs{"missing_values", "ORIGINAL_MISSING", "original values of tile 2",
                              [](AttendArgs* a, Scratch* s) {
                                s->sources[8] = kSourceOriginalValues;
                                s->tiles[2].original_values = nullptr;
                                a->tile_sources = s->sources.data();
                              }}),
    [](const auto& info) { return info.param.name; });

// A witness of other weights than the reader's proves nothing, so none is read.
TEST(AttendWeightsTest, RefusesOtherWitnessWeightsThanTheTilesHave) {
  const SequenceCase sequence(ShapeOfFormat("K6V4w1c"), 1, Backend::kReference);
  AttendArgs args = sequence.args();
  ReadResult result(args);
  std::vector<float> weights(args.witness_weights, args.witness_weights + 64);
  weights[63] *= 1.01f;
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    args.witness_weights = nullptr;
    absl::Status status = Attend(backend, args, result.view(), nullptr);
    EXPECT_EQ(ReasonOf(status), "ATTEND_ARGS_INVALID") << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("witness_weights is null"));
    args.witness_weights = weights.data();
    status = Attend(backend, args, result.view(), nullptr);
    EXPECT_EQ(ReasonOf(status), "TILE_FORMAT_MISMATCH") << status;
    EXPECT_THAT(std::string(status.message()),
                testing::HasSubstr("tile 0: tile header field key_check"));
  }
  const SequenceCase plain(ShapeOfFormat("K6V4w1"), 1, Backend::kReference);
  args = plain.args();
  args.witness_weights = weights.data();
  EXPECT_EQ(ReasonOf(Attend(Backend::kCpu, args, result.view(), nullptr)), "ATTEND_ARGS_INVALID");
}

}  // namespace
}  // namespace certkv::conformance
