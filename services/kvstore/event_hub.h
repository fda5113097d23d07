// EventHub: tells watchers what happens to blocks, in order, without ever waiting for them.
#ifndef CERTKV_SERVICES_KVSTORE_EVENT_HUB_H_
#define CERTKV_SERVICES_KVSTORE_EVENT_HUB_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"

namespace certkv::kvstore {

enum class BlockEventKind : uint8_t {
  kSealed = 1,
  kDemoted = 2,
  kPromoted = 3,
  kEvicted = 4,
  kDropped = 5,
  kLost = 6,
  kSpilled = 7,
  kRestored = 8,
};

struct BlockEvent {
  BlockEventKind kind = BlockEventKind::kSealed;
  CacheId cache{};
  BlockKey key;
  int64_t sequence = 0;  // rises by one per event of the store
  int64_t time_ms = 0;   // Unix epoch
  int64_t store_id = 0;  // of the hub; another one after each start
};

// The last event that a watcher has.
struct EventCursor {
  int64_t store_id = 0;  // 0: none; from now on
  int64_t sequence = 0;
};

// One watcher's queue.
//
// Invariant: Take() gives every event of its cache after the cursor that Subscribe() got, in order
// and without a gap, or an error from then on.
// Threads: all calls are safe concurrently.
class EventSubscription {
 public:
  // `missed` come first and do not count to the limit.
  EventSubscription(CacheId cache, EventCursor start, std::deque<BlockEvent> missed,
                    int32_t queue_limit, std::function<void()> notify)
      : cache_(cache),
        start_(start),
        queue_limit_(queue_limit + static_cast<int32_t>(missed.size())),
        notify_(std::move(notify)),
        queue_(std::move(missed)) {}

  // Before the first event that it gives.
  EventCursor start() const { return start_; }
  // The next event; nullopt when there is none yet, and then `notify` is called once when one
  // comes. Errors: ResourceExhausted [EVENTS_LOST], the queue was full; Unavailable
  // [STORE_STOPPING].
  absl::StatusOr<std::optional<BlockEvent>> Take() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class EventHub;
  void Append(const BlockEvent& event) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `notify` when a Take() is waiting for news.
  void NotifyIfWaiting() ABSL_LOCKS_EXCLUDED(mutex_);

  const CacheId cache_;  // 0: all
  const EventCursor start_;
  const int32_t queue_limit_;
  const std::function<void()> notify_;
  absl::Mutex mutex_;
  std::deque<BlockEvent> queue_ ABSL_GUARDED_BY(mutex_);
  bool overflowed_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool waiting_ ABSL_GUARDED_BY(mutex_) = false;
};

// Threads: all calls are safe concurrently. Lock order: the engine's lock, the hub's, a
// subscription's. `notify` is called with none of them held.
class EventHub {
 public:
  // At most `watcher_limit` subscriptions of `queue_limit` events each; the last `history_limit`
  // events are kept for watchers that come back. `store_id` > 0 is another one in each process.
  EventHub(int32_t watcher_limit, int32_t queue_limit, int32_t history_limit, int64_t store_id)
      : watcher_limit_(watcher_limit),
        queue_limit_(queue_limit),
        history_limit_(history_limit),
        store_id_(store_id) {}

  // Events after `cursor` of `cache`, or of all caches when it is 0. The subscription ends when the
  // last pointer to it goes. Errors: ResourceExhausted [WATCHER_LIMIT]; OutOfRange [EVENTS_GONE],
  // not all of these are kept.
  absl::StatusOr<std::shared_ptr<EventSubscription>> Subscribe(CacheId cache, EventCursor cursor,
                                                               std::function<void()> notify)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Queues an event; never blocks for a watcher. Call Notify() once no lock is held.
  void Append(BlockEventKind kind, CacheId cache, const BlockKey& key, int64_t time_ms)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Notify() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends every subscription: what is queued is still given, then Unavailable.
  void CloseAll() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  std::vector<std::shared_ptr<EventSubscription>> Subscriptions()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::deque<BlockEvent>> EventsAfter(EventCursor cursor, CacheId cache) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int32_t watcher_limit_;
  const int32_t queue_limit_;
  const int32_t history_limit_;
  const int64_t store_id_;
  absl::Mutex mutex_;
  std::deque<BlockEvent> history_ ABSL_GUARDED_BY(mutex_);  // of consecutive sequences, to the last
  int64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_news_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<EventSubscription>> subscriptions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_EVENT_HUB_H_
