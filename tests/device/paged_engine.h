// A cache that an engine owns: tensors of random numbers in any order of axes, and what CertKV
// should make of them, number by number.
#ifndef CERTKV_TESTS_DEVICE_PAGED_ENGINE_H_
#define CERTKV_TESTS_DEVICE_PAGED_ENGINE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "clients/cpp/paged_cache.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"

namespace certkv {

struct PagedEngineShape {
  std::string axes = "KBTHD";
  PagedDtype dtype = PagedDtype::kF16;
  int32_t page_tokens = 16;
  int32_t page_count = 24;
};

class PagedEngine {
 public:
  // Keys and values are small finite numbers, of which no two neighbours are alike. With a runtime
  // the tensors are memory of its device 0.
  PagedEngine(const CacheSpec& spec, const PagedEngineShape& shape, uint32_t seed,
              DeviceRuntime* runtime = nullptr)
      : spec_(spec), shape_(shape), runtime_(runtime) {
    std::mt19937 random(seed);
    numbers_.resize(2 * spec.layers.size());
    for (size_t plane = 0; plane < numbers_.size(); ++plane) {
      const int32_t channels = plane % 2 == 0 ? spec.head_dim : spec.value_dim;
      numbers_[plane].resize(int64_t{shape.page_count} * spec.kv_head_count * shape.page_tokens *
                             channels);
      for (uint16_t& number : numbers_[plane]) number = Draw(&random);
      key_scales_.push_back(std::ldexp(1.0f, static_cast<int>(plane) - 3));
    }
    pages_.resize(shape.page_count);
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), random);
    Lay();
  }
  ~PagedEngine() {
    for (uint8_t* const memory : memories_) {
      if (runtime_ == nullptr) {
        delete[] memory;
      } else {
        runtime_->Free(memory);
      }
    }
  }
  PagedEngine(const PagedEngine&) = delete;
  PagedEngine& operator=(const PagedEngine&) = delete;

  // Describes it; a test may break it.
  client::PagedCacheOptions options;

  // All pages in random order.
  std::vector<int32_t>& pages() { return pages_; }
  const CacheSpec& spec() const { return spec_; }

  // The original of a number of a sequence that lies in pages().
  uint16_t OriginalAt(int32_t layer, int part, int64_t token, int32_t head, int32_t channel) const {
    const int32_t channels = part == 0 ? spec_.head_dim : spec_.value_dim;
    const int64_t page = pages_[token / shape_.page_tokens];
    const int64_t row = token % shape_.page_tokens;
    const uint16_t number =
        numbers_[2 * layer + part]
                [((page * spec_.kv_head_count + head) * shape_.page_tokens + row) * channels +
                 channel];
    if (shape_.dtype != PagedDtype::kFp8E4m3) return number;
    const float scale = key_scales_[2 * layer + part];
    return FloatToOriginal(spec_.original_dtype, E4m3ToFloat(static_cast<uint8_t>(number)) * scale);
  }
  // Rows [tokens][kv heads][channels] of a layer, as Worker::PutSequence takes them.
  std::vector<uint16_t> RowsOf(int32_t layer, int part, int64_t token_count) const {
    std::vector<uint16_t> rows;
    for (int64_t token = 0; token < token_count; ++token) {
      for (int32_t head = 0; head < spec_.kv_head_count; ++head) {
        for (int32_t c = 0; c < (part == 0 ? spec_.head_dim : spec_.value_dim); ++c) {
          rows.push_back(OriginalAt(layer, part, token, head, c));
        }
      }
    }
    return rows;
  }
  // The memory of a tensor.
  uint8_t* memory(size_t tensor) { return memories_[tensor]; }

 private:
  // A finite number of the dtype, as bits or as a code.
  uint16_t Draw(std::mt19937* random) const {
    const float number = std::uniform_real_distribution<float>(-4, 4)(*random);
    switch (shape_.dtype) {
      case PagedDtype::kF16:
        return FloatToF16(number);
      case PagedDtype::kBf16:
        return FloatToBf16(number);
      case PagedDtype::kFp8E4m3:
        return FloatToE4m3(number * 64);
    }
    return 0;
  }

  // Digits of an axis that comes several times; of one that comes once the whole.
  std::vector<int64_t> LengthsOf(char letter, int64_t length) const {
    const auto count = std::count(shape_.axes.begin(), shape_.axes.end(), letter);
    if (count < 2) return {length};
    const int64_t last = letter == 'T' || absl::StrContains(shape_.axes, "TDTD") ? 2 : 16;
    return {length / last, last};
  }

  // Makes the tensors and puts every number where the axes say.
  void Lay() {
    const std::string& axes = shape_.axes;
    const bool has_layers = absl::StrContains(axes, "L"), has_parts = absl::StrContains(axes, "K");
    options.axes = axes;
    options.dtype = shape_.dtype;
    options.runtime = runtime_;
    if (shape_.dtype == PagedDtype::kFp8E4m3) {
      for (size_t plane = 0; plane < key_scales_.size(); ++plane) {
        (plane % 2 == 0 ? options.key_scales : options.value_scales).push_back(key_scales_[plane]);
      }
    }
    MakeOrders();
    const int32_t layers = spec_.layer_count();
    for (int32_t layer = 0; layer < (has_layers ? 1 : layers); ++layer) {
      for (int part = 0; part < (has_parts ? 1 : 2); ++part) {
        LayTensor(has_layers ? -1 : layer, has_parts ? -1 : part);
      }
    }
  }

  // For E: keys channel by channel, values backwards.
  void MakeOrders() {
    if (!absl::StrContains(shape_.axes, "E")) return;
    const int32_t tokens = shape_.page_tokens;
    for (int32_t t = 0; t < tokens; ++t) {
      options.key_order.token_places.push_back(t);
      options.value_order.token_places.push_back((tokens - 1 - t) * spec_.value_dim);
    }
    for (int32_t c = 0; c < spec_.head_dim; ++c) {
      options.key_order.channel_places.push_back(c * tokens);
    }
    for (int32_t c = 0; c < spec_.value_dim; ++c) {
      options.value_order.channel_places.push_back(spec_.value_dim - 1 - c);
    }
  }

  void LayTensor(int32_t only_layer, int only_part) {
    const std::string& axes = shape_.axes;
    const int32_t channels = only_part == 1 ? spec_.value_dim : spec_.head_dim;
    std::map<char, std::vector<int64_t>> lengths = {
        {'L', {spec_.layer_count()}},
        {'K', {2}},
        {'B', {shape_.page_count}},
        {'H', {spec_.kv_head_count}},
        {'T', LengthsOf('T', shape_.page_tokens)},
        {'D', LengthsOf('D', channels)},
        {'E', {int64_t{shape_.page_tokens} * channels}}};
    PagedTensor tensor;
    std::map<char, size_t> seen;
    for (const char letter : axes) tensor.shape.push_back(lengths[letter][seen[letter]++]);
    tensor.strides.resize(axes.size());
    int64_t count = 1;
    for (size_t i = axes.size(); i-- > 0;) {
      tensor.strides[i] = count;
      count *= tensor.shape[i];
    }
    const bool has_order = absl::StrContains(axes, "E");
    const int64_t element_bytes = PagedElementBytes(shape_.dtype);
    uint8_t* memory = nullptr;
    if (runtime_ == nullptr) {
      memory = new uint8_t[count * element_bytes];
    } else {
      memory = static_cast<uint8_t*>(*runtime_->Allocate(0, count * element_bytes));
    }
    memories_.push_back(memory);
    // Every element of the tensor, one after the other, by what its indices say it is.
    std::vector<int64_t> index(axes.size(), 0);
    for (int64_t at = 0; at < count; ++at) {
      int64_t value[128] = {};
      for (size_t i = 0; i < axes.size(); ++i) {
        value[int{axes[i]}] = value[int{axes[i]}] * tensor.shape[i] + index[i];
      }
      const int part = only_part >= 0 ? only_part : static_cast<int>(value[int{'K'}]);
      const int64_t layer = only_layer >= 0 ? only_layer : value[int{'L'}];
      int64_t token = value[int{'T'}], channel = value[int{'D'}];
      if (has_order) {
        const int64_t e = value[int{'E'}];
        token = part == 0 ? e % shape_.page_tokens : shape_.page_tokens - 1 - e / spec_.value_dim;
        channel = part == 0 ? e / shape_.page_tokens : spec_.value_dim - 1 - e % spec_.value_dim;
      }
      const int64_t width = part == 0 ? spec_.head_dim : spec_.value_dim;
      const int64_t row =
          (value[int{'B'}] * spec_.kv_head_count + value[int{'H'}]) * shape_.page_tokens + token;
      const uint16_t number = numbers_[2 * layer + part][row * width + channel];
      // A device is host memory here.
      std::memcpy(memory + at * element_bytes, &number, element_bytes);
      for (size_t i = axes.size(); i-- > 0;) {
        if (++index[i] < tensor.shape[i]) break;
        index[i] = 0;
      }
    }
    tensor.data = memory;
    tensor.allocation = memory;
    tensor.allocation_bytes = count * element_bytes;
    options.tensors.push_back(tensor);
  }

  const CacheSpec spec_;
  const PagedEngineShape shape_;
  DeviceRuntime* const runtime_;
  std::vector<std::vector<uint16_t>>
      numbers_;                    // [layers][keys, values]: [page][head][row][channel]
  std::vector<float> key_scales_;  // of the same planes
  std::vector<int32_t> pages_;
  std::vector<uint8_t*> memories_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_DEVICE_PAGED_ENGINE_H_
