// What Worker's source files share.
#ifndef CERTKV_CLIENTS_CPP_WORKER_IMPL_H_
#define CERTKV_CLIENTS_CPP_WORKER_IMPL_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "clients/cpp/certifier_link.h"
#include "clients/cpp/device_staging.h"
#include "clients/cpp/lease_keeper.h"
#include "clients/cpp/paged_cache.h"
#include "clients/cpp/store_client.h"
#include "clients/cpp/worker.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"

namespace certkv::client {

inline constexpr int32_t kSealBatchBlocks = 32;  // blocks written and sealed per call

absl::Status SequenceInvalid(absl::string_view message);

// Fills reserved slots with rows of a sequence, all or says why not.
using SlotWriter = std::function<absl::Status(absl::Span<const SlotRows>)>;

struct Worker::Impl {
  Impl(const Options& resolved, const CacheSpec& cache_spec, const RegisteredCache& cache,
       const AttachedSession& attached, std::unique_ptr<StoreClient> client)
      : options(resolved),
        spec(cache_spec),
        digest(cache.digest),
        tenant_salt(cache.tenant_salt),
        session(attached),
        store(std::move(client)),
        certifier_balancer(MakeCertifierBalancer(options)),
        device_layout(spec, SlabKind::kDevice, cache.device_slot_count),
        backing_layout(spec, SlabKind::kBacking, cache.backing_slot_count),
        staging_layout(spec, SlabKind::kStaging, attached.staging_slot_count),
        keeper(options.lease_duration_ms,
               [this](LeaseId lease) { return store->RenewLease(session.session, lease); }) {}

  // Keys that name no salt get the tenant's.
  BlockKeyContext Salted(BlockKeyContext context) const {
    if (context.tenant_salt.empty()) context.tenant_salt = tenant_salt;
    return context;
  }
  absl::Status MapSlabs();
  absl::Status CheckInputs(absl::Span<const int32_t> token_ids,
                           const BlockKeyContext& key_context) const;
  absl::Status CheckLayers(absl::Span<const LayerKv> layers) const;
  // Copies tokens [first, first + count) of `layers` into rows [row, row + count) of a slot.
  void WriteStaging(int32_t slot, int64_t first, int32_t count, int32_t row,
                    absl::Span<const LayerKv> layers);

  // Reserves a slot for each of `rows` and has `write` fill them; on an error nothing stays
  // reserved. `waits`: for slots, as the options say.
  absl::StatusOr<FilledSlots> FillSlots(std::vector<SlotRows> rows, const SlotWriter& write,
                                        bool waits = true);
  // The same with rows of an engine's pages. Whole blocks go to the slots on the store's GPU where
  // the pages are on it; a tail is read from the mapped ones.
  absl::StatusOr<FilledSlots> FillPaged(const std::vector<SlotRows>& rows, const PagedCache& cache,
                                        absl::Span<const int32_t> pages, bool waits = true);
  // Was that the GPU's failure, of slots on it? Then there are none any more, and who has the pages
  // goes on with mapped ones.
  bool FallsToHost(const absl::Status& status, bool was_on_device) const;
  // Pins the staging slab for the kernels of `cache`'s device, once.
  absl::Status PinStaging(const PagedCache& cache);

  // Copies one token of one layer into a row of a slot.
  void WriteRow(int32_t slot, int32_t layer, int32_t row, const LayerKv& kv, int64_t token);

  const Options options;
  const CacheSpec spec;
  const SpecDigest digest;
  const std::string tenant_salt;
  const AttachedSession session;
  const std::unique_ptr<StoreClient> store;
  const std::shared_ptr<grpc::Channel> certifier_balancer;
  SlabLayout device_layout;
  const SlabLayout backing_layout;
  const SlabLayout staging_layout;
  UniqueFd socket;  // the session lives while it is open
  Mapping device;
  Mapping backing;
  Mapping staging;
  std::unique_ptr<DeviceStaging> on_device;  // of `staging`; ends before the session does
  absl::Mutex pin_mutex;
  DeviceRuntime* pinned_by ABSL_GUARDED_BY(pin_mutex) = nullptr;  // the staging slab
  LeaseKeeper keeper;  // last: its thread ends before the rest goes
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_WORKER_IMPL_H_
