// The tiles of one KV head's read: where they lie, and that they are what the view's handles name.
//
// The order makes it sound (a seqlock, slab_layout.h): Open compares the generations, everything is
// read, CheckUnchanged compares them again. What was read counts only when both succeed.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_TILES_H_
#define CERTKV_SERVICES_CERTIFIER_READ_TILES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/ops/attend.h"
#include "services/certifier/counters.h"
#include "services/certifier/read_plan.h"
#include "services/certifier/read_workspace.h"

namespace certkv::certifier {

// Borrows the plan, and the workspace's `tiles` and `original_held`, as long as it lives.
class ReadTiles {
 public:
  // `verify_always`: see ReadKernels::verify_every_read.
  ReadTiles(const ReadPlan& plan, int32_t kv_head, bool verify_always, CertifierCounters* counters,
            ReadWorkspace* workspace);

  // Fills workspace->tiles and checks every tile of the range: generation, identity tag, and, once
  // per generation or always, the checksums; and that the tail is finite.
  // Errors: Aborted [BLOCK_REUSED]; DataLoss [TILE_IDENTITY_MISMATCH], [SCAN_CHECKSUM],
  //         [DETAIL_CHECKSUM], [TILE_FORMAT_MISMATCH]; InvalidArgument [TAIL_NOT_FINITE];
  //         Unavailable [STORE_UNREACHABLE].
  absl::Status Open();

  // Makes the originals of a tile readable: present, of the handle's generation, and of the
  // checksum that the tile's header has. Does nothing when they are.
  // Errors: DataLoss [ORIGINAL_MISSING], [ORIGINAL_CHECKSUM_MISMATCH]; Aborted [BLOCK_REUSED].
  absl::Status HoldOriginal(int32_t tile);

  // After the last byte was read: was it all of the generations that the handles name?
  // Errors: Aborted [BLOCK_REUSED]; Unavailable [STORE_UNREACHABLE].
  absl::Status CheckUnchanged() const;

  // Why did reading fail? A slot that was reused meanwhile explains any error; then that is the
  // answer, since a retry with new handles helps.
  absl::Status Explain(const absl::Status& error) const;

  // The tail's rows, for AttendArgs.
  const uint16_t* tail_keys() const;
  const uint16_t* tail_values() const;

  // Bytes of a tile's original keys and of its values.
  int64_t original_key_bytes() const { return OriginalKeyBytes(plan_.cache->spec()); }
  int64_t original_value_bytes() const { return OriginalValueBytes(plan_.cache->spec()); }

 private:
  absl::Status OpenBlock(int32_t block);
  absl::Status VerifyBlock(int32_t block);
  absl::Status CheckTail() const;
  absl::Status CheckBlocks(bool with_backing) const;
  int32_t tile_of_block(int32_t block) const {
    return (block - plan_.first_block) * plan_.tiles_per_block();
  }

  const ReadPlan& plan_;
  const int32_t kv_head_;
  const bool verify_always_;
  CertifierCounters* const counters_;
  ReadWorkspace* const workspace_;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_TILES_H_
