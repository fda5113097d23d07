#include "services/gate/service_store.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "services/common/errors.h"
#include "services/common/private_file.h"

namespace certkv::gate {
namespace {

constexpr int64_t kIntervalNs = 1'000'000'000;
constexpr std::chrono::milliseconds kTimeout{2000};

StoreSummary SummaryOf(const kvstore::v1::Stats& stats) {
  StoreSummary summary;
  summary.known = true;
  for (const auto& cache : stats.caches()) {
    summary.caches.push_back(
        {.description = cache.description(),
         .device_used_bytes = cache.device_slots_used() * cache.device_slot_bytes(),
         .device_capacity_bytes = cache.device_slot_count() * cache.device_slot_bytes(),
         .device_block_bytes = cache.device_slot_bytes(),
         .backing_used_bytes = cache.backing_slots_used() * cache.backing_slot_bytes(),
         .backing_capacity_bytes = cache.backing_slot_count() * cache.backing_slot_bytes(),
         .backing_block_bytes = cache.backing_slot_bytes(),
         .blocks_leased = cache.blocks_leased(),
         .blocks_pinned = cache.blocks_pinned()});
  }
  if (stats.has_spill()) summary.disk_bytes = stats.spill().bytes();
  summary.session_count = stats.session_count();
  summary.lease_count = stats.lease_count();
  summary.blocks_asked = stats.lookup_blocks_asked();
  summary.blocks_found = stats.lookup_blocks_found();
  return summary;
}

}  // namespace

class StoreWatcher::Core : public std::enable_shared_from_this<StoreWatcher::Core> {
 public:
  Core(const std::string& socket, std::string token_file, const Clock* clock)
      : clock_(clock),
        token_file_(std::move(token_file)),
        stub_(kvstore::v1::KvStore::NewStub(grpc::CreateChannel(
            absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()))) {}

  StoreSummary Latest() {
    bool asks = false;
    StoreSummary latest;
    {
      absl::MutexLock lock(&mutex_);
      latest = latest_;
      const int64_t now_ns = clock_->MonotonicNs();
      asks = call_ == nullptr && !stopped_ && (asked_ns_ == 0 || now_ns - asked_ns_ >= kIntervalNs);
      if (asks) {
        asked_ns_ = now_ns;
        call_ = std::make_shared<Call>();
      }
    }
    if (asks) Ask();
    return latest;
  }

  void Stop() {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    if (call_ != nullptr) call_->context.TryCancel();
    mutex_.Await(absl::Condition(
        +[](Core* core) { return core->call_ == nullptr; }, this));
  }

 private:
  struct Call {
    grpc::ClientContext context;
    kvstore::v1::GetStatsRequest request;
    kvstore::v1::Stats response;
  };

  void Ask() {
    std::shared_ptr<Call> call;
    {
      absl::MutexLock lock(&mutex_);
      call = call_;
    }
    if (!token_file_.empty()) {
      const absl::StatusOr<std::string> token = ReadTokenFile(token_file_);
      if (!token.ok()) return Take(*call, token.status());
      call->context.AddMetadata("authorization", "Bearer " + *token);
    }
    call->context.set_deadline(std::chrono::system_clock::now() + kTimeout);
    stub_->async()->GetStats(&call->context, &call->request, &call->response,
                             [self = shared_from_this(), call](const grpc::Status& status) {
                               self->Take(*call, FromGrpcStatus(status));
                             });
  }
  void Take(const Call& call, const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    if (status.ok()) {
      latest_ = SummaryOf(call.response);
    } else {
      latest_ = {};
      latest_.error = absl::StrCat("the store does not tell its capacity: ", status.message());
    }
    call_ = nullptr;
  }

  const Clock* const clock_;
  const std::string token_file_;
  const std::unique_ptr<kvstore::v1::KvStore::Stub> stub_;
  absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t asked_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<Call> call_ ABSL_GUARDED_BY(mutex_);  // the one that runs
  StoreSummary latest_ ABSL_GUARDED_BY(mutex_);
};

StoreWatcher::StoreWatcher(const std::string& socket, const std::string& token_file,
                           const Clock* clock)
    : core_(std::make_shared<Core>(socket, token_file, clock)) {}

StoreWatcher::~StoreWatcher() { core_->Stop(); }

StoreSummary StoreWatcher::Latest() { return core_->Latest(); }

}  // namespace certkv::gate
