// Workers and sequences of certkv.h.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "clients/c/boundary.h"
#include "clients/c/certkv.h"
#include "clients/c/convert.h"
#include "clients/c/handles.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::capi {
namespace {

absl::StatusOr<std::vector<int32_t>> TokenIdsOf(const int32_t* token_ids, int64_t token_count) {
  CERTKV_RETURN_IF_ERROR(RequirePointer(token_ids, "token_ids"));
  if (!(token_count >= 1 && token_count <= kSequenceTokensMax)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "SEQUENCE_INVALID",
        absl::StrCat("token_count is ", token_count, ", must be in [1, ", kSequenceTokensMax, "]"));
  }
  return std::vector<int32_t>(token_ids, token_ids + token_count);
}

void MakeSequence(const certkv_worker& worker, std::unique_ptr<client::Sequence> sequence,
                  std::vector<int32_t> token_ids, certkv_sequence** handle) {
  auto state = std::make_shared<SequenceState>();
  token_ids.resize(sequence->token_count());
  state->worker = worker.value;
  state->sequence = std::move(sequence);
  state->token_ids = std::move(token_ids);
  MakeHandle(std::move(state), handle);
}

// function(SequenceState&) under the sequence's lock.
template <typename Function>
certkv_status RunLocked(certkv_sequence* sequence, const Function& function) {
  return RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(CheckHandle(sequence, "sequence"));
    SequenceState& state = *sequence->value;
    const absl::MutexLock lock(&state.mutex);
    return function(state);
  });
}

}  // namespace
}  // namespace certkv::capi

namespace capi = certkv::capi;

certkv_status certkv_get_store_stats(const certkv_options* options, certkv_store_stats* stats) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_ASSIGN_OR_RETURN(const certkv::client::Options services, capi::OptionsOf(options));
    CERTKV_RETURN_IF_ERROR(capi::ReadStruct(stats, "stats").status());
    const certkv::client::Options resolved = certkv::client::ResolveTargets(services);
    CERTKV_RETURN_IF_ERROR(certkv::client::CheckAccess(resolved));
    CERTKV_ASSIGN_OR_RETURN(const auto found, certkv::client::StoreClient(resolved).GetStats());
    capi::WriteStruct({.struct_size = sizeof(*stats),
                       .session_count = found.session_count(),
                       .lease_count = found.lease_count(),
                       .blocks_sealed = found.blocks_sealed(),
                       .blocks_shared = found.blocks_shared(),
                       .blocks_evicted = found.blocks_evicted(),
                       .lookup_blocks_asked = found.lookup_blocks_asked(),
                       .lookup_blocks_found = found.lookup_blocks_found()},
                      stats);
    return absl::OkStatus();
  });
}

certkv_status certkv_worker_attach(const certkv_options* options, const certkv_cache_spec* spec,
                                   certkv_worker** worker) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(worker, "worker"));
    CERTKV_ASSIGN_OR_RETURN(const certkv::client::Options services, capi::OptionsOf(options));
    CERTKV_ASSIGN_OR_RETURN(const certkv::CacheSpec cache, capi::SpecOf(spec));
    CERTKV_ASSIGN_OR_RETURN(auto attached, certkv::client::Worker::Attach(services, cache));
    capi::MakeHandle(std::shared_ptr<certkv::client::Worker>(std::move(attached)), worker);
    return absl::OkStatus();
  });
}

void certkv_worker_close(certkv_worker* worker) { capi::CloseHandle(worker); }

certkv_status certkv_worker_put_sequence(certkv_worker* worker, const int32_t* token_ids,
                                         int64_t token_count, const certkv_layer_kv* layers,
                                         int32_t layer_count, certkv_sequence** sequence) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(worker, "worker"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(sequence, "sequence"));
    CERTKV_ASSIGN_OR_RETURN(std::vector<int32_t> ids, capi::TokenIdsOf(token_ids, token_count));
    const certkv::CacheSpec& spec = worker->value->spec();
    CERTKV_ASSIGN_OR_RETURN(const auto pointers, capi::LayersOf(layers, layer_count, spec));
    CERTKV_ASSIGN_OR_RETURN(auto put, worker->value->PutSequence(
                                          ids, pointers, certkv::client::DefaultKeyContext(spec)));
    capi::MakeSequence(*worker, std::move(put), std::move(ids), sequence);
    return absl::OkStatus();
  });
}

