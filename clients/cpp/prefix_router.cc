#include "clients/cpp/prefix_router.h"

#include <algorithm>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "clients/cpp/rpc.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

namespace v1 = certkv::kvstore::v1;

constexpr int32_t kPageSize = 1000;
constexpr int64_t kRetryMs = 500;

absl::Status CheckNodes(const std::vector<RoutedNode>& nodes) {
  std::set<std::string> names;
  for (const RoutedNode& node : nodes) {
    if (!node.name.empty() && !node.target.empty() && names.insert(node.name).second) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, "NODE_INVALID",
                     absl::StrCat("node \"", node.name, "\" at \"", node.target,
                                  "\" has no name or target, or the name of another; each node "
                                  "has both, and a name of its own"));
  }
  return absl::OkStatus();
}

}  // namespace

// Two threads: one reads events, the other lists whenever the events ask for it.
class PrefixRouter::Follower {
 public:
  Follower(const Options& options, const RoutedNode& node) : node_(node), options_(options) {
    options_.kvstore_target = node.target;
    reader_ = std::thread([this] { Read(); });
    lister_ = std::thread([this] { List(); });
  }
  ~Follower() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      if (context_ != nullptr) context_->TryCancel();
    }
    reader_.join();
    lister_.join();
  }

  const RoutedNode& node() const { return node_; }
  PrefixScore Score(absl::Span<const BlockKey> chain) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return {node_.name, index_.Count(chain), is_watching_ && index_.is_complete()};
  }

 private:
  void Read() ABSL_LOCKS_EXCLUDED(mutex_) {
    const auto stub = v1::KvStore::NewStub(MakeChannel(node_.target, options_));
    while (ReadOnce(*stub)) {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(kRetryMs));
    }
  }

  // One stream from its begin to its end; false when it is to stop.
  bool ReadOnce(v1::KvStore::Stub& stub) ABSL_LOCKS_EXCLUDED(mutex_) {
    grpc::ClientContext context;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return false;
      context_ = &context;
    }
    const bool is_fresh = cursor_.store_id() == 0;
    const auto stream = stub.WatchBlockEvents(&context, cursor_);
    v1::BlockEvent event;
    // The first message says that it has begun: a list from now on misses nothing.
    for (bool is_first = true; stream->Read(&event); is_first = false) {
      cursor_.set_store_id(event.store_id());
      cursor_.set_after_sequence(event.sequence());
      if (is_first && is_fresh) AskForList();
      absl::MutexLock lock(&mutex_);
      is_watching_ = true;
      index_.Apply(event);
    }
    if (ReasonOf(FromGrpcStatus(stream->Finish())) == "EVENTS_GONE") cursor_.Clear();
    absl::MutexLock lock(&mutex_);
    is_watching_ = false;
    context_ = nullptr;
    return !stopping_;
  }

  void AskForList() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    index_.BeginList();
    ++list_wanted_;
  }
  void List() ABSL_LOCKS_EXCLUDED(mutex_) {
    StoreClient store(options_);
    for (int64_t listed = 0;;) {
      {
        absl::MutexLock lock(&mutex_);
        const auto has_work = [this, listed] { return stopping_ || list_wanted_ != listed; };
        mutex_.Await(absl::Condition(&has_work));
        if (stopping_) return;
        listed = list_wanted_;
      }
      ListOnce(store, listed);
    }
  }

  void ListOnce(StoreClient& store, int64_t wanted) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::string page_token;
    do {
      const auto page = store.ListBlocks(CacheId{}, kPageSize, page_token);
      absl::MutexLock lock(&mutex_);
      if (stopping_ || list_wanted_ != wanted) return;
      if (!page.ok()) {
        // The stream ends too if the store is gone; if it does not, the list is asked for again.
        index_.BeginList();
        ++list_wanted_;
        mutex_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(kRetryMs));
        return;
      }
      for (const v1::Block& block : page->blocks()) index_.AddListed(block);
      page_token = page->next_page_token();
      if (page_token.empty()) index_.EndList();
    } while (!page_token.empty());
  }

  const RoutedNode node_;
  Options options_;
  v1::WatchBlockEventsRequest cursor_;  // of the reading thread
  mutable absl::Mutex mutex_;
  PrefixIndex index_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the stream that runs
  bool is_watching_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t list_wanted_ ABSL_GUARDED_BY(mutex_) = 0;  // lists asked for so far
  std::thread reader_;
  std::thread lister_;
};

absl::StatusOr<std::unique_ptr<PrefixRouter>> PrefixRouter::Start(
    const Options& options, const std::vector<RoutedNode>& nodes) {
  CERTKV_RETURN_IF_ERROR(CheckAccess(options));
  auto router = std::unique_ptr<PrefixRouter>(new PrefixRouter(options));
  CERTKV_RETURN_IF_ERROR(router->SetNodes(nodes));
  return router;
}

PrefixRouter::PrefixRouter(const Options& options) : options_(options) {}
PrefixRouter::~PrefixRouter() = default;

absl::Status PrefixRouter::SetNodes(const std::vector<RoutedNode>& nodes) {
  CERTKV_RETURN_IF_ERROR(CheckNodes(nodes));
  std::map<std::string, std::unique_ptr<Follower>> followers;
  std::map<std::string, std::unique_ptr<Follower>> ended;  // outside the lock: it joins threads
  {
    absl::MutexLock lock(&mutex_);
    for (const RoutedNode& node : nodes) {
      std::unique_ptr<Follower>& follower = followers_[node.name];
      if (follower == nullptr || !(follower->node() == node)) {
        ended[node.name] = std::move(follower);
        follower = std::make_unique<Follower>(options_, node);
      }
      followers[node.name] = std::move(follower);
      followers_.erase(node.name);
    }
    followers_.swap(followers);
  }
  return absl::OkStatus();
}

std::vector<PrefixScore> PrefixRouter::Score(absl::Span<const BlockKey> chain) const {
  std::vector<PrefixScore> scores;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& [name, follower] : followers_) scores.push_back(follower->Score(chain));
  }
  const auto rank = [](const PrefixScore& score) {
    const PrefixCounts& counts = score.counts;
    return std::make_tuple(-counts.memory_blocks, -counts.device_blocks, -counts.stored_blocks);
  };
  std::stable_sort(
      scores.begin(), scores.end(),
      [&rank](const PrefixScore& a, const PrefixScore& b) { return rank(a) < rank(b); });
  return scores;
}

}  // namespace certkv::client
