#include "services/kvstore/nccl_puller.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/boot_id.h"
#include "kernels/core/status.h"
#include "services/common/log.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;

int64_t BytesOf(const BulkTarget& target) {
  int64_t bytes = 0;
  for (const auto& span : target.spans) bytes += static_cast<int64_t>(span.size());
  return bytes;
}

// The peer keeps idle links for less long than this store: the next pull makes a new one.
bool HasEndedIdle(const absl::Status& why) {
  const std::string reason = ReasonOf(why);
  return reason == "NCCL_LINK_ENDED" || reason == "NCCL_LINK_NOT_FOUND";
}

absl::Status Contradiction(absl::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, "NCCL_ANSWER_INVALID",
                   absl::StrCat("the other store's answer contradicts what it was asked: ", what,
                                "; run the same version of certkv on both"));
}

// Are these the blocks that were asked for, as this store would lay them out?
absl::Status CheckHeads(const std::vector<BulkBlock>& heads,
                        const std::vector<BulkTarget*>& targets) {
  if (heads.size() > targets.size()) {
    return Contradiction(absl::StrCat(heads.size(), " blocks, asked for ", targets.size()));
  }
  for (size_t i = 0; i < heads.size(); ++i) {
    const BulkBlock& head = heads[i];
    if (head.key != targets[i]->key) return Contradiction("another block");
    if (head.parts != targets[i]->parts || head.total_bytes != BytesOf(*targets[i])) {
      return Contradiction(absl::StrCat("parts ", head.parts, " of ", head.total_bytes,
                                        " bytes, asked for ", targets[i]->parts, " of ",
                                        BytesOf(*targets[i])));
    }
  }
  return absl::OkStatus();
}

}  // namespace

NcclPuller::NcclPuller(const NcclConfig& config,
                       const std::map<std::string, std::string>& addresses,
                       const Dependencies& with)
    : config_(config), with_(with) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [bulk, address] : addresses) peers_[bulk] = Peer{address};
}

NcclPuller::~NcclPuller() {
  Stop();
  std::vector<std::shared_ptr<NcclLink>> ended;
  {
    absl::MutexLock lock(&mutex_);
    ended.swap(ended_);
  }
  // Their threads end here, without the lock that they take.
}

void NcclPuller::Stop() {
  with_.rendezvous->Cancel();
  absl::MutexLock lock(&mutex_);
  is_stopped_ = true;
  while (!links_.empty()) EndLink(links_.size() - 1);
}

bool NcclPuller::LeadsTo(const BulkPeer& peer) {
  absl::MutexLock lock(&mutex_);
  return LeadsToLocked(peer.address);
}

bool NcclPuller::LeadsToLocked(const std::string& peer) const {
  const auto found = peers_.find(peer);
  return !is_stopped_ && found != peers_.end() &&
         with_.clock->MonotonicNs() >= found->second.retry_ns;
}

void NcclPuller::Fetch(const BulkPeer& peer, std::vector<BulkTarget*> targets,
                       std::function<void()> done) {
  std::shared_ptr<NcclLink> link;
  std::shared_ptr<LinkState> state;
  std::string address;
  bool leads = false;
  {
    absl::MutexLock lock(&mutex_);
    leads = LeadsToLocked(peer.address);
    if (leads) {
      address = peers_[peer.address].address;
      if (const Entry* const entry = FindLink(peer)) {
        link = entry->link;
        state = entry->state;
      }
    }
  }
  if (link == nullptr) {
    if (leads) SayLimit(peer.address);
    return done();
  }
  auto run = [this, state, address, name = peer.address, targets = std::move(targets),
              done](NcclChannel* channel) -> absl::Status {
    CERTKV_RETURN_IF_ERROR(Bring(channel, address, state->link_id, targets));
    SayAgain(name);
    done();
    return absl::OkStatus();
  };
  link->Do({std::move(run), [done](const absl::Status&) { done(); }});
}

void NcclPuller::SayLimit(const std::string& peer) {
  Say(peer, MakeError(absl::StatusCode::kResourceExhausted, "NCCL_LINK_LIMIT",
                      absl::StrCat("all ", config_.link_limit,
                                   " links to other stores are in use; raise "
                                   "kvstore.nccl_link_limit if the GPU has memory for more")));
}

void NcclPuller::Distrust(const BulkPeer& peer) {
  {
    absl::MutexLock lock(&mutex_);
    for (size_t i = links_.size(); i-- > 0;) {
      if (links_[i].peer == peer.address) EndLink(i);
    }
  }
  GiveUp(peer.address,
         MakeError(absl::StatusCode::kUnavailable, "NCCL_BYTES_DIFFER",
                   "blocks came otherwise than they were sealed there; check the GPUs and the "
                   "network between them"));
}

NcclPuller::Entry* NcclPuller::FindLink(const BulkPeer& peer) {
  Bury();
  for (Entry& entry : links_) {
    if (entry.peer == peer.address && entry.spec == peer.hello.spec &&
        entry.tenant == peer.hello.tenant) {
      return &entry;
    }
  }
  if (links_.size() >= static_cast<size_t>(config_.link_limit)) {
    const auto idle = std::find_if(links_.begin(), links_.end(),
                                   [](const Entry& entry) { return entry.link->IsIdle(); });
    if (idle == links_.end()) return nullptr;
    EndLink(static_cast<size_t>(idle - links_.begin()));
  }
  return &links_.emplace_back(MakeLink(peer));
}

