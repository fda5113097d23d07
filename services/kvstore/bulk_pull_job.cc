#include "services/kvstore/bulk_pull_job.h"

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/common/private_file.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/bulk_detour.h"

namespace certkv::kvstore {
namespace {

namespace asio = boost::asio;

constexpr size_t kRunBlocksMax = 16;  // that a connection asks for ahead
constexpr size_t kWindowRuns = 2;     // of each connection, asked for or waiting for their parents
constexpr int32_t kAttempts = 5;      // in which nothing came
constexpr int64_t kFirstWaitMs = 20;  // doubles with each of these

// Would another connection help?
bool IsWorthAnother(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return reason == "BULK_DISCONNECTED" || reason == "BULK_FRAME_INVALID";
}

bool AreAllDone(const std::vector<BulkTarget*>& targets) {
  return std::all_of(targets.begin(), targets.end(),
                     [](const BulkTarget* target) { return target->is_done; });
}

int64_t ReceivedBytes(const std::vector<BulkTarget*>& targets) {
  int64_t bytes = 0;
  for (const BulkTarget* target : targets) bytes += target->received_bytes;
  return bytes;
}

}  // namespace

PullJob::PullJob(const BulkConfig& config, const BulkPuller::Dependencies& with,
                 std::shared_ptr<BulkPool> connections, PullRequest request, BulkPuller::Done done)
    : config_(config),
      with_(with),
      connections_(std::move(connections)),
      request_(std::move(request)),
      with_planes_(request_.order != PullOrder::kOriginalsOnly),
      with_originals_(request_.order != PullOrder::kOriginalsLater),
      done_(std::move(done)) {}

PullJob::~PullJob() {
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (!pending_[i].is_settled) Settle(i, false);
  }
  if (lost_count_ > 0) {
    Log(LogLevel::kWarning, "pull_originals_lost",
        {{"peer", request_.peer}, {"blocks", lost_count_}});
  }
  ReturnClients();
  with_.engine->EndPull(&pull_);
}

void PullJob::Begin() {
  with_.counters->pulls.fetch_add(1, std::memory_order_relaxed);
  const absl::Status status = Prepare();
  if (!status.ok()) return Answer(status);
  Pump();
}

absl::Status PullJob::Prepare() {
  absl::MutexLock lock(&mutex_);
  CERTKV_ASSIGN_OR_RETURN(pull_, with_.engine->BeginPull(request_.session, request_.keys));
  cache_ = pull_.cache;
  // Another store has another secret: its planes could not be read here.
  if (IsDithered(cache_->spec())) {
    with_planes_ = false;
    with_originals_ = true;
  }
  next_ = publish_next_ = pull_.held.size();
  end_ = request_.keys.size();
  peer_.address = request_.peer;
  CERTKV_ASSIGN_OR_RETURN(peer_.tls, connections_->CurrentTls());
  if (!config_.token_file.empty()) {
    CERTKV_ASSIGN_OR_RETURN(peer_.hello.token, ReadTokenFile(config_.token_file));
  }
  peer_.hello.spec = cache_->spec_digest();
  peer_.hello.tenant = pull_.tenant_name;
  peer_.plane_bytes = PlaneBytesOf(*cache_);
  peer_.original_bytes = OriginalBytesOf(*cache_);
  peer_.timeout_ms = config_.timeout_ms;
  const int64_t block_bytes = (with_planes_ ? peer_.plane_bytes : 0) + peer_.original_bytes;
  run_blocks_ = static_cast<size_t>(
      std::clamp<int64_t>(config_.in_flight_bytes / (config_.connections * block_bytes), 1,
                          static_cast<int64_t>(kRunBlocksMax)));
  return absl::OkStatus();
}

void PullJob::Stop() {
  is_stopped_.store(true);
  absl::MutexLock lock(&mutex_);
  for (const ClientPtr& client : clients_) client->Close();
}

