#include "clients/cpp/paged_cache.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

constexpr const char* kPartNames[2] = {"keys", "values"};

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "PAGED_CACHE_INVALID", message);
}

absl::Status Unexpected(absl::string_view what, int64_t seen, int64_t expected) {
  return Invalid(absl::StrCat("the engine's cache has ", seen, " ", what, ", the spec has ",
                              expected,
                              "; pass the tensors of this model's cache, or its own CacheSpec"));
}

// Places are in a run of `element_count` elements, and no sum of two leaves it.
absl::Status CheckPlaces(const PageOrder& order, int64_t element_count, const char* what) {
  if (!order.token_places.empty() && !order.channel_places.empty()) {
    const auto [token_min, token_max] =
        std::minmax_element(order.token_places.begin(), order.token_places.end());
    const auto [channel_min, channel_max] =
        std::minmax_element(order.channel_places.begin(), order.channel_places.end());
    if (*token_min >= 0 && *channel_min >= 0 &&
        int64_t{*token_max} + *channel_max < element_count) {
      return absl::OkStatus();
    }
  }
  return Invalid(absl::StrCat("the order of ", what, " has ", order.token_places.size(),
                              " token and ", order.channel_places.size(),
                              " channel places; there must be some of both, and their sums in [0, ",
                              element_count, "), the length of axis E"));
}

}  // namespace

PagedCache::PagedCache(const CacheSpec& spec) : spec_(spec), digest_(DigestCacheSpec(spec)) {}

absl::Status PagedCache::ReadOrders(const PagedCacheOptions& options, int part,
                                    const PagedAxes& axes) {
  PageOrder order = axes.order;
  if (axes.element_count > 0) {
    order = part == 0 ? options.key_order : options.value_order;
    CERTKV_RETURN_IF_ERROR(CheckPlaces(order, axes.element_count, kPartNames[part]));
  }
  const int64_t channels = part == 0 ? spec_.head_dim : spec_.value_dim;
  if (static_cast<int64_t>(order.channel_places.size()) != channels) {
    return Unexpected(absl::StrCat("channels of ", kPartNames[part]),
                      static_cast<int64_t>(order.channel_places.size()), channels);
  }
  if (axes.head_count != spec_.kv_head_count) {
    return Unexpected("KV heads", axes.head_count, spec_.kv_head_count);
  }
  if (!orders_[part].token_places.empty() && orders_[part] != order) {
    return Invalid(absl::StrCat("tensors of ", kPartNames[part],
                                " have their pages in different orders; all layers must have one"));
  }
  orders_[part] = std::move(order);
  const bool is_first = page_count_ == 0;
  if (!is_first && (axes.page_count != page_count_ ||
                    orders_[part].token_places.size() != orders_[0].token_places.size())) {
    return Invalid(absl::StrCat("a tensor has ", axes.page_count, " pages of ",
                                orders_[part].token_places.size(), " tokens, the first has ",
                                page_count_, " of ", orders_[0].token_places.size(),
                                "; one block table must do for all"));
  }
  page_count_ = axes.page_count;
  return absl::OkStatus();
}