NcclPuller::Entry NcclPuller::MakeLink(const BulkPeer& peer) {
  NcclOffer offer;
  offer.version = with_.library->version();
  offer.boot = CurrentBootId();
  offer.device_uuid = with_.place.device.uuid;
  offer.spec = peer.hello.spec;
  offer.tenant = peer.hello.tenant;
  offer.plane_bytes = peer.plane_bytes;
  offer.original_bytes = peer.original_bytes;
  offer.movement_bytes = config_.in_flight_bytes / 2;
  Entry entry{peer.address, peer.hello.spec, peer.hello.tenant, std::make_shared<LinkState>(), {}};
  auto begin = [this, offer, address = peers_[peer.address].address, state = entry.state](
                   StopSignal* stop) { return Join(address, offer, state.get(), stop); };
  auto over = [this, name = peer.address, state = entry.state](const absl::Status& why) {
    if (state->was_made) with_.counters->links.fetch_sub(1, std::memory_order_relaxed);
    if (!why.ok() && !HasEndedIdle(why)) GiveUp(name, why);
  };
  entry.link = std::make_shared<NcclLink>(std::move(begin), config_.idle_ms, std::move(over));
  return entry;
}

void NcclPuller::Bury() {
  for (size_t i = links_.size(); i-- > 0;) {
    if (links_[i].link->IsOver()) EndLink(i);
  }
  // Threads of links that are over take no lock of ours any more.
  ended_.erase(
      std::remove_if(ended_.begin(), ended_.end(), [](const auto& link) { return link->IsOver(); }),
      ended_.end());
}

void NcclPuller::EndLink(size_t index) {
  links_[index].link->Stop();
  ended_.push_back(std::move(links_[index].link));
  links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(index));
}

absl::StatusOr<std::unique_ptr<NcclChannel>> NcclPuller::Join(const std::string& address,
                                                              NcclOffer offer, LinkState* state,
                                                              StopSignal* stop) {
  const int64_t deadline_ns = with_.clock->MonotonicNs() + config_.timeout_ms * kNsPerMs;
  CERTKV_ASSIGN_OR_RETURN(offer.id, with_.library->MakeId());
  CERTKV_ASSIGN_OR_RETURN(const NcclJoined joined,
                          with_.rendezvous->Join(address, offer, config_.timeout_ms));
  if (joined.movement_bytes < 1 || joined.movement_bytes > offer.movement_bytes) {
    return Contradiction(absl::StrCat("movements of ", joined.movement_bytes,
                                      " bytes, offered were ", offer.movement_bytes));
  }
  CERTKV_ASSIGN_OR_RETURN(
      std::unique_ptr<NcclChannel> channel,
      NcclChannel::Create({with_.library, with_.place, with_.clock, stop}, joined.movement_bytes));
  CERTKV_RETURN_IF_ERROR(channel->Join(offer.id, 0, deadline_ns));
  state->link_id = joined.link_id;
  state->was_made = true;
  with_.counters->links.fetch_add(1, std::memory_order_relaxed);
  with_.counters->links_made.fetch_add(1, std::memory_order_relaxed);
  return channel;
}

absl::Status NcclPuller::Bring(NcclChannel* channel, const std::string& address, int64_t link_id,
                               const std::vector<BulkTarget*>& targets) {
  const int64_t deadline_ns = with_.clock->MonotonicNs() + config_.timeout_ms * kNsPerMs;
  NcclAsk ask;
  ask.link_id = link_id;
  ask.parts = targets.front()->parts;
  for (const BulkTarget* target : targets) ask.keys.push_back(target->key);
  CERTKV_ASSIGN_OR_RETURN(const std::vector<BulkBlock> heads,
                          with_.rendezvous->Send(address, ask, config_.timeout_ms));
  CERTKV_RETURN_IF_ERROR(CheckHeads(heads, targets));
  std::vector<absl::Span<uint8_t>> spans;
  int64_t bytes = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    spans.insert(spans.end(), targets[i]->spans.begin(), targets[i]->spans.end());
    bytes += heads[i].total_bytes;
  }
  CERTKV_RETURN_IF_ERROR(channel->Receive(spans, deadline_ns));
  with_.counters->bytes_received.fetch_add(bytes, std::memory_order_relaxed);
  with_.counters->blocks_received.fetch_add(static_cast<int64_t>(heads.size()),
                                            std::memory_order_relaxed);
  for (size_t i = 0; i < heads.size(); ++i) {
    targets[i]->head = heads[i];
    targets[i]->has_head = true;
    targets[i]->received_bytes = heads[i].total_bytes;
    targets[i]->is_done = true;
  }
  return absl::OkStatus();
}

void NcclPuller::GiveUp(const std::string& peer, const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    peers_[peer].retry_ns = with_.clock->MonotonicNs() + config_.retry_ms * kNsPerMs;
  }
  Say(peer, why);
}

void NcclPuller::Say(const std::string& peer, const absl::Status& why) {
  const std::string reason = ReasonOf(why);
  with_.counters->CountFailure(reason);
  {
    absl::MutexLock lock(&mutex_);
    if (!peers_[peer].said.insert(reason).second) return;
  }
  Log(LogLevel::kWarning, "nccl_given_up",
      {{"peer", peer}, {"reason", reason}, {"message", why.message()}, {"instead", "TCP"}});
}

void NcclPuller::SayAgain(const std::string& peer) {
  absl::MutexLock lock(&mutex_);
  peers_[peer].said.clear();
}

}  // namespace certkv::kvstore
