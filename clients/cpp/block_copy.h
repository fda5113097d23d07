// Copies of leased blocks, for engines that keep a cache of their own and compute attention from
// it. What was copied is checked as a read is, but carries no certificate of what is made of it.
#ifndef CERTKV_CLIENTS_CPP_BLOCK_COPY_H_
#define CERTKV_CLIENTS_CPP_BLOCK_COPY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "clients/cpp/worker.h"

namespace certkv::client {

enum class BlockSource {
  kOriginal,   // the bits that were put
  kQuantized,  // what the device tier decodes to, rounded to the nearest number of original_dtype
};

// Copies block `block` of the sequence into `out`: the block's original records one after the
// other, layer by layer, KV head by KV head: keys [block_tokens][d], then values
// [block_tokens][d_v]. Every tile's checksums and identity are compared, those of originals over
// the copy itself. On an error `out` holds nothing that may be used.
// Errors: InvalidArgument [READ_INVALID], no such block; FailedPrecondition [LEASE_LOST];
//         Aborted [BLOCK_REUSED]; DataLoss, stored bytes changed.
// Threads: concurrent calls are safe when their outputs differ. Doesn't wait for the store.
absl::Status CopyBlock(const Worker& worker, const Sequence& sequence, int64_t block,
                       BlockSource source, uint16_t* out);

// Elements of `out`.
int64_t BlockElements(const CacheSpec& spec);

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_BLOCK_COPY_H_
