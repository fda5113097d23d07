#include "services/kvstore/service_watch.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "services/common/errors.h"
#include "services/kvstore/convert.h"

namespace certkv::kvstore {
namespace {

// Invariants:
//  1. At most one write is under way; the next starts when it is done.
//  2. Finish is called once, and nothing after it.
class WatchReactor : public grpc::ServerWriteReactor<v1::BlockEvent> {
 public:
  WatchReactor(const absl::Status& status, EventHub* hub, CacheId cache, EventCursor cursor,
               absl::string_view domain)
      : domain_(domain) {
    if (!status.ok()) {
      is_finished_ = true;
      Finish(ToGrpcStatus(status, domain_));
      return;
    }
    // The hub may still be calling when the stream is done and this object gone.
    auto subscription = hub->Subscribe(cache, cursor, [life = life_] {
      absl::MutexLock lock(&life->mutex);
      if (life->reactor != nullptr) life->reactor->WriteNext();
    });
    absl::MutexLock lock(&life_->mutex);
    life_->reactor = this;
    if (!subscription.ok()) {
      FinishOnce(ToGrpcStatus(subscription.status(), domain_));
      return;
    }
    subscription_ = *std::move(subscription);
    message_.set_kind(v1::BlockEvent::KIND_BEGUN);
    message_.set_store_id(subscription_->start().store_id);
    message_.set_sequence(subscription_->start().sequence);
    is_writing_ = true;
    StartWrite(&message_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&life_->mutex);
    is_writing_ = false;
    ok ? WriteNext() : FinishOnce(grpc::Status::CANCELLED);
  }

  void OnCancel() override {
    absl::MutexLock lock(&life_->mutex);
    is_cancelled_ = true;
    if (!is_writing_) FinishOnce(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    {
      absl::MutexLock lock(&life_->mutex);
      life_->reactor = nullptr;
    }
    delete this;
  }

 private:
  struct Life {
    absl::Mutex mutex;  // guards the reactor's fields too
    WatchReactor* reactor ABSL_GUARDED_BY(mutex) = nullptr;
  };

  // The mutex is held.
  void WriteNext() {
    if (is_finished_ || is_writing_) return;
    if (is_cancelled_) return FinishOnce(grpc::Status::CANCELLED);
    const absl::StatusOr<std::optional<BlockEvent>> event = subscription_->Take();
    if (!event.ok()) return FinishOnce(ToGrpcStatus(event.status(), domain_));
    if (!event->has_value()) return;  // the hub calls when there is one
    BlockEventToProto(**event, &message_);
    is_writing_ = true;
    StartWrite(&message_);
  }

  // The mutex is held.
  void FinishOnce(const grpc::Status& status) {
    if (is_finished_) return;
    is_finished_ = true;
    Finish(status);
  }

  const absl::string_view domain_;
  const std::shared_ptr<Life> life_ = std::make_shared<Life>();
  std::shared_ptr<EventSubscription> subscription_;
  v1::BlockEvent message_;
  bool is_writing_ = false;
  bool is_cancelled_ = false;
  bool is_finished_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::BlockEvent>* StartWatch(const absl::Status& status, EventHub* hub,
                                                     CacheId cache, EventCursor cursor,
                                                     absl::string_view domain) {
  return new WatchReactor(status, hub, cache, cursor, domain);
}

}  // namespace certkv::kvstore
