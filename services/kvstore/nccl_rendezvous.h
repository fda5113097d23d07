// How two stores agree to meet in a communicator, and what one asks the other to send over it. The
// wire is service_rendezvous.h; tests have their own.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_RENDEZVOUS_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_RENDEZVOUS_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/boot_id.h"
#include "kernels/core/ids.h"
#include "kernels/ops/pair_communicator.h"
#include "services/kvstore/bulk_frame.h"

namespace certkv::kvstore {

// The store that wants blocks is rank 0, and made the id.
struct NcclOffer {
  CommunicatorId id{};
  int32_t version = 0;                    // of the library
  BootId boot{};                          // of the machine,
  std::array<uint8_t, 16> device_uuid{};  // and its GPU: the other end must be another one
  SpecDigest spec;
  std::string tenant;
  int64_t plane_bytes = 0;  // of a block
  int64_t original_bytes = 0;
  int64_t movement_bytes = 0;  // the most of one Send and Receive
};
struct NcclJoined {
  int64_t link_id = 0;
  int64_t movement_bytes = 0;  // what both use: at most what was offered
};

struct NcclAsk {
  int64_t link_id = 0;
  std::vector<BlockKey> keys;
  uint32_t parts = 0;
};

// Threads: all methods may be called concurrently. They block, for `timeout_ms` at most.
class NcclRendezvous {
 public:
  virtual ~NcclRendezvous() = default;

  // Has the peer join as rank 1. Errors: those of NcclServer::Join; Unavailable, it can't be
  // reached.
  virtual absl::StatusOr<NcclJoined> Join(const std::string& address, const NcclOffer& offer,
                                          int64_t timeout_ms) = 0;
  // Has it send what it has of the keys, up to the first that it lacks: the parts of each, one
  // block after the other, in movements of movement_bytes and the rest. Errors: those of
  // NcclServer::Send; Unavailable.
  virtual absl::StatusOr<std::vector<BulkBlock>> Send(const std::string& address,
                                                      const NcclAsk& ask, int64_t timeout_ms) = 0;
  // Ends what runs, with an error, and what comes after.
  virtual void Cancel() = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_RENDEZVOUS_H_
