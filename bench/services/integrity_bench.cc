// certkv-bench-integrity: what checksums cost. One thread, except where the store's pool is named.
//
//   seal    quantizing a tile, and reading it back with its originals (VerifyTile), per tile
//   scrub   StoreEngine::Scrub over a whole store, bytes of both tiers per second
//   reads   a certified read of 32,768 tokens with checksums verified once, and in every read
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "kernels/ops/quantize_tile.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/read_fixture.h"
#include "services/common/clock.h"
#include "tests/support/store_harness.h"

ABSL_FLAG(int32_t, rounds, 15, "rounds of each measurement; medians are reported");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

template <typename Call>
double MedianMs(const Call& call) {
  std::vector<double> times;
  for (int32_t i = 0; i < absl::GetFlag(FLAGS_rounds); ++i) {
    const int64_t start = RealClock()->MonotonicNs();
    call();
    times.push_back(static_cast<double>(RealClock()->MonotonicNs() - start) / 1e6);
  }
  return Median(times);
}

// Tiles of the store's own geometry, d 64 and d_v 64, K8V4.
nlohmann::json SealCost() {
  constexpr int kTiles = 512;
  const CacheSpec spec = TinySpec();
  const TileLayout layout = MakeTileLayout(spec, 0);
  const SlabLayout slab(spec, SlabKind::kBacking, 1);
  std::vector<uint8_t> originals(static_cast<size_t>(slab.slab_bytes()));
  FillOriginals(slab, spec, ChainKey(1, 0), 0, originals.data());
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> record(static_cast<size_t>(layout.tile_bytes() / 64));
  QuantizeTileArgs args{};
  args.spec = &spec;
  args.layout = &layout;
  args.keys = reinterpret_cast<const uint16_t*>(originals.data() + slab.key_offset(0, 0, 0));
  args.values = reinterpret_cast<const uint16_t*>(originals.data() + slab.value_offset(0, 0, 0));
  args.key_stride = spec.head_dim;
  args.value_stride = spec.value_dim;
  args.scan = record.data()->bytes;
  args.detail = args.scan + layout.scan_bytes;
  const double quantize_ms = MedianMs([&] {
    for (int i = 0; i < kTiles; ++i) {
      CERTKV_CHECK(QuantizeTile(Backend::kCpu, args).ok(), "the tile is quantized");
    }
  });
  const double verify_ms = MedianMs([&] {
    for (int i = 0; i < kTiles; ++i) {
      CERTKV_CHECK(VerifyTile(layout, args.scan, args.detail, args.keys, args.values).ok(),
                   "the tile is good");
    }
  });
  return {{"quantize_us_per_tile", quantize_ms * 1000 / kTiles},
          {"verify_us_per_tile", verify_ms * 1000 / kTiles},
          {"verify_share", verify_ms / quantize_ms}};
}

nlohmann::json ScrubRate() {
  StoreShape shape;
  shape.device_slots = 2048;
  shape.backing_slots = 2048;
  StoreHarness store(shape);
  auto worker = store.Attach("bench", 64);
  for (int32_t chain = 0; chain < 2048 / 64; ++chain) store.PutUnleased(worker, chain, 0, 64);
  int64_t bytes = 0;
  const double ms = MedianMs([&] {
    bytes = 0;
    for (int64_t more = store.engine.Scrub(1 << 24); more > 0; more = store.engine.Scrub(1 << 24)) {
      bytes += more;
    }
  });
  return {{"bytes", bytes}, {"gigabytes_per_second", static_cast<double>(bytes) / ms / 1e6}};
}

nlohmann::json ReadCost() {
  constexpr int64_t kTokens = 32'768;
  using certifier::ReadEngine;
  const CacheSpec spec = certifier::SmallSpec(1, 2, 4, 128);
  std::mt19937_64 random(1);
  certifier::FakeCache cache(spec, kTokens / 64);
  cache.Put(certifier::RandomSequence(spec, kTokens, 1.0f, &random));
  certifier::BudgetBook book(1);
  const auto view =
      cache.OpenView(certifier::TestLease({.tv_tolerance = 0.5f, .value_tolerance = 1.0f}), &book);
  certifier::ReadRequest request;
  request.query_position = kTokens - 1;
  const std::vector<float> queries = certifier::RandomQueries(spec, 1.0f, &random);
  request.queries = queries;
  certifier::CertifierCounters counters;
  certifier::ReadWorkspace workspace;
  std::vector<ReadCertificate> certificates(spec.query_head_count());
  std::vector<float> outputs(int64_t{spec.query_head_count()} * spec.value_dim);
  const auto read = [&](const ReadEngine& engine) {
    const auto plan = certifier::PlanRead(*view, request, 0);
    CERTKV_CHECK(plan.ok(), "the read is planned");
    const absl::Status status =
        engine.Read(*plan, &workspace, {absl::MakeSpan(certificates), absl::MakeSpan(outputs)});
    CERTKV_CHECK(status.ok(), "the read is certified");
  };
  certifier::ReadKernels kernels = certifier::KernelsOf(Backend::kCpu);
  const ReadEngine once(kernels, &counters);
  kernels.verify_every_read = true;
  const ReadEngine always(kernels, &counters);
  read(once);
  const double once_ms = MedianMs([&] { read(once); });
  const double always_ms = MedianMs([&] { read(always); });
  return {{"tokens", kTokens},
          {"kv_heads", spec.kv_head_count},
          {"query_heads", spec.query_head_count()},
          {"head_dim", spec.head_dim},
          {"verified_once_ms", once_ms},
          {"verified_every_read_ms", always_ms},
          {"extra_share", always_ms / once_ms - 1}};
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const nlohmann::json report = {{"run", certkv::bench::DescribeRun()},
                                 {"seal", certkv::bench::SealCost()},
                                 {"scrub", certkv::bench::ScrubRate()},
                                 {"reads", certkv::bench::ReadCost()}};
  std::printf("%s\n", report.dump(2).c_str());
  return certkv::bench::WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}
