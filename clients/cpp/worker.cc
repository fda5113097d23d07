#include "clients/cpp/worker.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "clients/cpp/worker_impl.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

constexpr int64_t kFdReplyTimeoutMs = 10000;

// Sends the session's token and takes over the three descriptors of a WORKER.
absl::StatusOr<std::vector<UniqueFd>> FetchSlabs(int socket, const AttachedSession& session) {
  FdRequest request{};
  request.magic = kFdMagic;
  if (session.fd_token.size() != sizeof(request.token)) {
    return MakeError(absl::StatusCode::kInternal, "FD_TOKEN_INVALID",
                     absl::StrCat("the store's fd_token has ", session.fd_token.size(),
                                  " bytes, expected ", sizeof(request.token)));
  }
  std::memcpy(request.token, session.fd_token.data(), sizeof(request.token));
  CERTKV_RETURN_IF_ERROR(SendWithFds(
      socket, absl::string_view(reinterpret_cast<const char*>(&request), sizeof(request)), {}));
  CERTKV_ASSIGN_OR_RETURN(BytesWithFds answer,
                          ReceiveWithFds(socket, sizeof(FdReply), kFdReplyTimeoutMs));
  FdReply reply{};
  std::memcpy(&reply, answer.bytes.data(), sizeof(reply));
  reply.reason[sizeof(reply.reason) - 1] = '\0';
  reply.message[sizeof(reply.message) - 1] = '\0';
  if (reply.magic == kFdMagic && reply.code != 0) {
    return MakeError(static_cast<absl::StatusCode>(reply.code),
                     reply.reason[0] != '\0' ? reply.reason : "FD_REFUSED", reply.message);
  }
  if (reply.magic != kFdMagic || answer.fds.size() != 3) {
    return MakeError(
        absl::StatusCode::kInternal, "FD_REPLY_INVALID",
        absl::StrCat("the store answered with magic ", reply.magic, " and ", answer.fds.size(),
                     " descriptors, expected ", kFdMagic, " and 3"));
  }
  return std::move(answer.fds);
}

}  // namespace

absl::Status SequenceInvalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SEQUENCE_INVALID", message);
}

absl::Status Worker::Impl::MapSlabs() {
  CERTKV_ASSIGN_OR_RETURN(socket, ConnectUnixSocket(session.fd_socket));
  CERTKV_ASSIGN_OR_RETURN(std::vector<UniqueFd> fds, FetchSlabs(socket.get(), session));
  CERTKV_ASSIGN_OR_RETURN(device, Mapping::Map(fds[0].get(), Mapping::Access::kReadOnly));
  CERTKV_ASSIGN_OR_RETURN(backing, Mapping::Map(fds[1].get(), Mapping::Access::kReadOnly));
  CERTKV_ASSIGN_OR_RETURN(staging, Mapping::Map(fds[2].get(), Mapping::Access::kReadWrite));
  CERTKV_RETURN_IF_ERROR(device_layout.CheckHeader(device.data(), device.size_bytes()));
  device_layout.AdoptDitherSecret(device.data());
  CERTKV_RETURN_IF_ERROR(backing_layout.CheckHeader(backing.data(), backing.size_bytes()));
  CERTKV_RETURN_IF_ERROR(staging_layout.CheckHeader(staging.data(), staging.size_bytes()));
  on_device = std::make_unique<DeviceStaging>(staging.data(), staging.size_bytes(), device.data());
  return absl::OkStatus();
}

absl::Status Worker::Impl::CheckLayers(absl::Span<const LayerKv> layers) const {
  if (layers.size() == spec.layers.size()) return absl::OkStatus();
  return SequenceInvalid(absl::StrCat("sequence has keys and values of ", layers.size(),
                                      " layers, the cache has ", spec.layers.size()));
}

absl::Status Worker::Impl::CheckInputs(absl::Span<const int32_t> token_ids,
                                       const BlockKeyContext& key_context) const {
  if (token_ids.empty() || token_ids.size() > static_cast<size_t>(kSequenceTokensMax)) {
    return SequenceInvalid(absl::StrCat("sequence has ", token_ids.size(),
                                        " tokens, must have 1 to ", kSequenceTokensMax));
  }
  if (key_context.spec_digest != digest) {
    return SequenceInvalid("key_context.spec_digest is not this cache's; use DefaultKeyContext");
  }
  if (key_context.tenant_salt.size() > static_cast<size_t>(kTenantSaltBytesMax)) {
    return SequenceInvalid(absl::StrCat("tenant_salt has ", key_context.tenant_salt.size(),
                                        " bytes, at most ", kTenantSaltBytesMax));
  }
  return absl::OkStatus();
}

