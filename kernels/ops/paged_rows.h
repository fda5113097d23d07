// Copies rows of a sequence out of an engine's pages into the order of originals, in one pass.
//
// out[head][token][channel] = the number at
//   base + page * page_stride + head * head_stride + token_places[row] + channel_places[channel],
// where page = pages[(first_token + token) / page_tokens] and row is the remainder; of 1-byte
// elements bits_of_code[element]. Bits are moved, never rounded.
#ifndef CERTKV_KERNELS_OPS_PAGED_ROWS_H_
#define CERTKV_KERNELS_OPS_PAGED_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace certkv {

// Keys or values of one layer and some tokens. Strides and places are in elements. Borrowed until
// the call returns; `out` doesn't overlap what is read.
struct PagedRows {
  const void* base;               // of elements of 2 bytes, or of 1 with bits_of_code
  int64_t page_stride;            // >= 0
  int64_t head_stride;            // >= 0
  const int32_t* token_places;    // [page_tokens]
  const int32_t* channel_places;  // [channel_count]
  const uint16_t* bits_of_code;   // [256] what a 1-byte element is as an original; null: 2 bytes
  const int32_t* pages;           // of tokens 0, page_tokens, 2 * page_tokens, ... of the table
  uint16_t* out;                  // [head_count][token_count][channel_count], heads apart:
  int64_t out_head_stride;        // elements, >= token_count * channel_count
  int64_t first_token;            // >= 0, of the table
  int32_t token_count;            // >= 1
  int32_t page_tokens;            // >= 1
  int32_t head_count;             // >= 1
  int32_t channel_count;          // >= 1
  // Places come in runs of so many that follow each other by 1 (RunOfPlaces).
  int32_t token_run;
  int32_t channel_run;
};

// Host memory, on this thread. Addresses and pages were checked where the cache was described and
// the table was given (clients/cpp/paged_cache.h).
// Threads: concurrent calls are safe when their outputs differ.
void CopyPagedRows(const PagedRows& rows);

// The same where `base` and `out` are addresses of the process's device: device memory, and pinned
// host memory; all else is host memory. One launch for all, on the default stream; returns when it
// is done, after whatever was queued there before.
// Errors: InvalidArgument [PAGED_CACHE_INVALID], channels don't come in aligned runs of 16 bytes,
//         nor `out`; FailedPrecondition [DEVICE_MISSING]; ResourceExhausted [DEVICE_MEMORY_FULL];
//         Internal [DEVICE_FAILED]. Nothing may be used of `out` then.
absl::Status CopyPagedRowsOnDevice(absl::Span<const PagedRows> rows);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_PAGED_ROWS_H_
