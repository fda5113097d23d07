#include "kernels/core/paged_tensor.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "PAGED_CACHE_INVALID", message);
}

// Beyond any memory; products of two stay within int64.
constexpr int64_t kStrideMax = int64_t{1} << 40;
constexpr int64_t kLengthMax = int64_t{1} << 22;
constexpr int64_t kPageTokensMax = 4096;

struct Axis {
  char letter;
  int64_t length;
  int64_t stride;
};

absl::Status CheckLetters(absl::string_view axes) {
  for (const char letter : axes) {
    if (absl::string_view("LKBHTDE").find(letter) == absl::string_view::npos) {
      return Invalid(absl::StrCat("axes are '", axes, "', and no axis is '", std::string(1, letter),
                                  "'; letters are L, K, B, H, T, D and E"));
    }
  }
  const auto count = [axes](char letter) { return std::count(axes.begin(), axes.end(), letter); };
  const bool has_order = count('E') == 1 && count('T') == 0 && count('D') == 0;
  const bool has_digits = count('E') == 0 && count('T') >= 1 && count('D') >= 1;
  if (count('B') == 1 && count('H') == 1 && count('L') <= 1 && count('K') <= 1 &&
      (has_order || has_digits)) {
    return absl::OkStatus();
  }
  return Invalid(absl::StrCat(
      "axes are '", axes,
      "'; B and H must come once, L and K at most once, and T and D at least once or E alone"));
}

// The axes of a letter, in their order.
std::vector<Axis> AxesOf(const std::vector<Axis>& axes, char letter) {
  std::vector<Axis> found;
  std::copy_if(axes.begin(), axes.end(), std::back_inserter(found),
               [letter](const Axis& axis) { return axis.letter == letter; });
  return found;
}

// Places of all numbers that the digits count, the highest digit first.
std::vector<int32_t> PlacesOf(const std::vector<Axis>& digits) {
  std::vector<int32_t> places = {0};
  for (const Axis& digit : digits) {
    std::vector<int32_t> longer;
    longer.reserve(places.size() * digit.length);
    for (const int32_t place : places) {
      for (int64_t i = 0; i < digit.length; ++i) {
        longer.push_back(static_cast<int32_t>(place + i * digit.stride));
      }
    }
    places = std::move(longer);
  }
  return places;
}

