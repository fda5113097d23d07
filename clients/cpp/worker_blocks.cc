// Whole blocks by key: copied from rows or out of an engine's pages, and sealed.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "clients/cpp/paged_cache.h"
#include "clients/cpp/worker_impl.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

absl::Status CheckCache(const PagedCache& cache, const SpecDigest& digest) {
  if (cache.spec_digest() == digest) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "PAGED_CACHE_INVALID",
      absl::StrCat("the engine's cache was described for spec ",
                   ToHex(cache.spec_digest().view(), 8), "..., the worker is attached to ",
                   ToHex(digest.view(), 8), "...; make the PagedCache of the worker's spec"));
}

}  // namespace

StagedBlocks::StagedBlocks(StagedBlocks&& other) noexcept
    : worker_(other.worker_),
      slots_(std::exchange(other.slots_, {})),
      on_device_(other.on_device_) {}

StagedBlocks& StagedBlocks::operator=(StagedBlocks&& other) noexcept {
  std::swap(worker_, other.worker_);
  std::swap(slots_, other.slots_);
  std::swap(on_device_, other.on_device_);
  return *this;
}

StagedBlocks::~StagedBlocks() { DropFirst(block_count()); }

void StagedBlocks::DropFirst(int32_t count) {
  const std::vector<int32_t> dropped(slots_.begin(),
                                     slots_.begin() + std::clamp(count, 0, block_count()));
  if (dropped.empty()) return;
  slots_.erase(slots_.begin(), slots_.begin() + static_cast<int64_t>(dropped.size()));
  worker_->impl_->store->AbortBlocks(worker_->impl_->session.session, dropped).IgnoreError();
}

absl::Status Worker::Impl::PinStaging(const PagedCache& cache) {
  if (!cache.is_on_device()) return absl::OkStatus();
  const absl::MutexLock lock(&pin_mutex);
  if (pinned_by == cache.runtime()) return absl::OkStatus();
  if (pinned_by != nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_NOT_HERE",
                     "staging memory is pinned for the caches of another device runtime; one "
                     "worker takes those of one");
  }
  CERTKV_RETURN_IF_ERROR(cache.runtime()->PinHost(staging.data(), staging.size_bytes(),
                                                  DeviceRuntime::HostAccess::kReadWrite));
  pinned_by = cache.runtime();
  return absl::OkStatus();
}

bool Worker::Impl::FallsToHost(const absl::Status& status, bool was_on_device) const {
  if (!was_on_device || !absl::StartsWith(ReasonOf(status), "DEVICE_")) return false;
  on_device->GiveUp(status);
  return true;
}

absl::StatusOr<FilledSlots> Worker::Impl::FillPaged(const std::vector<SlotRows>& rows,
                                                    const PagedCache& cache,
                                                    absl::Span<const int32_t> pages, bool waits) {
  const auto fill = [&](uint8_t* base) {
    return FillSlots(
        rows,
        [&](absl::Span<const SlotRows> slots) {
          return cache.CopyRows(pages, slots, staging_layout, base);
        },
        waits);
  };
  const bool is_tail = rows[0].token_count < spec.block_tokens;
  uint8_t* const base = is_tail ? nullptr : on_device->BaseFor(cache);
  if (base != nullptr) {
    absl::StatusOr<FilledSlots> filled = fill(base);
    if (filled.ok()) filled->on_device = true;
    if (!FallsToHost(filled.status(), true)) return filled;
  }
  CERTKV_RETURN_IF_ERROR(PinStaging(cache));
  return fill(staging.data());
}

absl::Status Worker::AppendSlots(Sequence& sequence, absl::Span<const BlockKey> keys,
                                 const FilledSlots& filled) {
  std::vector<BlockKey> chain;
  for (const BlockHandle& block : sequence.blocks_) chain.push_back(block.key);
  chain.insert(chain.end(), keys.begin(), keys.end());
  CERTKV_RETURN_IF_ERROR(
      AddSealed(sequence, chain, static_cast<int64_t>(sequence.blocks_.size()), filled));
  sequence.token_count_ += static_cast<int64_t>(filled.slots.size()) * impl_->spec.block_tokens;
  return absl::OkStatus();
}

absl::Status Worker::CheckAppend(const Sequence& sequence, size_t key_count, size_t block_count,
                                 absl::string_view call) const {
  if (sequence.tail_.staging_slot < 0 && key_count == block_count) return absl::OkStatus();
  return SequenceInvalid(absl::StrCat(call, " got ", key_count, " keys and ", block_count,
                                      " blocks for a sequence with ", sequence.tail_.token_count,
                                      " tokens after its last whole block; one key for each "
                                      "block, and a sequence without a tail"));
}