absl::Status PagedCache::ReadTensors(const PagedCacheOptions& options) {
  const bool has_layers = absl::StrContains(options.axes, "L");
  const bool has_parts = absl::StrContains(options.axes, "K");
  const size_t expected = (has_layers ? 1 : spec_.layers.size()) * (has_parts ? 1 : 2);
  if (options.tensors.size() != expected) {
    return Invalid(absl::StrCat("the engine's cache has ", options.tensors.size(),
                                " tensors, must have ", expected, " for ", spec_.layer_count(),
                                " layers and axes '", options.axes, "'"));
  }
  planes_.resize(2 * spec_.layers.size());
  for (size_t i = 0; i < options.tensors.size(); ++i) {
    CERTKV_ASSIGN_OR_RETURN(const PagedAxes axes,
                            ReadPagedAxes(options.axes, options.tensors[i], options.dtype));
    const auto layers = static_cast<int64_t>(axes.planes.size()) / (has_parts ? 2 : 1);
    const int64_t expected_layers = has_layers ? spec_.layer_count() : 1;
    if (layers != expected_layers) return Unexpected("layers", layers, expected_layers);
    for (size_t p = 0; p < axes.planes.size(); ++p) {
      const size_t part = has_parts ? p % 2 : i % 2;
      const size_t layer = has_layers ? (has_parts ? p / 2 : p) : (has_parts ? i : i / 2);
      CERTKV_RETURN_IF_ERROR(ReadOrders(options, static_cast<int>(part), axes));
      planes_[2 * layer + part] = axes.planes[p];
    }
  }
  std::vector<PlacedPlane> placed;
  for (size_t i = 0; i < planes_.size(); ++i) placed.push_back({planes_[i], &orders_[i % 2]});
  return CheckPlanesApart(placed, page_count_, spec_.kv_head_count,
                          PagedElementBytes(options.dtype));
}

absl::Status PagedCache::ReadScales(const PagedCacheOptions& options) {
  if (options.dtype != PagedDtype::kFp8E4m3) {
    const bool is_f16 = options.dtype == PagedDtype::kF16;
    if (is_f16 != (spec_.original_dtype == OriginalDtype::kF16)) {
      return Invalid(absl::StrCat("the engine's cache is ", is_f16 ? "float16" : "bfloat16",
                                  ", the spec's originals aren't; make the spec with "
                                  "original_dtype of the cache"));
    }
    if (options.key_scales.empty() && options.value_scales.empty()) return absl::OkStatus();
    return Invalid("scales are for FP8 caches; leave them out of a 16-bit one");
  }
  for (int32_t layer = 0; layer < spec_.layer_count(); ++layer) {
    for (const auto* scales : {&options.key_scales, &options.value_scales}) {
      const size_t count = scales->size();
      if (count != 1 && count != spec_.layers.size()) {
        return Invalid(absl::StrCat("an FP8 cache has ", count, " scales of ",
                                    kPartNames[scales == &options.key_scales ? 0 : 1],
                                    ", must have 1 or one for each of ", spec_.layer_count(),
                                    " layers"));
      }
      auto originals = ScaleE4m3((*scales)[count == 1 ? 0 : layer], spec_.original_dtype);
      if (!originals.ok()) {
        return WithContext(originals.status(), absl::StrCat("layer ", layer));
      }
      originals_.push_back(*originals);
    }
  }
  return absl::OkStatus();
}