// Places are int32, and so are sums of a token's and a channel's.
absl::Status CheckDigits(absl::string_view axes, const std::vector<Axis>& all) {
  for (const char letter : {'T', 'D'}) {
    int64_t count = 1, reach = 0;
    for (const Axis& axis : AxesOf(all, letter)) {
      count = std::min(count * axis.length, kLengthMax);
      reach += (axis.length - 1) * axis.stride;
    }
    if (!(count <= kPageTokensMax && reach <= std::numeric_limits<int32_t>::max() / 2)) {
      return Invalid(absl::StrCat("axes ", std::string(1, letter), " of '", axes, "' count ", count,
                                  " over ", reach, " elements, at most ", kPageTokensMax,
                                  " over 2^30"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckAddresses(absl::string_view axes, const PagedTensor& tensor, int64_t extent_bytes,
                            int64_t element_bytes) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.data);
  if (address == 0 || address % element_bytes != 0) {
    return Invalid(absl::StrCat("a tensor of axes '", axes, "' is at 0x", absl::Hex(address),
                                ", must be at an address that is a multiple of its ", element_bytes,
                                " byte elements; pass the engine's own tensor"));
  }
  if (tensor.allocation == nullptr) return absl::OkStatus();
  const auto begin = reinterpret_cast<uintptr_t>(tensor.allocation);
  if (address >= begin && tensor.allocation_bytes >= 0 &&
      address - begin <= static_cast<uint64_t>(tensor.allocation_bytes) &&
      extent_bytes <= tensor.allocation_bytes - static_cast<int64_t>(address - begin)) {
    return absl::OkStatus();
  }
  return Invalid(absl::StrCat("a tensor of axes '", axes, "' has elements in ", extent_bytes,
                              " bytes from 0x", absl::Hex(address), ", outside its allocation of ",
                              tensor.allocation_bytes, " bytes at 0x", absl::Hex(begin),
                              "; check shape and strides (in elements)"));
}

// A run of elements of a page that lie side by side, in bytes from the lowest plane.
struct Run {
  int64_t first;
  int32_t plane;
};

// All runs of `length` elements of the first page of the planes.
std::vector<Run> RunsOf(absl::Span<const PlacedPlane> planes, int64_t head_count,
                        int64_t element_bytes, int32_t length) {
  const auto* const lowest = static_cast<const uint8_t*>(
      std::min_element(planes.begin(), planes.end(), [](auto& a, auto& b) {
        return std::less<>()(a.plane.base, b.plane.base);
      })->plane.base);
  std::vector<Run> runs;
  for (size_t p = 0; p < planes.size(); ++p) {
    const auto& [plane, order] = planes[p];
    const int64_t base = static_cast<const uint8_t*>(plane.base) - lowest;
    const bool by_channel = RunOfPlaces(order->channel_places) % length == 0;
    const auto& inner = by_channel ? order->channel_places : order->token_places;
    const auto& outer = by_channel ? order->token_places : order->channel_places;
    for (int64_t head = 0; head < head_count; ++head) {
      for (const int32_t place : outer) {
        for (size_t i = 0; i < inner.size(); i += length) {
          const int64_t at = head * plane.head_stride + place + inner[i];
          runs.push_back({base + at * element_bytes, static_cast<int32_t>(p)});
        }
      }
    }
  }
  return runs;
}

// Elements of the runs that all of these planes are made of.
int32_t CommonRun(absl::Span<const PlacedPlane> planes) {
  int32_t length = 0;
  for (const PlacedPlane& placed : planes) {
    length = std::gcd(length, std::max(RunOfPlaces(placed.order->channel_places),
                                       RunOfPlaces(placed.order->token_places)));
  }
  return length;
}

absl::Status Overlap(int32_t one, int32_t two) {
  return Invalid(absl::StrCat("plane ", one, " and plane ", two,
                              " (2 * layer, and 1 more for values) have numbers at one address, "
                              "perhaps in different pages; check strides and the order of axes"));
}

// The same for planes whose memory interleaves, which have one page stride. `indices` are their
// places in the list that is checked.
absl::Status CheckGroupApart(absl::Span<const PlacedPlane> planes,
                             absl::Span<const int32_t> indices, int64_t page_count,
                             int64_t head_count, int64_t element_bytes) {
  if (page_count > 1 && planes[0].plane.page_stride == 0) return Overlap(indices[0], indices[0]);
  const int32_t length = CommonRun(planes);
  std::vector<Run> runs = RunsOf(planes, head_count, element_bytes, length);
  const int64_t period = page_count > 1 ? planes[0].plane.page_stride * element_bytes : 0;
  // Runs of two pages meet when they do modulo the period. Cut into grains that are either one or
  // have nothing in common, that is when they are equal.
  int64_t grain = std::gcd(length * element_bytes, period);
  for (const Run& run : runs) grain = std::gcd(grain, run.first);
  const int64_t grains_of_run = length * element_bytes / grain;
  std::vector<std::pair<int64_t, Run>> grains;  // place in a page, and its run's first byte
  grains.reserve(runs.size() * grains_of_run);
  for (const Run& run : runs) {
    for (int64_t i = 0; i < grains_of_run; ++i) {
      const int64_t first = run.first + i * grain;
      grains.push_back(
          {period > 0 ? first % period : first, {period > 0 ? first / period : 0, run.plane}});
    }
  }
  std::sort(grains.begin(), grains.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, a.second.first) < std::pair(b.first, b.second.first);
  });
  for (size_t i = 1; i < grains.size(); ++i) {
    const auto& [place, run] = grains[i - 1];
    const auto& [next_place, next_run] = grains[i];
    if (place == next_place && next_run.first - run.first < page_count) {
      return Overlap(indices[run.plane], indices[next_run.plane]);
    }
  }
  return absl::OkStatus();
}

// First and last byte of a plane.
std::pair<uintptr_t, uintptr_t> ExtentOf(const PlacedPlane& placed, int64_t page_count,
                                         int64_t head_count, int64_t element_bytes) {
  const auto& [plane, order] = placed;
  const auto base = reinterpret_cast<uintptr_t>(plane.base);
  const int64_t last =
      (page_count - 1) * plane.page_stride + (head_count - 1) * plane.head_stride +
      *std::max_element(order->token_places.begin(), order->token_places.end()) +
      *std::max_element(order->channel_places.begin(), order->channel_places.end());
  return {base, base + (last + 1) * element_bytes - 1};
}

// The tensor's axes, and the element with the highest address.
absl::StatusOr<std::pair<std::vector<Axis>, int64_t>> CheckedAxes(absl::string_view axes,
                                                                  const PagedTensor& tensor) {
  CERTKV_RETURN_IF_ERROR(CheckLetters(axes));
  if (tensor.shape.size() != axes.size() || tensor.strides.size() != axes.size()) {
    return Invalid(absl::StrCat("a tensor of axes '", axes, "' has the shape (",
                                absl::StrJoin(tensor.shape, ", "), ") and ", tensor.strides.size(),
                                " strides; one length and stride for each letter"));
  }
  std::vector<Axis> all;
  int64_t last = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    const Axis axis = {axes[i], tensor.shape[i], tensor.strides[i]};
    if (!(axis.length >= 1 && axis.length <= kLengthMax && axis.stride >= 0 &&
          axis.stride <= kStrideMax)) {
      return Invalid(absl::StrCat("axis ", axes.substr(i, 1), " of '", axes, "' has length ",
                                  axis.length, " and stride ", axis.stride,
                                  ", must be in [1, 2^22] and [0, 2^40] elements"));
    }
    all.push_back(axis);
    last += (axis.length - 1) * axis.stride;
    if (last > kStrideMax) {
      return Invalid(absl::StrCat("a tensor of axes '", axes, "' spans ", last,
                                  " elements, at most 2^40; check its strides"));
    }
  }
  return std::pair(std::move(all), last);
}

}  // namespace