absl::Status PullJob::CheckWanted(bool is_stage_two) const {
  if (is_stopped_.load()) {
    return MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                     "the store is stopping; retry when it is back");
  }
  if (!is_stage_two && request_.is_cancelled && request_.is_cancelled()) {
    return MakeError(absl::StatusCode::kCancelled, "PULL_CANCELLED",
                     "nobody waits for the pull any more; what has come stays");
  }
  return absl::OkStatus();
}

void PullJob::Answer(const absl::StatusOr<PullResult>& result) {
  BulkPuller::Done done;
  {
    absl::MutexLock lock(&mutex_);
    std::swap(done, done_);
  }
  if (!result.ok()) {
    with_.counters->pulls_failed.fetch_add(1, std::memory_order_relaxed);
    Log(LogLevel::kWarning, "pull_failed",
        {{"peer", request_.peer},
         {"reason", ReasonOf(result.status())},
         {"message", result.status().message()}});
  }
  done(result);
}

// ---- One run ----

BulkSocket::Awaitable<void> PullJob::FetchRun(std::shared_ptr<PullJob> self, ClientPtr client,
                                              std::shared_ptr<Run> run) {
  std::vector<BulkTarget*> targets;
  for (Item& item : *run) targets.push_back(&item.target);
  const bool is_stage_two = run->front().id != BlockId::kNone;
  absl::Status status = self->CheckWanted(is_stage_two);
  int32_t attempts = status.ok() ? 0 : kAttempts;
  if (status.ok() && self->with_.detour != nullptr) {
    co_await FetchByDetour(self, client, run);
    if (AreAllDone(targets)) attempts = kAttempts;
  }
  while (attempts < kAttempts) {
    const int64_t before = ReceivedBytes(targets);
    status = co_await client->Fetch(targets);
    // Also what came before a connection was cut.
    const absl::Status verified = self->Verify(run.get());
    if (status.ok() || absl::IsDataLoss(verified)) status = verified;
    if (!IsWorthAnother(status)) break;
    const absl::Status wanted = self->CheckWanted(is_stage_two);
    if (!wanted.ok()) {
      status = wanted;
      break;
    }
    attempts = ReceivedBytes(targets) > before ? 1 : attempts + 1;
    asio::steady_timer wait(client->strand());
    wait.expires_after(std::chrono::milliseconds(kFirstWaitMs << attempts));
    boost::system::error_code ignored;
    co_await wait.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  }
  self->FinishRun(client, run.get(), status);
}

BulkSocket::Awaitable<void> PullJob::FetchByDetour(std::shared_ptr<PullJob> self, ClientPtr client,
                                                   std::shared_ptr<Run> run) {
  BulkDetour* const detour = self->with_.detour;
  if (!detour->LeadsTo(self->peer_)) co_return;
  std::vector<BulkTarget*> targets;
  for (Item& item : *run) targets.push_back(&item.target);
  // Cancelled on the strand, that is after the wait has begun.
  const auto wait = std::make_shared<asio::steady_timer>(client->strand());
  wait->expires_at(asio::steady_timer::time_point::max());
  const std::function<void()> done = [wait, client] {
    asio::post(client->strand(), [wait] { wait->cancel(); });
  };
  detour->Fetch(self->peer_, targets, done);
  boost::system::error_code ignored;
  co_await wait->async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  if (self->Verify(run.get()).ok()) co_return;
  detour->Distrust(self->peer_);
  // What TCP brings has its own two attempts.
  for (Item& item : *run) item.was_damaged = false;
}

bool PullJob::IsGood(Item* item) {
  if (!IsWhole(item)) return false;
  // Of a block that is there already, the planes are too.
  if (item->id == BlockId::kNone) {
    cache_->device_memory()->CopyToDevice({item->write.device_slot});
  }
  return true;
}

