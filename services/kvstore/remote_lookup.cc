#include "services/kvstore/remote_lookup.h"

#include <chrono>

namespace certkv::kvstore {

void RemoteLookup::Start(const Dependencies& with, SessionId session, std::vector<BlockKey> keys,
                         int64_t lease_duration_ms, LeasedBlocks local, Done done) {
  const std::shared_ptr<RemoteLookup> lookup(new RemoteLookup(
      with, session, std::move(keys), lease_duration_ms, std::move(local), std::move(done)));
  if (!lookup->sources_.empty()) {
    lookup->timer_.expires_after(std::chrono::milliseconds(with.link->wait_ms()));
    lookup->timer_.async_wait([lookup](const boost::system::error_code& error) {
      if (!error) lookup->Answer(&ClusterCounters::timed_out);
    });
  }
  lookup->PullFromNext();
}

RemoteLookup::RemoteLookup(const Dependencies& with, SessionId session, std::vector<BlockKey> keys,
                           int64_t lease_duration_ms, LeasedBlocks local, Done done)
    : with_(with),
      session_(session),
      keys_(std::move(keys)),
      lease_duration_ms_(lease_duration_ms),
      sources_(with.link->SourcesFor(keys_.front())),
      timer_(*with.io_context),
      found_(std::move(local)),
      done_(std::move(done)) {}

void RemoteLookup::PullFromNext() {
  if (next_source_ == sources_.size()) {
    Answer(has_pulled_   ? &ClusterCounters::extended
           : has_failed_ ? &ClusterCounters::failed
                         : &ClusterCounters::nothing);
    return;
  }
  const std::string source = sources_[next_source_++];
  PullRequest request;
  request.session = session_;
  request.peer = source;
  request.is_member = true;
  request.keys = keys_;
  with_.bulk->Pull(std::move(request), [self = shared_from_this(), source](const auto& pulled) {
    self->TakeResult(source, pulled);
  });
}

void RemoteLookup::TakeResult(const std::string& source, const absl::StatusOr<PullResult>& pulled) {
  with_.link->NoteAnswer(source, pulled.status());
  // A node that does not know the cache has answered well: it has nothing.
  has_failed_ = has_failed_ || !(pulled.ok() || absl::IsNotFound(pulled.status()));
  // What an ended pull had published stays, too.
  const bool came = !pulled.ok() || pulled->pulled_count > 0;
  if (pulled.ok()) with_.link->counters()->blocks.fetch_add(pulled->pulled_count);
  if (came && LookAgain()) {
    Answer(&ClusterCounters::extended);
    return;
  }
  PullFromNext();
}

bool RemoteLookup::LookAgain() {
  absl::StatusOr<LeasedBlocks> again =
      with_.engine->LookupAndLease(session_, keys_, lease_duration_ms_);
  if (!again.ok()) return false;
  LeaseId unneeded = again->lease;
  bool is_whole = false;
  {
    absl::MutexLock lock(&mutex_);
    if (done_ != nullptr && again->blocks.size() > found_.blocks.size()) {
      unneeded = found_.lease;
      found_ = *std::move(again);
      has_pulled_ = true;
      is_whole = found_.blocks.size() == keys_.size();
    }
  }
  if (unneeded != LeaseId{}) with_.engine->ReleaseLease(session_, unneeded).IgnoreError();
  return is_whole;
}

void RemoteLookup::Answer(std::atomic<int64_t> ClusterCounters::*count) {
  Done done;
  LeasedBlocks found;
  {
    absl::MutexLock lock(&mutex_);
    if (done_ == nullptr) return;  // and the server may have ended since
    done.swap(done_);
    found = std::move(found_);
  }
  (with_.link->counters()->*count).fetch_add(1, std::memory_order_relaxed);
  timer_.cancel();
  done(std::move(found));
}

}  // namespace certkv::kvstore