absl::Status Worker::AppendBlocks(Sequence& sequence, absl::Span<const BlockKey> keys,
                                  absl::Span<const uint16_t* const> originals) {
  CERTKV_RETURN_IF_ERROR(CheckAppend(sequence, keys.size(), originals.size(), "AppendBlocks"));
  const size_t batch_max = std::clamp(impl_->staging_layout.slot_count(), 1, kSealBatchBlocks);
  for (size_t done = 0; done < keys.size();) {
    const size_t batch = std::min(keys.size() - done, batch_max);
    CERTKV_ASSIGN_OR_RETURN(
        const FilledSlots filled,
        impl_->FillSlots(std::vector<SlotRows>(batch), [&](absl::Span<const SlotRows> rows) {
          for (size_t i = 0; i < batch; ++i) {
            std::memcpy(
                impl_->staging.data() + impl_->staging_layout.key_offset(rows[i].slot, 0, 0),
                originals[done + i], impl_->staging_layout.slot_bytes());
          }
          return absl::OkStatus();
        }));
    CERTKV_RETURN_IF_ERROR(AppendSlots(sequence, keys.subspan(done, batch), filled));
    done += batch;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::PutPaged(absl::Span<const int32_t> token_ids,
                                                           const PagedCache& cache,
                                                           absl::Span<const int32_t> pages,
                                                           const BlockKeyContext& key_context) {
  CERTKV_RETURN_IF_ERROR(CheckCache(cache, impl_->digest));
  CERTKV_RETURN_IF_ERROR(cache.CheckTable(pages, 0, static_cast<int64_t>(token_ids.size())));
  return Put(token_ids, key_context, [&](const std::vector<SlotRows>& rows) {
    return impl_->FillPaged(rows, cache, pages);
  });
}

absl::StatusOr<StagedBlocks> Worker::Stage(const PagedCache& cache, absl::Span<const int32_t> pages,
                                           int64_t first_token, int32_t block_count, bool waits) {
  const int32_t block_tokens = impl_->spec.block_tokens;
  CERTKV_RETURN_IF_ERROR(CheckCache(cache, impl_->digest));
  CERTKV_RETURN_IF_ERROR(cache.CheckTable(pages, first_token, int64_t{block_count} * block_tokens));
  std::vector<SlotRows> rows(block_count);
  for (int32_t i = 0; i < block_count; ++i) {
    rows[i].first_token = first_token + int64_t{i} * block_tokens;
    rows[i].token_count = block_tokens;
  }
  CERTKV_ASSIGN_OR_RETURN(FilledSlots filled, impl_->FillPaged(rows, cache, pages, waits));
  return StagedBlocks(this, std::move(filled));
}

absl::StatusOr<StagedBlocks> Worker::StageBlocks(const PagedCache& cache,
                                                 absl::Span<const int32_t> pages,
                                                 int64_t first_token, int32_t block_count) {
  if (!(block_count >= 1 && block_count <= impl_->staging_layout.slot_count())) {
    return SequenceInvalid(absl::StrCat("StageBlocks got ", block_count, " blocks, must be 1 to ",
                                        impl_->staging_layout.slot_count(),
                                        ", the worker's staging slots"));
  }
  return Stage(cache, pages, first_token, block_count, /*waits=*/false);
}

absl::Status Worker::AppendStaged(Sequence& sequence, absl::Span<const BlockKey> keys,
                                  StagedBlocks blocks) {
  CERTKV_RETURN_IF_ERROR(CheckAppend(sequence, keys.size(), blocks.slots_.size(), "AppendStaged"));
  if (blocks.worker_ != this) {
    return SequenceInvalid(
        "AppendStaged got blocks that another worker has staged; stage them with the sequence's "
        "own");
  }
  while (!keys.empty()) {
    const size_t batch = std::min<size_t>(keys.size(), kSealBatchBlocks);
    // Whatever comes of them, the call frees these slots.
    const FilledSlots filled{{blocks.slots_.begin(), blocks.slots_.begin() + batch},
                             blocks.on_device_};
    blocks.slots_.erase(blocks.slots_.begin(), blocks.slots_.begin() + batch);
    const absl::Status sealed = AppendSlots(sequence, keys.subspan(0, batch), filled);
    impl_->FallsToHost(sealed, filled.on_device);  // the next ones
    CERTKV_RETURN_IF_ERROR(sealed);
    keys.remove_prefix(batch);
  }
  return absl::OkStatus();
}

absl::Status Worker::AppendPaged(Sequence& sequence, absl::Span<const BlockKey> keys,
                                 const PagedCache& cache, absl::Span<const int32_t> pages) {
  CERTKV_RETURN_IF_ERROR(CheckAppend(sequence, keys.size(), keys.size(), "AppendPaged"));
  const size_t batch_max = std::clamp(impl_->staging_layout.slot_count(), 1, kSealBatchBlocks);
  while (!keys.empty()) {
    const size_t batch = std::min(keys.size(), batch_max);
    CERTKV_ASSIGN_OR_RETURN(StagedBlocks blocks,
                            Stage(cache, pages, sequence.token_count_, static_cast<int32_t>(batch),
                                  /*waits=*/true));
    const bool was_on_device = blocks.is_on_device();
    const absl::Status sealed = AppendStaged(sequence, keys.subspan(0, batch), std::move(blocks));
    if (impl_->FallsToHost(sealed, was_on_device)) continue;  // the pages are still there
    CERTKV_RETURN_IF_ERROR(sealed);
    keys.remove_prefix(batch);
  }
  return absl::OkStatus();
}

}  // namespace certkv::client