bool PullJob::IsWhole(Item* item) {
  BlockWrite& write = item->write;
  const uint32_t parts = item->target.parts;
  if (item->id != BlockId::kNone && write.originals_digest != item->target.head.originals_digest) {
    return false;
  }
  write.originals_digest = item->target.head.originals_digest;
  if ((parts & kBulkOriginals) == 0) return ArePlanesOf(*cache_, write);
  if (!AreOriginalsOf(*cache_, write)) return false;
  if (item->id != BlockId::kNone) return true;  // their planes are there
  if ((parts & kBulkPlanes) != 0) {
    if (ArePlanesOf(*cache_, write)) return true;
    with_.counters->planes_rebuilt.fetch_add(1, std::memory_order_relaxed);
  }
  return RebuildPlanes(*cache_, write, with_.pool).ok();
}

absl::Status PullJob::Verify(Run* run) {
  absl::Status status;
  for (Item& item : *run) {
    if (!item.target.is_done || !item.target.status.ok() || item.is_good) continue;
    item.is_good = IsGood(&item);
    if (item.is_good) continue;
    with_.counters->blocks_damaged.fetch_add(1, std::memory_order_relaxed);
    const std::string text = absl::StrCat("block ", ToHex(item.target.key.view(), 8), " came from ",
                                          request_.peer, " otherwise than it was sealed there");
    if (item.was_damaged) {
      return MakeError(absl::StatusCode::kDataLoss, "BULK_BLOCK_DAMAGED",
                       absl::StrCat(text,
                                    ", twice; it is not taken, check that store's memory "
                                    "and the network"));
    }
    item.was_damaged = true;
    item.target.is_done = false;
    item.target.has_head = false;
    item.target.received_bytes = 0;
    status = MakeError(absl::StatusCode::kUnavailable, "BULK_DISCONNECTED", text);
  }
  return status;
}

// ---- The whole ----

absl::StatusOr<PullJob::Run> PullJob::ClaimRun() {
  auto count = static_cast<int32_t>(std::min(run_blocks_, end_ - next_));
  absl::StatusOr<std::vector<BlockWrite>> writes = with_.engine->ClaimForPull(pull_, count);
  if (!writes.ok() && count > 1) writes = with_.engine->ClaimForPull(pull_, 1);
  if (!writes.ok()) return writes.status();
  SlotPool::BeginWrite();
  Run run(writes->size());
  for (Item& item : run) {
    item.index = next_++;
    item.write = (*writes)[static_cast<size_t>(&item - run.data())];
    item.write.key = request_.keys[item.index];
    item.target.key = item.write.key;
    item.target.parts = (with_planes_ ? kBulkPlanes : 0u) | (with_originals_ ? kBulkOriginals : 0u);
    item.target.spans = PayloadSpans(*cache_, item.write, with_planes_, with_originals_);
  }
  return run;
}

PullJob::Run PullJob::PendingRun() {
  Run run(std::min(run_blocks_, pending_.size() - next_));
  for (Item& item : run) {
    item.index = next_++;
    item.id = pending_[item.index].id;
    item.write = pending_[item.index].write;
    item.target.key = item.write.key;
    item.target.parts = kBulkOriginals;
    item.target.spans = PayloadSpans(*cache_, item.write, false, true);
  }
  return run;
}

PullJob::ClientPtr PullJob::NextClient() {
  if (!idle_.empty()) {
    ClientPtr client = idle_.back();
    idle_.pop_back();
    return client;
  }
  if (clients_.size() == static_cast<size_t>(config_.connections)) return nullptr;
  clients_.push_back(connections_->Take(peer_));
  return clients_.back();
}

void PullJob::ReturnClients() {
  for (const ClientPtr& client : clients_) connections_->Return(client);
  clients_.clear();
  idle_.clear();
}

bool PullJob::StartRun() {
  ClientPtr client = NextClient();
  if (client == nullptr) return false;
  std::shared_ptr<Run> run;
  if (is_stage_two_) {
    run = std::make_shared<Run>(PendingRun());
  } else {
    absl::StatusOr<Run> claimed = ClaimRun();
    if (!claimed.ok()) {
      // Slots of what is on its way will do, if there is something.
      if (running_ == 0) EndChainAt(next_, claimed.status());
      idle_.push_back(std::move(client));
      return false;
    }
    run = std::make_shared<Run>(*std::move(claimed));
  }
  ++running_;
  asio::co_spawn(client->strand(), FetchRun(shared_from_this(), client, std::move(run)),
                 asio::detached);
  return true;
}

