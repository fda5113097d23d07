// Definition of kernels/ops/paged_rows.h.
#include "kernels/reference/reference.h"

namespace certkv::reference {

void CopyPagedRows(const PagedRows& rows) {
  for (int64_t head = 0; head < rows.head_count; ++head) {
    for (int64_t token = 0; token < rows.token_count; ++token) {
      const int64_t at = rows.first_token + token;
      const int64_t page = rows.pages[at / rows.page_tokens];
      for (int64_t channel = 0; channel < rows.channel_count; ++channel) {
        const int64_t place = page * rows.page_stride + head * rows.head_stride +
                              rows.token_places[at % rows.page_tokens] +
                              rows.channel_places[channel];
        uint16_t& out =
            rows.out[head * rows.out_head_stride + token * rows.channel_count + channel];
        out = rows.bits_of_code == nullptr
                  ? static_cast<const uint16_t*>(rows.base)[place]
                  : rows.bits_of_code[static_cast<const uint8_t*>(rows.base)[place]];
      }
    }
  }
}

}  // namespace certkv::reference