void Worker::Impl::WriteStaging(int32_t slot, int64_t first, int32_t count, int32_t row,
                                absl::Span<const LayerKv> layers) {
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    for (int32_t i = 0; i < count; ++i) WriteRow(slot, layer, row + i, layers[layer], first + i);
  }
}

void Worker::Impl::WriteRow(int32_t slot, int32_t layer, int32_t row, const LayerKv& kv,
                            int64_t token) {
  const int64_t d = spec.head_dim;
  const int64_t d_v = spec.value_dim;
  for (int32_t head = 0; head < spec.kv_head_count; ++head) {
    auto* keys =
        reinterpret_cast<uint16_t*>(staging.data() + staging_layout.key_offset(slot, layer, head));
    auto* values = reinterpret_cast<uint16_t*>(staging.data() +
                                               staging_layout.value_offset(slot, layer, head));
    const int64_t from = token * spec.kv_head_count + head;
    std::memcpy(keys + row * d, kv.keys + from * d, 2 * d);
    std::memcpy(values + row * d_v, kv.values + from * d_v, 2 * d_v);
  }
}

Worker::Worker(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Worker::~Worker() {
  impl_->on_device.reset();  // the store gives that memory back when the session has ended
  // Best effort: the store also ends the session when the descriptor socket closes.
  impl_->store->DetachWorker(impl_->session.session).IgnoreError();
  const absl::MutexLock lock(&impl_->pin_mutex);
  if (impl_->pinned_by != nullptr) impl_->pinned_by->UnpinHost(impl_->staging.data());
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Attach(const Options& options,
                                                       const CacheSpec& spec) {
  CERTKV_RETURN_IF_ERROR(ValidateCacheSpec(spec));
  const Options resolved = ResolveTargets(options);
  CERTKV_RETURN_IF_ERROR(CheckAccess(resolved));
  auto store = std::make_unique<StoreClient>(resolved);
  CERTKV_ASSIGN_OR_RETURN(RegisteredCache cache, store->RegisterCache(spec));
  if (cache.digest != DigestCacheSpec(spec)) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "SPEC_DIGEST_MISMATCH",
        absl::StrCat("the store computes digest ", ToHex(cache.digest.view(), 8),
                     "... for this spec, this client ", ToHex(DigestCacheSpec(spec).view(), 8),
                     "...; run client and store of the same version"));
  }
  CERTKV_ASSIGN_OR_RETURN(AttachedSession session, store->AttachWorker(cache.cache));
  auto impl = std::make_unique<Impl>(resolved, spec, cache, session, std::move(store));
  std::unique_ptr<Worker> worker(new Worker(std::move(impl)));
  CERTKV_RETURN_IF_ERROR(worker->impl_->MapSlabs());
  return worker;
}

