#include "services/kvstore/nccl_server.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/boot_id.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/common/random_id.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/block_payload.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kLimitRetryMs = 1000;

absl::Status LinkNotFound(int64_t link_id) {
  return MakeError(absl::StatusCode::kNotFound, "NCCL_LINK_NOT_FOUND",
                   absl::StrCat("link ", link_id,
                                " isn't there, or ended when it failed or was idle; join anew"));
}

}  // namespace

NcclServer::NcclServer(const NcclConfig& config, const Dependencies& with)
    : config_(config), with_(with) {}

NcclServer::~NcclServer() {
  Stop();
  std::vector<std::shared_ptr<NcclLink>> ended;
  {
    absl::MutexLock lock(&mutex_);
    ended.swap(ended_);
  }
  // Their threads end here, without the lock that they take.
}

void NcclServer::Stop() {
  absl::MutexLock lock(&mutex_);
  is_stopped_ = true;
  while (!links_.empty()) EndLink(links_.begin()->first);
}

void NcclServer::EndLink(int64_t link_id) {
  Entry& entry = links_.at(link_id);
  entry.link->Stop();
  ended_.push_back(std::move(entry.link));
  links_.erase(link_id);
}

absl::Status NcclServer::CheckOffer(const NcclOffer& offer) const {
  if (offer.version != with_.library->version()) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "NCCL_VERSION",
        absl::StrCat("NCCL of the caller is ", CommunicatorVersionText(offer.version),
                     ", of this store ", CommunicatorVersionText(with_.library->version()),
                     "; both must be the same: install one, and name it in "
                     "kvstore.nccl_library"));
  }
  if (offer.boot == CurrentBootId() && offer.device_uuid == with_.place.device.uuid) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "NCCL_SAME_DEVICE",
                     "caller and this store use the same GPU, between whose ends NCCL moves "
                     "nothing; give them different ones by kvstore.device_index");
  }
  if (!(offer.movement_bytes >= 1)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "NCCL_OFFER_INVALID",
        absl::StrCat("movement_bytes is ", offer.movement_bytes, ", must be at least 1"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PeerSession>> NcclServer::OpenSession(
    const NcclOffer& offer, const std::string& caller) const {
  auto session = std::make_unique<PeerSession>(with_.engine);
  CERTKV_RETURN_IF_ERROR(session->Open(offer.spec, offer.tenant, caller));
  CERTKV_ASSIGN_OR_RETURN(const auto cache, with_.engine->CacheOf(session->id()));
  const int64_t plane_bytes = PlaneBytesOf(*cache);
  const int64_t original_bytes = OriginalBytesOf(*cache);
  if (plane_bytes == offer.plane_bytes && original_bytes == offer.original_bytes) return session;
  return MakeError(absl::StatusCode::kFailedPrecondition, "BULK_PEER_MISMATCH",
                   absl::StrCat("blocks of the caller have ", offer.plane_bytes, " + ",
                                offer.original_bytes, " bytes, of this store ", plane_bytes, " + ",
                                original_bytes, ", for the same spec; run the same version"));
}

absl::Status NcclServer::MakeRoom() {
  if (is_stopped_) {
    return MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                     "the store is stopping; retry when it is back");
  }
  std::vector<int64_t> over;
  int64_t oldest = 0;
  int64_t oldest_ns = 0;
  for (const auto& [id, entry] : links_) {
    const int64_t used_ns = entry.state->used_ns.load();
    if (entry.link->IsOver()) {
      over.push_back(id);
    } else if (entry.link->IsIdle() && (oldest == 0 || used_ns < oldest_ns)) {
      oldest = id;
      oldest_ns = used_ns;
    }
  }
  for (const int64_t id : over) EndLink(id);
  // Threads of links that are over take no lock of ours any more.
  ended_.erase(
      std::remove_if(ended_.begin(), ended_.end(), [](const auto& link) { return link->IsOver(); }),
      ended_.end());
  if (links_.size() < static_cast<size_t>(config_.link_limit)) return absl::OkStatus();
  if (oldest == 0) {
    return WithRetryDelay(
        MakeError(absl::StatusCode::kResourceExhausted, "NCCL_LINK_LIMIT",
                  absl::StrCat("other stores use all ", config_.link_limit,
                               " links to this one; retry, or raise kvstore.nccl_link_limit if "
                               "the GPU has memory for more")),
        kLimitRetryMs);
  }
  EndLink(oldest);
  return absl::OkStatus();
}

absl::StatusOr<NcclJoined> NcclServer::Join(const NcclOffer& offer, const std::string& caller) {
  CERTKV_RETURN_IF_ERROR(CheckOffer(offer));
  auto state = std::make_shared<LinkState>();
  CERTKV_ASSIGN_OR_RETURN(state->session, OpenSession(offer, caller));
  state->used_ns = with_.clock->MonotonicNs();
  const int64_t movement_bytes = std::min(offer.movement_bytes, config_.in_flight_bytes / 2);
  absl::MutexLock lock(&mutex_);
  CERTKV_RETURN_IF_ERROR(MakeRoom());
  const int64_t id = RandomId();
  links_[id] = Entry{offer.tenant, state, MakeLink(offer, movement_bytes, state, caller)};
  return NcclJoined{id, movement_bytes};
}

std::shared_ptr<NcclLink> NcclServer::MakeLink(const NcclOffer& offer, int64_t movement_bytes,
                                               const std::shared_ptr<LinkState>& state,
                                               const std::string& caller) {
  auto begin = [this, id = offer.id, movement_bytes,
                state](StopSignal* stop) -> absl::StatusOr<std::unique_ptr<NcclChannel>> {
    const int64_t deadline_ns = with_.clock->MonotonicNs() + config_.timeout_ms * kNsPerMs;
    CERTKV_ASSIGN_OR_RETURN(
        std::unique_ptr<NcclChannel> channel,
        NcclChannel::Create({with_.library, with_.place, with_.clock, stop}, movement_bytes));
    CERTKV_RETURN_IF_ERROR(channel->Join(id, 1, deadline_ns));
    state->was_made = true;
    with_.counters->links.fetch_add(1, std::memory_order_relaxed);
    with_.counters->links_made.fetch_add(1, std::memory_order_relaxed);
    return channel;
  };
  auto over = [this, state, caller](const absl::Status& why) {
    state->session = nullptr;
    if (state->was_made) with_.counters->links.fetch_sub(1, std::memory_order_relaxed);
    if (!why.ok()) GiveUp(caller, why);
  };
  return std::make_shared<NcclLink>(std::move(begin), config_.idle_ms, std::move(over));
}

absl::Status NcclServer::CheckTenant(int64_t link_id, const StoreEngine::MayUse& may_use) {
  absl::MutexLock lock(&mutex_);
  const auto found = links_.find(link_id);
  if (found == links_.end() || !may_use(found->second.tenant)) return LinkNotFound(link_id);
  return absl::OkStatus();
}

void NcclServer::Send(NcclAsk ask, Done done) {
  std::shared_ptr<NcclLink> link;
  std::shared_ptr<LinkState> state;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = links_.find(ask.link_id);
    if (found != links_.end()) {
      link = found->second.link;
      state = found->second.state;
    }
  }
  if (link == nullptr) return done(LinkNotFound(ask.link_id));
  state->used_ns = with_.clock->MonotonicNs();
  // What failed after its answer is not answered again.
  const auto is_answered = std::make_shared<bool>(false);
  const Done answer = [done = std::move(done), is_answered](const auto& blocks) {
    if (!std::exchange(*is_answered, true)) done(blocks);
  };
  auto run = [this, state, ask = std::move(ask), answer](NcclChannel* channel) {
    return SendBlocks(channel, state.get(), ask, answer);
  };
  link->Do({std::move(run), [answer](const absl::Status& why) { answer(why); }});
}