certkv_status certkv_worker_lookup(certkv_worker* worker, const int32_t* token_ids,
                                   int64_t token_count, certkv_sequence** sequence) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(worker, "worker"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(sequence, "sequence"));
    CERTKV_ASSIGN_OR_RETURN(std::vector<int32_t> ids, capi::TokenIdsOf(token_ids, token_count));
    CERTKV_ASSIGN_OR_RETURN(
        auto found,
        worker->value->Lookup(ids, certkv::client::DefaultKeyContext(worker->value->spec())));
    capi::MakeSequence(*worker, std::move(found), std::move(ids), sequence);
    return absl::OkStatus();
  });
}

void certkv_sequence_close(certkv_sequence* sequence) { capi::CloseHandle(sequence); }

certkv_status certkv_sequence_get_info(certkv_sequence* sequence, certkv_sequence_info* info) {
  return capi::RunLocked(sequence, [&](capi::SequenceState& state) -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::ReadStruct(info, "info").status());
    capi::WriteStruct({.struct_size = sizeof(*info),
                       .token_count = state.sequence->token_count(),
                       .block_count = static_cast<int64_t>(state.sequence->blocks().size()),
                       .shared_block_count = state.sequence->shared_block_count(),
                       .tail_token_count = state.sequence->tail().token_count},
                      info);
    return absl::OkStatus();
  });
}

certkv_status certkv_sequence_check_lease(certkv_sequence* sequence) {
  return capi::RunLocked(sequence,
                         [](capi::SequenceState& state) { return state.sequence->CheckLease(); });
}

certkv_status certkv_sequence_pin(certkv_sequence* sequence, int pinned, int64_t ttl_ms) {
  return capi::RunLocked(sequence, [&](capi::SequenceState& state) {
    return state.worker->PinSequence(*state.sequence, pinned != 0, ttl_ms);
  });
}

certkv_status certkv_sequence_append(certkv_sequence* sequence, int32_t token_id,
                                     const certkv_layer_kv* layers, int32_t layer_count) {
  return capi::RunLocked(sequence, [&](capi::SequenceState& state) -> absl::Status {
    const certkv::CacheSpec& spec = state.worker->spec();
    CERTKV_ASSIGN_OR_RETURN(const auto pointers, capi::LayersOf(layers, layer_count, spec));
    state.token_ids.push_back(token_id);
    absl::Status status = state.worker->AppendToken(*state.sequence, state.token_ids, pointers,
                                                    certkv::client::DefaultKeyContext(spec));
    // After a failure the sequence has fewer tokens than were asked for.
    state.token_ids.resize(state.sequence->token_count());
    return status;
  });
}

certkv_status certkv_sequence_begin_token(certkv_sequence* sequence, int32_t token_id) {
  return capi::RunLocked(sequence, [&](capi::SequenceState& state) -> absl::Status {
    state.token_ids.reserve(state.token_ids.size() + 1);
    CERTKV_RETURN_IF_ERROR(state.worker->BeginToken(*state.sequence));
    state.token_ids.push_back(token_id);
    return absl::OkStatus();
  });
}

certkv_status certkv_sequence_write_layer(certkv_sequence* sequence, int32_t layer,
                                          const certkv_layer_kv* kv) {
  return capi::RunLocked(sequence, [&](capi::SequenceState& state) -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(kv, "kv"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(kv->keys, "kv.keys"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(kv->values, "kv.values"));
    return state.worker->WriteLayer(*state.sequence, layer, {kv->keys, kv->values});
  });
}

certkv_status certkv_sequence_finish_token(certkv_sequence* sequence) {
  return capi::RunLocked(sequence, [](capi::SequenceState& state) {
    absl::Status status = state.worker->FinishToken(
        *state.sequence, state.token_ids, certkv::client::DefaultKeyContext(state.worker->spec()));
    state.token_ids.resize(state.sequence->token_count());
    return status;
  });
}