absl::StatusOr<PagedAxes> ReadPagedAxes(absl::string_view axes, const PagedTensor& tensor,
                                        PagedDtype dtype) {
  CERTKV_ASSIGN_OR_RETURN(const auto checked, CheckedAxes(axes, tensor));
  const auto& [all, last] = checked;
  const int64_t element_bytes = PagedElementBytes(dtype);
  CERTKV_RETURN_IF_ERROR(CheckAddresses(axes, tensor, (last + 1) * element_bytes, element_bytes));

  const auto one = [&all = checked.first](char letter) {
    const std::vector<Axis> found = AxesOf(all, letter);
    return found.empty() ? Axis{letter, 1, 0} : found[0];
  };
  PagedAxes out;
  out.page_count = one('B').length;
  out.head_count = one('H').length;
  const Axis elements = one('E');
  if (axes.find('E') != absl::string_view::npos) {
    if (elements.stride != 1) {
      return Invalid(
          absl::StrCat("axis E of '", axes, "' has stride ", elements.stride, ", must be 1"));
    }
    out.element_count = elements.length;
  } else {
    CERTKV_RETURN_IF_ERROR(CheckDigits(axes, all));
    out.order = {PlacesOf(AxesOf(all, 'T')), PlacesOf(AxesOf(all, 'D'))};
  }
  const Axis layers = one('L'), parts = one('K');
  if (axes.find('K') != absl::string_view::npos && parts.length != 2) {
    return Invalid(absl::StrCat("axis K of '", axes, "' has length ", parts.length,
                                ", must be 2: keys, then values"));
  }
  for (int64_t layer = 0; layer < layers.length; ++layer) {
    for (int64_t part = 0; part < parts.length; ++part) {
      const int64_t first = layer * layers.stride + part * parts.stride;
      out.planes.push_back({static_cast<const uint8_t*>(tensor.data) + first * element_bytes,
                            one('B').stride, one('H').stride});
    }
  }
  return out;
}

absl::Status CheckPlanesApart(absl::Span<const PlacedPlane> planes, int64_t page_count,
                              int64_t head_count, int64_t element_bytes) {
  // Planes whose extents meet, one group after the other.
  std::map<std::pair<uintptr_t, uintptr_t>, std::vector<int32_t>> by_extent;
  for (size_t i = 0; i < planes.size(); ++i) {
    by_extent[ExtentOf(planes[i], page_count, head_count, element_bytes)].push_back(
        static_cast<int32_t>(i));
  }
  std::vector<int32_t> group;
  uintptr_t end = 0;
  const auto check = [&]() {
    std::vector<PlacedPlane> members;
    for (const int32_t index : group) {
      members.push_back(planes[index]);
      if (planes[index].plane.page_stride != planes[group[0]].plane.page_stride) {
        return Overlap(group[0], index);
      }
    }
    return CheckGroupApart(members, group, page_count, head_count, element_bytes);
  };
  for (const auto& [extent, indices] : by_extent) {
    if (!group.empty() && extent.first > end) {
      CERTKV_RETURN_IF_ERROR(check());
      group.clear();
    }
    group.insert(group.end(), indices.begin(), indices.end());
    end = std::max(end, extent.second);
  }
  return group.empty() ? absl::OkStatus() : check();
}

int32_t RunOfPlaces(const std::vector<int32_t>& places) {
  int32_t run = 0;
  size_t begin = 0;
  for (size_t i = 1; i <= places.size(); ++i) {
    if (i < places.size() && places[i] == places[i - 1] + 1) continue;
    run = std::gcd(run, static_cast<int32_t>(i - begin));
    begin = i;
  }
  return std::max(run, 1);
}

}  // namespace certkv