absl::Status NcclServer::SendBlocks(NcclChannel* channel, LinkState* state, const NcclAsk& ask,
                                    const Done& done) {
  const int64_t deadline_ns = with_.clock->MonotonicNs() + config_.timeout_ms * kNsPerMs;
  const SessionId session = state->session->id();
  StoreEngine* const engine = with_.engine;
  const absl::StatusOr<LeasedBlocks> leased =
      engine->LookupAndLease(session, ask.keys, with_.lease_ms);
  if (ReasonOf(leased.status()) == "SESSION_NOT_FOUND") return leased.status();
  std::vector<BulkBlock> heads;
  std::vector<absl::Span<uint8_t>> spans;
  int64_t bytes = 0;
  // What can't be found, for whatever reason, is asked for by TCP, which says the reason.
  const bool has_blocks = leased.ok() && !leased->blocks.empty();
  if (has_blocks) {
    const absl::StatusOr<SharedBlocks> shared = engine->ShareLeased(session, leased->lease);
    for (size_t i = 0; shared.ok() && i < shared->blocks.size(); ++i) {
      const SharedBlock& block = shared->blocks[i];
      const auto parts = PayloadSpans(*shared->cache, block.slots, (ask.parts & kBulkPlanes) != 0,
                                      (ask.parts & kBulkOriginals) != 0);
      BulkBlock& head = heads.emplace_back(BulkBlock{
          block.key, block.parent, block.originals_digest, block.seal_time_ms, ask.parts, 0, 0});
      for (const auto& span : parts) head.total_bytes += static_cast<int64_t>(span.size());
      bytes += head.total_bytes;
      spans.insert(spans.end(), parts.begin(), parts.end());
    }
  }
  done(heads);
  const absl::Status sent = channel->Send(spans, deadline_ns);
  if (has_blocks) engine->ReleaseLease(session, leased->lease).IgnoreError();
  CERTKV_RETURN_IF_ERROR(sent);
  with_.counters->blocks_sent.fetch_add(static_cast<int64_t>(heads.size()),
                                        std::memory_order_relaxed);
  with_.counters->bytes_sent.fetch_add(bytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

void NcclServer::GiveUp(const std::string& caller, const absl::Status& why) {
  const std::string reason = ReasonOf(why);
  with_.counters->CountFailure(reason);
  {
    absl::MutexLock lock(&mutex_);
    if (!said_.insert(reason).second) return;
  }
  Log(LogLevel::kWarning, "nccl_link_ended",
      {{"caller", caller}, {"reason", reason}, {"message", why.message()}, {"instead", "TCP"}});
}

}  // namespace certkv::kvstore
