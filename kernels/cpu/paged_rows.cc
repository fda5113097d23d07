// Moves what lies side by side at once: whole rows where channels follow each other, squares of
// eight tokens and channels where tokens do, single numbers otherwise.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/quantize_turn.h"

namespace certkv::cpu {
namespace {

// Tokens of one page and one head: rows [row, row + count) of the page go to `out`.
struct Part {
  const PagedRows& rows;
  const uint8_t* base;  // of page and head
  int32_t row;
  int32_t count;
  uint16_t* out;
};

constexpr int32_t kSquare = 8;

// Eight tokens of eight channels; `from[c]` are tokens of channel c.
inline void CopySquare(const uint16_t* const from[kSquare], uint16_t* out, int64_t out_stride) {
  Words8 x[kSquare];
#pragma GCC unroll 8
  for (int c = 0; c < kSquare; ++c) std::memcpy(&x[c], from[c], sizeof(x[c]));
  TurnSquare(x);
#pragma GCC unroll 8
  for (int t = 0; t < kSquare; ++t) std::memcpy(out + t * out_stride, &x[t], sizeof(x[t]));
}

void CopyNumbers(const Part& part, int32_t token_begin, int32_t token_end, int32_t channel_begin) {
  const PagedRows& rows = part.rows;
  const auto* const base = reinterpret_cast<const uint16_t*>(part.base);
  for (int32_t token = token_begin; token < token_end; ++token) {
    const uint16_t* const from = base + rows.token_places[part.row + token];
    uint16_t* const out = part.out + int64_t{token} * rows.channel_count;
    for (int32_t c = channel_begin; c < rows.channel_count; ++c) {
      out[c] = from[rows.channel_places[c]];
    }
  }
}

void CopyRows(const Part& part) {
  const PagedRows& rows = part.rows;
  const int64_t row_bytes = int64_t{2} * rows.channel_count;
  const int32_t* const places = rows.token_places + part.row;
  const auto* const from = part.base + int64_t{2} * rows.channel_places[0];
  // Rows that follow each other are one.
  for (int32_t token = 0; token < part.count;) {
    int32_t end = token + 1;
    while (end < part.count && places[end] == places[end - 1] + rows.channel_count) ++end;
    std::memcpy(part.out + int64_t{token} * rows.channel_count, from + int64_t{2} * places[token],
                (end - token) * row_bytes);
    token = end;
  }
}

void TurnRows(const Part& part) {
  const PagedRows& rows = part.rows;
  const auto* const base = reinterpret_cast<const uint16_t*>(part.base);
  // Squares don't cross the end of a run of tokens.
  const int32_t whole_channels = rows.channel_count / kSquare * kSquare;
  for (int32_t token = 0; token < part.count;) {
    const int32_t row = part.row + token;
    const int32_t left = std::min(part.count - token, rows.token_run - row % rows.token_run);
    const int32_t whole = left / kSquare * kSquare;
    for (int32_t square = 0; square < whole; square += kSquare) {
      for (int32_t c = 0; c < whole_channels; c += kSquare) {
        const uint16_t* from[kSquare];
        for (int32_t i = 0; i < kSquare; ++i) {
          from[i] = base + rows.token_places[row + square] + rows.channel_places[c + i];
        }
        CopySquare(from, part.out + int64_t{token + square} * rows.channel_count + c,
                   rows.channel_count);
      }
    }
    CopyNumbers(part, token, token + whole, whole_channels);
    CopyNumbers(part, token + whole, token + left, 0);
    token += left;
  }
}

void CopyCodes(const Part& part) {
  const PagedRows& rows = part.rows;
  for (int32_t token = 0; token < part.count; ++token) {
    const uint8_t* const from = part.base + rows.token_places[part.row + token];
    uint16_t* const out = part.out + int64_t{token} * rows.channel_count;
    if (rows.channel_run == rows.channel_count) {
      const uint8_t* const row = from + rows.channel_places[0];
      for (int32_t c = 0; c < rows.channel_count; ++c) out[c] = rows.bits_of_code[row[c]];
    } else {
      for (int32_t c = 0; c < rows.channel_count; ++c) {
        out[c] = rows.bits_of_code[from[rows.channel_places[c]]];
      }
    }
  }
}

}  // namespace

void CopyPagedRows(const PagedRows& rows) {
  const bool is_code = rows.bits_of_code != nullptr;
  const auto copy = is_code                                  ? CopyCodes
                    : rows.channel_run == rows.channel_count ? CopyRows
                    : rows.token_run >= kSquare
                        ? TurnRows
                        : [](const Part& part) { CopyNumbers(part, 0, part.count, 0); };
  const int64_t element_bytes = is_code ? 1 : 2;
  // Page by page, so that a page's heads are read while it is near.
  for (int32_t done = 0; done < rows.token_count;) {
    const int64_t at = rows.first_token + done;
    const auto row = static_cast<int32_t>(at % rows.page_tokens);
    const int32_t count = std::min(rows.token_count - done, rows.page_tokens - row);
    const int64_t page = rows.pages[at / rows.page_tokens];
    for (int64_t head = 0; head < rows.head_count; ++head) {
      const int64_t first = page * rows.page_stride + head * rows.head_stride;
      copy({rows, static_cast<const uint8_t*>(rows.base) + first * element_bytes, row, count,
            rows.out + head * rows.out_head_stride + int64_t{done} * rows.channel_count});
    }
    done += count;
  }
}

}  // namespace certkv::cpu
