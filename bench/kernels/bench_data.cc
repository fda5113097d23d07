#include "bench/kernels/bench_data.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::bench {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr uint64_t kSeed = 20240611;
constexpr uint64_t kDitherSecret = 0xbe2c4;  // of caches with dithered keys

}  // namespace

HugeBuffer::HugeBuffer(int64_t size_bytes) : mapping_bytes_(size_bytes + kHugePageBytes) {
  mapping_ =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CERTKV_CHECK(mapping_ != MAP_FAILED, "the machine has memory for the benchmark's working set");
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ =
      reinterpret_cast<uint8_t*>((address + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
  madvise(data_, size_bytes, MADV_HUGEPAGE);  // a wish; bench_report says what came of it
}

HugeBuffer::~HugeBuffer() { munmap(mapping_, mapping_bytes_); }

void FillOriginals(uint64_t seed, int32_t dim, std::vector<uint16_t>* keys,
                   std::vector<uint16_t>* values) {
  std::mt19937_64 random(kSeed + seed);
  std::normal_distribution<float> normal;
  keys->resize(kTileTokens * dim);
  values->resize(kTileTokens * dim);
  for (int t = 0; t < kTileTokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      const float spread = i % 16 == 3 ? 3.0f : 1.0f;
      const float centre = i % 8 == 1 ? 2.0f : 0.0f;
      (*keys)[t * dim + i] = FloatToF16(centre + spread * normal(random));
      (*values)[t * dim + i] = FloatToF16(normal(random));
    }
  }
}

SealedCache::SealedCache(const CacheSpec& spec, int32_t tile_count, int64_t bytes_min,
                         const FillTile& fill)
    : layout_(MakeTileLayout(spec, 0, kDitherSecret)),
      tile_count_(tile_count),
      head_count_(static_cast<int32_t>((bytes_min + head_bytes() - 1) / head_bytes())),
      buffer_(head_count_ * head_bytes()) {
  std::vector<uint16_t> keys;
  std::vector<uint16_t> values;
  heads_.resize(head_count_);
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    fill(tile, &keys, &values);
    QuantizeTileArgs args{};
    args.spec = &spec;
    args.layout = &layout_;
    args.keys = keys.data();
    args.values = values.data();
    args.witness_weights = WitnessWeightsOf(spec, 0, 0);
    args.key_stride = spec.head_dim;
    args.value_stride = spec.value_dim;
    for (int32_t h = 0; h < head_count_; ++h) {
      uint8_t* scans = buffer_.data() + h * head_bytes();
      uint8_t* scan = scans + tile * layout_.scan_bytes;
      uint8_t* detail = scans + tile_count * layout_.scan_bytes + tile * layout_.detail_bytes;
      if (h == 0) {
        args.scan = scan;
        args.detail = detail;
        CERTKV_CHECK(QuantizeTile(Backend::kCpu, args).ok(), "the benchmark's data can be sealed");
      } else {
        std::memcpy(scan, heads_[0][tile].scan, layout_.scan_bytes);
        std::memcpy(detail, heads_[0][tile].detail, layout_.detail_bytes);
      }
      heads_[h].push_back({scan, detail, nullptr, nullptr});
    }
  }
}

CacheSpec BenchSpec(KeyFormat key_format, ValueFormat value_format, int32_t dim, int32_t group_size,
                    int32_t witness_bands) {
  CacheSpec spec;
  spec.model = "bench";
  spec.kv_head_count = 1;
  spec.group_size = group_size;
  spec.head_dim = dim;
  spec.value_dim = dim;
  spec.rotary_dim = dim;
  spec.logit_scale = 1.0f / std::sqrt(static_cast<float>(dim));
  spec.layers.resize(1);
  spec.layers[0].key_format = key_format;
  spec.layers[0].value_format = value_format;
  spec.layers[0].witness_bands = witness_bands;
  CERTKV_CHECK(ValidateCacheSpec(spec).ok(), "the benchmark's specs are valid");
  return spec;
}

std::vector<float> BenchQueries(int32_t group_size, int32_t dim) {
  std::mt19937_64 random(kSeed + 1);
  std::normal_distribution<float> normal;
  std::vector<float> queries(group_size * dim);
  for (float& q : queries) q = normal(random);
  return queries;
}

}  // namespace certkv::bench
