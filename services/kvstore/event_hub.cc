#include "services/kvstore/event_hub.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {

absl::StatusOr<std::optional<BlockEvent>> EventSubscription::Take() {
  absl::MutexLock lock(&mutex_);
  if (overflowed_) {
    return MakeError(absl::StatusCode::kResourceExhausted, "EVENTS_LOST",
                     absl::StrCat("the watcher fell ", queue_limit_,
                                  " events behind, the limit of its queue; watch again and list "
                                  "the blocks anew"));
  }
  if (queue_.empty()) {
    if (closed_) {
      return MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                       "the store is stopping; watch again when it is back");
    }
    waiting_ = true;
    return std::optional<BlockEvent>();
  }
  const BlockEvent event = queue_.front();
  queue_.pop_front();
  return std::optional<BlockEvent>(event);
}

void EventSubscription::Append(const BlockEvent& event) {
  if (cache_ != CacheId{} && cache_ != event.cache) return;
  absl::MutexLock lock(&mutex_);
  if (overflowed_ || closed_) return;
  if (static_cast<int32_t>(queue_.size()) >= queue_limit_) {
    overflowed_ = true;
    queue_.clear();
    return;
  }
  queue_.push_back(event);
}

void EventSubscription::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

void EventSubscription::NotifyIfWaiting() {
  {
    absl::MutexLock lock(&mutex_);
    const bool has_news = !queue_.empty() || overflowed_ || closed_;
    if (!waiting_ || !has_news) return;
    waiting_ = false;
  }
  notify_();
}

absl::StatusOr<std::shared_ptr<EventSubscription>> EventHub::Subscribe(
    CacheId cache, EventCursor cursor, std::function<void()> notify) {
  absl::MutexLock lock(&mutex_);
  CERTKV_ASSIGN_OR_RETURN(std::deque<BlockEvent> missed, EventsAfter(cursor, cache));
  const int64_t start = cursor.store_id == 0 ? sequence_ : cursor.sequence;
  auto subscription = std::make_shared<EventSubscription>(
      cache, EventCursor{store_id_, start}, std::move(missed), queue_limit_, std::move(notify));
  const auto count = static_cast<int32_t>(Subscriptions().size());
  if (count >= watcher_limit_) {
    return MakeError(absl::StatusCode::kResourceExhausted, "WATCHER_LIMIT",
                     absl::StrCat("the store has ", count, " event watchers, at most ",
                                  watcher_limit_, "; end one or raise watcher_limit"));
  }
  if (closed_) subscription->Close();
  subscriptions_.push_back(subscription);
  return subscription;
}

absl::StatusOr<std::deque<BlockEvent>> EventHub::EventsAfter(EventCursor cursor,
                                                             CacheId cache) const {
  std::deque<BlockEvent> missed;
  if (cursor.store_id == 0) return missed;
  if (cursor.store_id != store_id_) {
    return MakeError(absl::StatusCode::kOutOfRange, "EVENTS_GONE",
                     absl::StrCat("the events after ", cursor.sequence, " were those of store ",
                                  cursor.store_id, ", this is ", store_id_,
                                  ": it was started again; watch from now on and list the blocks"));
  }
  const int64_t first_kept = sequence_ - static_cast<int64_t>(history_.size()) + 1;
  if (cursor.sequence < first_kept - 1 || cursor.sequence > sequence_) {
    return MakeError(absl::StatusCode::kOutOfRange, "EVENTS_GONE",
                     absl::StrCat("the events after ", cursor.sequence, " are not kept, but those ",
                                  "from ", first_kept, " to ", sequence_,
                                  "; watch from now on and list the blocks, or raise "
                                  "event_history_limit"));
  }
  for (size_t i = cursor.sequence + 1 - first_kept; i < history_.size(); ++i) {
    if (cache == CacheId{} || cache == history_[i].cache) missed.push_back(history_[i]);
  }
  return missed;
}

void EventHub::Append(BlockEventKind kind, CacheId cache, const BlockKey& key, int64_t time_ms) {
  absl::MutexLock lock(&mutex_);
  const BlockEvent event{kind, cache, key, ++sequence_, time_ms, store_id_};
  history_.push_back(event);
  if (static_cast<int32_t>(history_.size()) > history_limit_) history_.pop_front();
  for (const auto& weak : subscriptions_) {
    if (const auto subscription = weak.lock()) {
      subscription->Append(event);
      has_news_ = true;
    }
  }
}

void EventHub::Notify() {
  std::vector<std::shared_ptr<EventSubscription>> subscriptions;
  {
    absl::MutexLock lock(&mutex_);
    if (!has_news_) return;
    has_news_ = false;
    subscriptions = Subscriptions();
  }
  for (const auto& subscription : subscriptions) subscription->NotifyIfWaiting();
}

void EventHub::CloseAll() {
  std::vector<std::shared_ptr<EventSubscription>> subscriptions;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    subscriptions = Subscriptions();
  }
  for (const auto& subscription : subscriptions) {
    subscription->Close();
    subscription->NotifyIfWaiting();
  }
}

std::vector<std::shared_ptr<EventSubscription>> EventHub::Subscriptions() {
  std::vector<std::shared_ptr<EventSubscription>> live;
  subscriptions_.erase(std::remove_if(subscriptions_.begin(), subscriptions_.end(),
                                      [&live](const auto& weak) {
                                        auto subscription = weak.lock();
                                        if (subscription == nullptr) return true;
                                        live.push_back(std::move(subscription));
                                        return false;
                                      }),
                       subscriptions_.end());
  return live;
}

}  // namespace certkv::kvstore