// Seals written slots and gives the sequence their blocks and lease. The slots are free afterwards.
absl::Status Worker::AddSealed(Sequence& sequence, absl::Span<const BlockKey> keys,
                               int64_t first_block, const FilledSlots& filled) {
  const std::vector<int32_t>& slots = filled.slots;
  std::vector<SealItem> items;
  for (size_t i = 0; i < slots.size(); ++i) {
    const size_t block = first_block + i;
    items.push_back({slots[i], keys[block], block == 0 ? BlockKey{} : keys[block - 1]});
  }
  absl::StatusOr<LeasedBlocks> sealed =
      impl_->store->SealBlocks(impl_->session.session, items, filled.on_device);
  if (!sealed.ok()) {
    // The store frees the slots with its answer; where none came, this makes sure. Idempotent.
    impl_->store->AbortBlocks(impl_->session.session, slots).IgnoreError();
    return sealed.status();
  }
  impl_->keeper.Add(sealed->lease, sealed->expire_time_ms);
  sequence.leases_.push_back(sealed->lease);
  sequence.lease_block_counts_.push_back(static_cast<int32_t>(sealed->blocks.size()));
  for (const BlockHandle& block : sealed->blocks) sequence.blocks_.push_back(block);
  sequence.shared_block_count_ += sealed->shared_count;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::FindPrefix(
    absl::Span<const BlockKey> keys,
    const std::function<absl::StatusOr<LeasedBlocks>(absl::Span<const BlockKey>)>& find) {
  std::unique_ptr<Sequence> sequence(new Sequence(this));
  // One call per 4096 blocks: a longer chain goes on while whole batches are found.
  for (size_t first = 0; first < keys.size(); first += kBlocksPerCallMax) {
    const auto batch = keys.subspan(first, kBlocksPerCallMax);
    CERTKV_ASSIGN_OR_RETURN(LeasedBlocks found, find(batch));
    if (found.blocks.empty()) break;
    impl_->keeper.Add(found.lease, found.expire_time_ms);
    sequence->leases_.push_back(found.lease);
    sequence->lease_block_counts_.push_back(static_cast<int32_t>(found.blocks.size()));
    for (const BlockHandle& block : found.blocks) sequence->blocks_.push_back(block);
    if (found.blocks.size() < batch.size()) break;
  }
  sequence->shared_block_count_ = static_cast<int32_t>(sequence->blocks_.size());
  sequence->token_count_ =
      static_cast<int64_t>(sequence->blocks_.size()) * impl_->spec.block_tokens;
  return sequence;
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::Lookup(absl::Span<const int32_t> token_ids,
                                                         const BlockKeyContext& key_context) {
  return LookupBlocks(
      ComputeBlockKeys(impl_->Salted(key_context), token_ids, impl_->spec.block_tokens));
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::LookupBlocks(absl::Span<const BlockKey> keys) {
  return FindPrefix(keys, [this](absl::Span<const BlockKey> batch) {
    return impl_->store->LookupAndLease(impl_->session.session, batch);
  });
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::Pull(const std::string& peer,
                                                       absl::Span<const int32_t> token_ids,
                                                       const BlockKeyContext& key_context,
                                                       PullOrder order) {
  const std::vector<BlockKey> keys =
      ComputeBlockKeys(impl_->Salted(key_context), token_ids, impl_->spec.block_tokens);
  return FindPrefix(keys, [&](absl::Span<const BlockKey> batch) {
    return impl_->store->PullBlocks(impl_->session.session, peer, batch, order);
  });
}

absl::StatusOr<FilledSlots> Worker::Impl::FillSlots(std::vector<SlotRows> rows,
                                                    const SlotWriter& write, bool waits) {
  CERTKV_ASSIGN_OR_RETURN(
      std::vector<int32_t> slots,
      store->ReserveBlocks(session.session, static_cast<int32_t>(rows.size()), waits));
  for (size_t i = 0; i < rows.size(); ++i) rows[i].slot = slots[i];
  const absl::Status written = write(rows);
  if (written.ok()) return FilledSlots{std::move(slots), false};
  store->AbortBlocks(session.session, slots).IgnoreError();
  return written;
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::PutSequence(absl::Span<const int32_t> token_ids,
                                                              absl::Span<const LayerKv> layers,
                                                              const BlockKeyContext& key_context) {
  CERTKV_RETURN_IF_ERROR(impl_->CheckLayers(layers));
  const SlotWriter write = [&](absl::Span<const SlotRows> rows) {
    for (const SlotRows& slot : rows) {
      impl_->WriteStaging(slot.slot, slot.first_token, slot.token_count, 0, layers);
    }
    return absl::OkStatus();
  };
  return Put(token_ids, key_context,
             [&](const std::vector<SlotRows>& rows) { return impl_->FillSlots(rows, write); });
}

absl::StatusOr<std::unique_ptr<Sequence>> Worker::Put(
    absl::Span<const int32_t> token_ids, const BlockKeyContext& key_context,
    const std::function<absl::StatusOr<FilledSlots>(const std::vector<SlotRows>&)>& fill) {
  CERTKV_RETURN_IF_ERROR(impl_->CheckInputs(token_ids, key_context));
  const int32_t block_tokens = impl_->spec.block_tokens;
  const std::vector<BlockKey> keys =
      ComputeBlockKeys(impl_->Salted(key_context), token_ids, block_tokens);
  CERTKV_ASSIGN_OR_RETURN(std::unique_ptr<Sequence> sequence, Lookup(token_ids, key_context));
  const auto block_count = static_cast<int64_t>(keys.size());
  // One slot stays for the tail.
  const int64_t batch_max = std::clamp(impl_->staging_layout.slot_count() - 1, 1, kSealBatchBlocks);
  for (auto done = static_cast<int64_t>(sequence->blocks_.size()); done < block_count;
       done = static_cast<int64_t>(sequence->blocks_.size())) {
    std::vector<SlotRows> rows;
    for (int64_t block = done; block < std::min(block_count, done + batch_max); ++block) {
      rows.push_back({.first_token = block * block_tokens, .token_count = block_tokens});
    }
    CERTKV_ASSIGN_OR_RETURN(const FilledSlots filled, fill(rows));
    const absl::Status sealed = AddSealed(*sequence, keys, done, filled);
    if (impl_->FallsToHost(sealed, filled.on_device)) continue;
    CERTKV_RETURN_IF_ERROR(sealed);
  }
  sequence->token_count_ = static_cast<int64_t>(token_ids.size());
  const int64_t tail_first = block_count * block_tokens;
  const auto tail_count = static_cast<int32_t>(sequence->token_count_ - tail_first);
  if (tail_count > 0) {
    CERTKV_ASSIGN_OR_RETURN(const FilledSlots filled,
                            fill({{.first_token = tail_first, .token_count = tail_count}}));
    sequence->tail_ = TailRef{impl_->session.staging_id, filled.slots[0], tail_count};
  }
  return sequence;
}

absl::Status Worker::AppendToken(Sequence& sequence, absl::Span<const int32_t> token_ids,
                                 absl::Span<const LayerKv> layers,
                                 const BlockKeyContext& key_context) {
  CERTKV_RETURN_IF_ERROR(impl_->CheckInputs(token_ids, key_context));
  CERTKV_RETURN_IF_ERROR(impl_->CheckLayers(layers));
  if (static_cast<int64_t>(token_ids.size()) != sequence.token_count_ + 1) {
    return SequenceInvalid(absl::StrCat("AppendToken got ", token_ids.size(),
                                        " token ids for a sequence of ", sequence.token_count_,
                                        "; pass the whole sequence with one new token"));
  }
  CERTKV_RETURN_IF_ERROR(BeginToken(sequence));
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    CERTKV_RETURN_IF_ERROR(WriteLayer(sequence, static_cast<int32_t>(layer), layers[layer]));
  }
  return FinishToken(sequence, token_ids, key_context);
}

absl::Status Worker::BeginToken(Sequence& sequence) {
  if (sequence.open_layers_ != Sequence::kNoOpenToken) {
    return SequenceInvalid(absl::StrCat("token ", sequence.token_count_ - 1, " has ",
                                        sequence.open_layers_, " of ", impl_->spec.layer_count(),
                                        " layers; finish it before the next begins"));
  }
  if (sequence.token_count_ >= kSequenceTokensMax) {
    return SequenceInvalid(absl::StrCat("sequence has ", sequence.token_count_,
                                        " tokens already, at most ", kSequenceTokensMax));
  }
  if (sequence.tail_.staging_slot < 0) {
    CERTKV_ASSIGN_OR_RETURN(std::vector<int32_t> slots,
                            impl_->store->ReserveBlocks(impl_->session.session, 1));
    sequence.tail_ = TailRef{impl_->session.staging_id, slots[0], 0};
  }
  ++sequence.tail_.token_count;
  ++sequence.token_count_;
  sequence.open_layers_ = 0;
  return absl::OkStatus();
}

absl::Status Worker::WriteLayer(Sequence& sequence, int32_t layer, const LayerKv& kv) {
  if (sequence.open_layers_ != layer || layer >= impl_->spec.layer_count()) {
    return SequenceInvalid(absl::StrCat("layer ", layer, " is written, next is ",
                                        sequence.open_layers_, " of ", impl_->spec.layer_count(),
                                        " (-1: no token has begun); write layers in order"));
  }
  impl_->WriteRow(sequence.tail_.staging_slot, layer, sequence.tail_.token_count - 1, kv, 0);
  ++sequence.open_layers_;
  return absl::OkStatus();
}

absl::Status Worker::FinishToken(Sequence& sequence, absl::Span<const int32_t> token_ids,
                                 const BlockKeyContext& key_context) {
  if (sequence.open_layers_ != impl_->spec.layer_count()) {
    return SequenceInvalid(absl::StrCat("the token has ", sequence.open_layers_, " of ",
                                        impl_->spec.layer_count(),
                                        " layers (-1: none has begun); write the others first"));
  }
  if (static_cast<int64_t>(token_ids.size()) != sequence.token_count_) {
    return SequenceInvalid(absl::StrCat("FinishToken got ", token_ids.size(),
                                        " token ids for a sequence of ", sequence.token_count_,
                                        "; pass the whole sequence with the new token"));
  }
  if (key_context.spec_digest != impl_->digest) {
    return SequenceInvalid("key_context.spec_digest is not this cache's; use DefaultKeyContext");
  }
  sequence.open_layers_ = Sequence::kNoOpenToken;
  if (sequence.tail_.token_count < impl_->spec.block_tokens) return absl::OkStatus();
  const std::vector<BlockKey> keys =
      ComputeBlockKeys(impl_->Salted(key_context), token_ids, impl_->spec.block_tokens);
  const TailRef tail = std::exchange(sequence.tail_, TailRef{});
  const absl::Status sealed =
      AddSealed(sequence, keys, static_cast<int64_t>(keys.size()) - 1, {{tail.staging_slot}});
  if (sealed.ok()) return sealed;
  // The slot went back to the store with all its rows: the tail's tokens are gone from it.
  sequence.token_count_ -= tail.token_count;
  return WithContext(sealed, absl::StrCat("sealing the full tail; the sequence now ends at token ",
                                          sequence.token_count_));
}

absl::Status Worker::PinSequence(const Sequence& sequence, bool pinned, int64_t ttl_ms) {
  std::vector<BlockKey> keys;
  for (const BlockHandle& block : sequence.blocks_) keys.push_back(block.key);
  for (size_t first = 0; first < keys.size(); first += kBlocksPerCallMax) {
    const auto batch = absl::MakeConstSpan(keys).subspan(first, kBlocksPerCallMax);
    const absl::Status status =
        impl_->store->PinBlocks(impl_->session.session, batch, pinned, ttl_ms);
    if (status.ok()) continue;
    // All or nothing, as one call is.
    for (size_t done = 0; pinned && done < first; done += kBlocksPerCallMax) {
      impl_->store
          ->PinBlocks(impl_->session.session,
                      absl::MakeConstSpan(keys).subspan(done, kBlocksPerCallMax), false, 0)
          .IgnoreError();
    }
    return status;
  }
  return absl::OkStatus();
}

absl::Status Worker::RepairBlocks(const Sequence& sequence) {
  size_t first = 0;
  for (size_t i = 0; i < sequence.leases_.size(); ++i) {
    std::vector<BlockKey> keys;
    for (int32_t block = 0; block < sequence.lease_block_counts_[i]; ++block) {
      keys.push_back(sequence.blocks_[first++].key);
    }
    CERTKV_RETURN_IF_ERROR(
        impl_->store->FetchOriginals(impl_->session.session, sequence.leases_[i], keys));
  }
  return absl::OkStatus();
}

const CacheSpec& Worker::spec() const { return impl_->spec; }
const SpecDigest& Worker::spec_digest() const { return impl_->digest; }
BlockKeyContext Worker::KeyContext(int32_t rank) const {
  return {.spec_digest = impl_->digest, .rank = rank, .tenant_salt = impl_->tenant_salt};
}
const Options& Worker::options() const { return impl_->options; }
const std::shared_ptr<grpc::Channel>& Worker::certifier_balancer() const {
  return impl_->certifier_balancer;
}
const SlabLayout& Worker::device_layout() const { return impl_->device_layout; }
const SlabLayout& Worker::backing_layout() const { return impl_->backing_layout; }
const SlabLayout& Worker::staging_layout() const { return impl_->staging_layout; }
const uint8_t* Worker::device_base() const { return impl_->device.data(); }
const uint8_t* Worker::backing_base() const { return impl_->backing.data(); }
const uint8_t* Worker::staging_base() const { return impl_->staging.data(); }
absl::StatusOr<std::unique_ptr<ImportedSlab>> Worker::OpenDeviceCopy(DeviceRuntime* runtime) const {
  return ImportedSlab::Open(runtime, impl_->device.data(), impl_->device.size_bytes());
}
absl::Status Worker::device_staging() const { return impl_->on_device->status(); }

Sequence::~Sequence() {
  Worker::Impl& impl = *worker_->impl_;
  for (const LeaseId lease : leases_) {
    impl.keeper.Remove(lease);
    impl.store->ReleaseLease(impl.session.session, lease).IgnoreError();
  }
  if (tail_.staging_slot >= 0) {
    impl.store->AbortBlocks(impl.session.session, {tail_.staging_slot}).IgnoreError();
  }
}

absl::Status Sequence::CheckLease() const {
  for (const LeaseId lease : leases_) {
    CERTKV_RETURN_IF_ERROR(worker_->impl_->keeper.Check(lease));
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckWritten(int32_t layer, int64_t position) const {
  if (open_layers_ == kNoOpenToken || position < token_count_ - 1 || layer < open_layers_) {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kInvalidArgument, "READ_INVALID",
      absl::StrCat("layer ", layer, " of token ", position, " is not written yet, only ",
                   open_layers_, " layers are; write it (WriteLayer) before it is read"));
}

BlockKeyContext DefaultKeyContext(const CacheSpec& spec) {
  BlockKeyContext context;
  context.spec_digest = DigestCacheSpec(spec);
  return context;
}

}  // namespace certkv::client
