#include "services/certifier/view.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

absl::Status ValidateSlot(const MappedSlab& slab, absl::string_view tier, const SlotRef& ref) {
  if (!(ref.slot >= 0 && ref.slot < slab.layout().slot_count())) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "HANDLE_INVALID",
        absl::StrCat(tier, " slot is ", ref.slot, ", must be in [0, ", slab.layout().slot_count(),
                     "); pass handles on as the store "
                     "gave them"));
  }
  if (ref.generation % 2 != 0) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "HANDLE_INVALID",
        absl::StrCat("generation of ", tier, " slot ", ref.slot, " is ", ref.generation,
                     ", a sealed block's is even; pass handles on as "
                     "the store gave them"));
  }
  if (!slab.Matches(ref)) {
    return MakeError(absl::StatusCode::kAborted, "BLOCK_REUSED",
                     absl::StrCat(tier, " slot ", ref.slot, " has generation ",
                                  slab.Generation(ref.slot), ", the handle says ", ref.generation,
                                  ": the block was evicted; look it up again and keep its lease"));
  }
  return absl::OkStatus();
}

absl::Status CheckTokenCount(int64_t token_count) {
  if (token_count <= kSequenceTokensMax) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "SEQUENCE_TOO_LONG",
                   absl::StrCat("view has ", token_count, " tokens, at most ", kSequenceTokensMax,
                                " are read; split the sequence"));
}

int64_t CountTokens(const MappedCache& cache, const ViewSnapshot& snapshot) {
  return static_cast<int64_t>(snapshot.blocks->size()) * cache.spec().block_tokens +
         snapshot.tail.token_count;
}

}  // namespace

absl::Status ValidateHandles(const MappedCache& cache, absl::Span<const BlockHandle> blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    absl::Status status = ValidateSlot(cache.device(), "device", blocks[i].device);
    if (status.ok() && blocks[i].backing.present()) {
      status = ValidateSlot(cache.backing(), "backing", blocks[i].backing);
    }
    if (!status.ok()) return WithContext(status, absl::StrCat("block ", i));
  }
  return absl::OkStatus();
}

absl::StatusOr<ViewTail> MakeTail(const MappedCache& cache,
                                  std::shared_ptr<const StagingMap> staging, int32_t slot,
                                  int32_t token_count) {
  ViewTail tail;
  if (staging == nullptr) {
    if (token_count == 0) return tail;
    return MakeError(absl::StatusCode::kInvalidArgument, "TAIL_INVALID",
                     absl::StrCat("tail has ", token_count,
                                  " tokens but no staging_id; name the staging memory that they "
                                  "lie in"));
  }
  const int32_t slot_count = staging->slab.layout().slot_count();
  if (!(slot >= 0 && slot < slot_count)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "TAIL_INVALID",
        absl::StrCat("tail's staging_slot is ", slot, ", must be in [0, ", slot_count, ")"));
  }
  if (!(token_count >= 0 && token_count < cache.spec().block_tokens)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TAIL_INVALID",
                     absl::StrCat("tail's token_count is ", token_count, ", must be in [0, ",
                                  cache.spec().block_tokens, "); seal a full tail as a block"));
  }
  tail.generation = staging->slab.Generation(slot);
  tail.staging = std::move(staging);
  tail.slot = slot;
  tail.token_count = token_count;
  return tail;
}

absl::StatusOr<std::shared_ptr<View>> View::Create(std::shared_ptr<MappedCache> cache,
                                                   absl::Span<const BlockHandle> blocks,
                                                   ViewTail tail, const PolicyLease& policy,
                                                   BudgetBook* book, int64_t now_ms) {
  CERTKV_RETURN_IF_ERROR(cache->CheckAlive());
  CERTKV_RETURN_IF_ERROR(ValidatePolicyLease(policy));
  CERTKV_RETURN_IF_ERROR(ValidateHandles(*cache, blocks));
  auto view = std::shared_ptr<View>(new View(std::move(cache), book));
  ViewSnapshot snapshot;
  snapshot.blocks = std::make_shared<const BlockList>(blocks.begin(), blocks.end());
  snapshot.tail = std::move(tail);
  snapshot.policy = std::make_shared<const PolicyLease>(policy);
  snapshot.token_count = CountTokens(*view->cache_, snapshot);
  CERTKV_RETURN_IF_ERROR(CheckTokenCount(snapshot.token_count));
  CERTKV_ASSIGN_OR_RETURN(snapshot.budget, book->AccountOf(policy, now_ms));
  view->Touch(now_ms);
  absl::MutexLock lock(&view->mutex_);
  view->snapshot_ = std::move(snapshot);
  return view;
}

absl::Status View::Update(const ViewUpdate& update, int64_t now_ms) {
  CERTKV_RETURN_IF_ERROR(cache_->CheckAlive());
  CERTKV_RETURN_IF_ERROR(ValidateHandles(*cache_, update.appended_blocks));
  absl::MutexLock one_update(&update_mutex_);
  ViewSnapshot next = Snapshot();
  if (!update.appended_blocks.empty()) {
    auto blocks = std::make_shared<BlockList>();
    blocks->reserve(next.blocks->size() + update.appended_blocks.size());
    blocks->assign(next.blocks->begin(), next.blocks->end());
    blocks->insert(blocks->end(), update.appended_blocks.begin(), update.appended_blocks.end());
    next.blocks = std::move(blocks);
  }
  if (update.tail.has_value()) next.tail = *update.tail;
  if (update.policy.has_value()) {
    CERTKV_RETURN_IF_ERROR(ValidatePolicyLease(*update.policy));
    if (update.policy->request != next.policy->request) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "POLICY_LEASE_INVALID",
          absl::StrCat("policy lease is of ", update.policy->request, ", the view is of ",
                       next.policy->request, "; open a view for each request"));
    }
    if (update.policy->sequence > next.policy->sequence) {
      CERTKV_ASSIGN_OR_RETURN(next.budget, book_->AccountOf(*update.policy, now_ms));
      next.policy = std::make_shared<const PolicyLease>(*update.policy);
    }
  }
  next.token_count = CountTokens(*cache_, next);
  CERTKV_RETURN_IF_ERROR(CheckTokenCount(next.token_count));
  Touch(now_ms);
  absl::MutexLock lock(&mutex_);
  snapshot_ = std::move(next);
  return absl::OkStatus();
}

ViewSnapshot View::Snapshot() const {
  absl::MutexLock lock(&mutex_);
  return snapshot_;
}

}  // namespace certkv::certifier
