#include <algorithm>
#include <map>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/paged_rows.h"

namespace certkv::cuda {
namespace {

constexpr int kPagedThreads = 256;
constexpr int kPieceElements = 8;  // of 2 bytes: 16 bytes

// Eight codes as originals.
__device__ uint4 OriginalsOf(uint32_t low, uint32_t high, const uint16_t* bits) {
  const auto pair = [bits](uint32_t codes) {
    return uint32_t{bits[codes & 255]} | uint32_t{bits[codes >> 8 & 255]} << 16;
  };
  uint4 out;
  out.x = pair(low);
  out.y = pair(low >> 16);
  out.z = pair(high);
  out.w = pair(high >> 16);
  return out;
}

// Grid: (rows, heads). A thread reads 16 bytes at a time, neighbours side by side, and writes them;
// of codes it writes twice as many.
__global__ void __launch_bounds__(kPagedThreads) CopyRows(const PagedRows* all) {
  CERTKV_SHARED(uint16_t[256], bits);
  const PagedRows& rows = all[blockIdx.x];
  const int64_t head = blockIdx.y;
  const bool is_code = rows.bits_of_code != nullptr;
  if (is_code) bits[ThreadIndex()] = rows.bits_of_code[ThreadIndex()];
  __syncthreads();
  const int piece = is_code ? 2 * kPieceElements : kPieceElements;
  const int pieces = rows.channel_count / piece;
  uint16_t* const out = rows.out + head * rows.out_head_stride;
  for (int n = ThreadIndex(); n < rows.token_count * pieces; n += kPagedThreads) {
    const int token = n / pieces;
    const int channel = n % pieces * piece;
    const int64_t at = rows.first_token + token;
    const int64_t place = rows.pages[at / rows.page_tokens] * rows.page_stride +
                          head * rows.head_stride + rows.token_places[at % rows.page_tokens] +
                          rows.channel_places[channel];
    uint4* const to = reinterpret_cast<uint4*>(out + int64_t{token} * rows.channel_count + channel);
    if (is_code) {
      const uint4 codes =
          *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(rows.base) + place);
      to[0] = OriginalsOf(codes.x, codes.y, bits);
      to[1] = OriginalsOf(codes.z, codes.w, bits);
    } else {
      to[0] = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(rows.base) + place);
    }
  }
}
static_assert(kPagedThreads == 256, "a thread brings the bits of one code");

// Host tables on the device, each once.
class Tables {
 public:
  explicit Tables(DeviceMemory* memory) : memory_(memory) {}

  template <typename T>
  absl::Status Move(const T** table, int64_t count) {
    const void*& copy = copies_[*table];
    if (copy == nullptr && *table != nullptr) {
      CERTKV_ASSIGN_OR_RETURN(copy, memory_->Copy(*table, count));
    }
    *table = static_cast<const T*>(copy);
    return absl::OkStatus();
  }

 private:
  DeviceMemory* const memory_;
  std::map<const void*, const void*> copies_;
};

}  // namespace

int LaunchPagedRows(const PagedRows* rows, int32_t rows_count, int32_t head_count,
                    CUstream_st* stream) {
  if (rows_count == 0) return cudaSuccess;
  return LaunchKernel(CopyRows, dim3(rows_count, head_count), dim3(kPagedThreads), 0, stream, rows);
}

absl::Status CopyPagedRows(absl::Span<const PagedRows> rows) {
  DeviceMemory memory;
  Tables tables(&memory);
  // Blocks of one sequence have its table in common; it is copied as far as the last one reads.
  std::map<const int32_t*, int64_t> page_counts;
  for (const PagedRows& one : rows) {
    int64_t& count = page_counts[one.pages];
    count = std::max(count, (one.first_token + one.token_count - 1) / one.page_tokens + 1);
  }
  std::vector<PagedRows> moved(rows.begin(), rows.end());
  for (PagedRows& one : moved) {
    CERTKV_RETURN_IF_ERROR(tables.Move(&one.pages, page_counts[one.pages]));
    CERTKV_RETURN_IF_ERROR(tables.Move(&one.token_places, one.page_tokens));
    CERTKV_RETURN_IF_ERROR(tables.Move(&one.channel_places, one.channel_count));
    CERTKV_RETURN_IF_ERROR(tables.Move(&one.bits_of_code, 256));
  }
  CERTKV_ASSIGN_OR_RETURN(const PagedRows* const on_device,
                          memory.Copy(moved.data(), static_cast<int64_t>(moved.size())));
  const int error =
      LaunchPagedRows(on_device, static_cast<int32_t>(moved.size()), moved[0].head_count, nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "copying paged rows"));
  return memory.ReadBack();
}

}  // namespace certkv::cuda