void PullJob::Pump() {
  absl::StatusOr<PullResult> result = PullResult{};
  {
    absl::MutexLock lock(&mutex_);
    // Blocks that wait for one before them hold slots: so many, and no more.
    const size_t window = kWindowRuns * static_cast<size_t>(config_.connections) * run_blocks_;
    const size_t last = is_stage_two_ ? pending_.size() : std::min(end_, publish_next_ + window);
    while (next_ < last && StartRun()) {
    }
    // Stage two without pending blocks ends with the job's last reference.
    if (running_ > 0 || is_stage_two_) return;
    result = EndStageOne();
  }
  Answer(result);
  Pump();
}

absl::StatusOr<PullResult> PullJob::EndStageOne() {
  // What came after a gap has no parent.
  for (const auto& [index, block] : arrived_) with_.engine->ReturnPulled(pull_, {block.write});
  arrived_.clear();
  is_stage_two_ = true;
  next_ = 0;
  // Before the answer, so that who asks next finds them.
  if (pending_.empty()) ReturnClients();
  if (!error_.ok()) return error_;
  return result_;
}

void PullJob::FinishRun(ClientPtr client, Run* run, const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    --running_;
    for (Item& item : *run) Take(&item, status);
    PublishArrived();
    idle_.push_back(std::move(client));
  }
  Pump();
}

void PullJob::Take(Item* item, const absl::Status& status) {
  if (is_stage_two_) return Settle(item->index, item->is_good);
  absl::Status error;
  if (!item->is_good) error = item->target.status.ok() ? status : item->target.status;
  CERTKV_CHECK(item->is_good || !error.ok(), "what did not come has a reason");
  const BulkBlock& head = item->target.head;
  if (error.ok() && item->index > 0 && head.parent != request_.keys[item->index - 1]) {
    error = MakeError(absl::StatusCode::kInvalidArgument, "PARENT_MISMATCH",
                      absl::StrCat("block ", ToHex(head.key.view(), 8), " comes after ",
                                   ToHex(head.parent.view(), 8),
                                   " at the peer, and not after the key before it in the call; "
                                   "name the blocks of one chain in order"));
  }
  if (error.ok() && item->index < end_) {
    arrived_[item->index] =
        PulledBlock{item->write, head.parent, head.seal_time_ms, !with_originals_};
    return;
  }
  with_.engine->ReturnPulled(pull_, {item->write});
  if (!error.ok()) EndChainAt(item->index, error);
}

void PullJob::Settle(size_t pending, bool is_there) {
  pending_[pending].is_settled = true;
  if (is_there) return with_.engine->CompletePulled(pull_, pending_[pending].id);
  ++lost_count_;
  with_.counters->originals_lost.fetch_add(1, std::memory_order_relaxed);
  with_.engine->AbandonPulled(pull_, pending_[pending].id);
}

void PullJob::EndChainAt(size_t index, const absl::Status& error) {
  if (index >= end_) return;
  end_ = index;
  // What the peer does not have ends the chain, as in a lookup.
  error_ = ReasonOf(error) == "BLOCK_NOT_FOUND" ? absl::OkStatus() : error;
}

void PullJob::PublishArrived() {
  while (!arrived_.empty() && arrived_.begin()->first == publish_next_ && publish_next_ < end_) {
    const PulledBlock block = arrived_.begin()->second;
    arrived_.erase(arrived_.begin());
    const absl::StatusOr<PublishedBlock> published = with_.engine->PublishPulled(&pull_, block);
    if (!published.ok()) return EndChainAt(publish_next_, published.status());
    ++publish_next_;
    if (!published->is_new) continue;
    ++result_.pulled_count;
    result_.pulled_bytes += (with_planes_ ? PlaneBytesOf(*cache_) : 0) +
                            (with_originals_ ? OriginalBytesOf(*cache_) : 0);
    if (block.is_pending) pending_.push_back({published->id, block.write, false});
  }
}

}  // namespace certkv::kvstore