absl::Status PagedCache::CheckDevice(const PagedCacheOptions& options) const {
  for (const PagedTensor& tensor : options.tensors) {
    int64_t last = 0;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      last += (tensor.shape[i] - 1) * tensor.strides[i];
    }
    const auto* const begin = static_cast<const uint8_t*>(tensor.data);
    const int64_t element_bytes = PagedElementBytes(options.dtype);
    for (const uint8_t* address : {begin, begin + last * element_bytes}) {
      CERTKV_ASSIGN_OR_RETURN(const int32_t device, options.runtime->DeviceOf(address));
      if (device == options.device) continue;
      return MakeError(
          absl::StatusCode::kFailedPrecondition, "DEVICE_NOT_HERE",
          absl::StrCat("the engine's cache at 0x", absl::Hex(reinterpret_cast<uintptr_t>(address)),
                       " is no memory of device ", options.device, " but of ", device,
                       " (-1: of none); pass the device that the tensor is on"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PagedCache>> PagedCache::Create(const CacheSpec& spec,
                                                               const PagedCacheOptions& options) {
  CERTKV_RETURN_IF_ERROR(ValidateCacheSpec(spec));
  std::unique_ptr<PagedCache> cache(new PagedCache(spec));
  cache->dtype_ = options.dtype;
  cache->runtime_ = options.runtime;
  cache->device_ = options.device;
  CERTKV_RETURN_IF_ERROR(cache->ReadTensors(options));
  CERTKV_RETURN_IF_ERROR(cache->ReadScales(options));
  if (options.runtime != nullptr) CERTKV_RETURN_IF_ERROR(cache->CheckDevice(options));
  for (int part = 0; part < 2; ++part) {
    cache->token_runs_[part] = RunOfPlaces(cache->orders_[part].token_places);
    cache->channel_runs_[part] = RunOfPlaces(cache->orders_[part].channel_places);
  }
  return cache;
}

absl::Status PagedCache::CheckTable(absl::Span<const int32_t> pages, int64_t first_token,
                                    int64_t token_count) const {
  const auto reach = static_cast<int64_t>(pages.size()) * page_tokens();
  if (!(first_token >= 0 && token_count >= 0 && token_count <= reach &&
        first_token <= reach - token_count)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BLOCK_TABLE_INVALID",
                     absl::StrCat("a block table of ", pages.size(), " pages has tokens 0 to ",
                                  reach, ", asked for ", token_count, " from ", first_token,
                                  "; pass the pages of the whole sequence"));
  }
  const int64_t begin = first_token / page_tokens();
  const int64_t end = (first_token + token_count + page_tokens() - 1) / page_tokens();
  for (int64_t i = begin; i < end; ++i) {
    if (pages[i] >= 0 && pages[i] < page_count_) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, "BLOCK_TABLE_INVALID",
                     absl::StrCat("entry ", i, " of a block table is page ", pages[i],
                                  ", the engine's cache has pages 0 to ", page_count_ - 1,
                                  "; pass the table that the engine has for the sequence"));
  }
  return absl::OkStatus();
}

PagedRows PagedCache::RowsOf(int32_t layer, int part) const {
  const PagedPlane& plane = planes_[2 * layer + part];
  PagedRows rows{};
  rows.base = plane.base;
  rows.page_stride = plane.page_stride;
  rows.head_stride = plane.head_stride;
  rows.token_places = orders_[part].token_places.data();
  rows.channel_places = orders_[part].channel_places.data();
  if (!originals_.empty()) rows.bits_of_code = originals_[2 * layer + part].data();
  rows.page_tokens = page_tokens();
  rows.head_count = spec_.kv_head_count;
  rows.channel_count = part == 0 ? spec_.head_dim : spec_.value_dim;
  rows.token_run = token_runs_[part];
  rows.channel_run = channel_runs_[part];
  return rows;
}

absl::Status PagedCache::CopyRows(absl::Span<const int32_t> pages, absl::Span<const SlotRows> slots,
                                  const SlabLayout& layout, uint8_t* base) const {
  std::vector<PagedRows> on_device;
  const int32_t other_head = std::min(1, spec_.kv_head_count - 1);
  for (const SlotRows& slot : slots) {
    for (int32_t layer = 0; layer < spec_.layer_count(); ++layer) {
      for (int part = 0; part < 2; ++part) {
        const auto offset = [&](int32_t head) {
          return part == 0 ? layout.key_offset(slot.slot, layer, head)
                           : layout.value_offset(slot.slot, layer, head);
        };
        PagedRows rows = RowsOf(layer, part);
        rows.pages = pages.data();
        rows.first_token = slot.first_token;
        rows.token_count = slot.token_count;
        rows.out = reinterpret_cast<uint16_t*>(base + offset(0));
        rows.out_head_stride = (offset(other_head) - offset(0)) / int64_t{sizeof(uint16_t)};
        if (is_on_device()) {
          on_device.push_back(rows);
        } else {
          CopyPagedRows(rows);
        }
      }
    }
  }
  if (!is_on_device()) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(runtime_->Use(device_));
  return CopyPagedRowsOnDevice(on_device);
}

}  // namespace certkv::client
