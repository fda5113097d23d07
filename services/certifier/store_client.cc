#include "services/certifier/store_client.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/check.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/status.h"
#include "services/common/call_trace.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"
#include "services/common/private_file.h"
#include "services/common/wire_version.h"

namespace certkv::certifier {
namespace {

namespace v1 = certkv::kvstore::v1;

constexpr absl::string_view kReaderName = "certifier";
// A store that comes back is found again within about this time.
constexpr int kReconnectBackoffMaxMs = 500;
constexpr int kStatsAttemptsMax = 3;
// Detaching is a courtesy: the session ends with its socket anyway.
constexpr int64_t kDetachTimeoutMs = 200;
// Views that may wait for the store at a time.
constexpr size_t kWaitingMax = 4096;

absl::Status Unreachable(absl::string_view what) {
  return MakeError(absl::StatusCode::kUnavailable, "STORE_UNREACHABLE",
                   absl::StrCat(what,
                                "; is certkv-kvstore running, and is certifier.store_socket "
                                "its socket?"));
}

// A connection that failed is the store being away; what the store says itself is passed on.
absl::Status StoreError(const absl::Status& status, absl::string_view what) {
  if (!ReasonOf(status).empty() && ReasonOf(status) != "SOCKET_CLOSED" &&
      ReasonOf(status) != "SOCKET_CONNECT_FAILED") {
    return status;
  }
  return Unreachable(absl::StrCat(what, ": ", status.message()));
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectBackoffMaxMs);
  return grpc::CreateCustomChannel(absl::StrCat("unix:", socket),
                                   grpc::InsecureChannelCredentials(), arguments);
}

// One exchange on a descriptor socket: `fd_count` descriptors, or the store's error.
struct Descriptors {
  FdReply reply;
  std::vector<UniqueFd> fds;
};
absl::StatusOr<Descriptors> AskForDescriptors(int socket, const FdRequest& request, size_t fd_count,
                                              int64_t timeout_ms) {
  const absl::string_view bytes(reinterpret_cast<const char*>(&request), sizeof(request));
  CERTKV_RETURN_IF_ERROR(SendWithFds(socket, bytes, {}));
  CERTKV_ASSIGN_OR_RETURN(BytesWithFds received,
                          ReceiveWithFds(socket, sizeof(FdReply), timeout_ms));
  Descriptors descriptors;
  std::memcpy(&descriptors.reply, received.bytes.data(), sizeof(FdReply));
  FdReply& reply = descriptors.reply;
  reply.reason[sizeof(reply.reason) - 1] = 0;
  reply.message[sizeof(reply.message) - 1] = 0;
  if (reply.magic != kFdMagic) {
    return Unreachable("the descriptor socket answered with something else than an FdReply");
  }
  if (reply.code != 0) {
    const std::string reason(reply.reason);
    return MakeError(static_cast<absl::StatusCode>(reply.code),
                     reason.empty() ? "STORE_UNREACHABLE" : reason, reply.message);
  }
  if (received.fds.size() != fd_count) {
    return Unreachable(absl::StrCat("the store handed over ", received.fds.size(),
                                    " descriptors, expected ", fd_count));
  }
  descriptors.fds = std::move(received.fds);
  return descriptors;
}

// Why the store ended the session of a connection that is closed; "" when it said nothing, because
// it is gone.
std::string LastWords(int socket) {
  FdReply reply{};
  const ssize_t count = recv(socket, &reply, sizeof(reply), MSG_DONTWAIT);
  reply.reason[sizeof(reply.reason) - 1] = 0;
  reply.message[sizeof(reply.message) - 1] = 0;
  const bool is_whole = count == static_cast<ssize_t>(sizeof(reply)) && reply.magic == kFdMagic;
  return is_whole && std::string(reply.reason) == kFdSessionEnded ? reply.message : "";
}

}  // namespace

class StoreClient::Impl {
 public:
  explicit Impl(StoreClientOptions options)
      : options_(std::move(options)),
        stub_(v1::KvStore::NewStub(MakeChannel(options_.store_socket))),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    CERTKV_CHECK(wake_.valid(), "the process has a descriptor left for an eventfd");
    asker_ = std::thread([this] { Ask(); });
    watcher_ = std::thread([this] { Watch(); });
  }

  ~Impl() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      if (context_ != nullptr) context_->TryCancel();
    }
    Wake();
    asker_.join();
    watcher_.join();
    absl::MutexLock lock(&mutex_);
    for (const auto& [owner, attachment] : attachments_) {
      attachment->cache->MarkDead();
      v1::DetachWorkerRequest request;
      request.set_session_id(attachment->session_id);
      v1::DetachWorkerResponse response;
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::milliseconds(kDetachTimeoutMs));
      stub_->DetachWorker(&context, request, &response);  // the closing socket says it too
    }
  }

  void Acquire(const CacheOwner& owner, int64_t staging_id, Done done,
               const std::string& traceparent) {
    AcquiredCache ready;
    {
      absl::MutexLock lock(&mutex_);
      ready = FindLocked(owner, staging_id);
      if (ready.cache == nullptr && jobs_.size() < kWaitingMax) {
        jobs_.push_back({owner, staging_id, std::move(done), traceparent});
        return;
      }
    }
    if (ready.cache != nullptr) return done(std::move(ready));
    done(Unreachable(absl::StrCat(kWaitingMax, " views wait for the store already")));
  }

 private:
  struct Attachment {
    std::shared_ptr<MappedCache> cache;
    UniqueFd socket;
    int64_t session_id = 0;
    uint8_t fd_token[16] = {};  // sent with every request on `socket`
    // Unmapped when the last view has let go of them.
    std::map<int64_t, std::weak_ptr<const StagingMap>> staging;
  };
  struct Job {
    CacheOwner owner;
    int64_t staging_id;
    Done done;
    std::string traceparent;
  };

  // What is mapped already; a null cache when something of it is not.
  AcquiredCache FindLocked(const CacheOwner& owner, int64_t staging_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = attachments_.find(owner);
    if (found == attachments_.end() || !found->second->cache->alive()) return {};
    AcquiredCache acquired;
    if (staging_id != 0) {
      const auto staging = found->second->staging.find(staging_id);
      if (staging == found->second->staging.end()) return {};
      acquired.staging = staging->second.lock();
      if (acquired.staging == nullptr) return {};
    }
    acquired.cache = found->second->cache;
    return acquired;
  }

  void Wake() {
    const uint64_t one = 1;
    // It fails only when the counter is full, and then the watcher wakes as well.
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof(one));
  }

  // The asking thread.
  void Ask() {
    while (true) {
      std::deque<Job> jobs;
      bool stopping = false;
      {
        absl::MutexLock lock(&mutex_);
        const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
          return stopping_ || !jobs_.empty();
        };
        mutex_.Await(absl::Condition(&has_work));
        jobs.swap(jobs_);
        stopping = stopping_;
      }
      // A store that is away is asked once for all that wait, not once for each.
      std::map<CacheOwner, absl::Status> failed;
      for (Job& job : jobs) {
        traceparent_ = job.traceparent;
        const auto failure = failed.find(job.owner);
        absl::StatusOr<AcquiredCache> acquired =
            stopping                  ? Unreachable("the certifier is stopping")
            : failure != failed.end() ? absl::StatusOr<AcquiredCache>(failure->second)
                                      : Acquire(job);
        if (!acquired.ok() && absl::IsUnavailable(acquired.status())) {
          failed[job.owner] = acquired.status();
        }
        job.done(std::move(acquired));
      }
      if (stopping) return;
    }
  }

  absl::StatusOr<AcquiredCache> Acquire(const Job& job) {
    std::shared_ptr<Attachment> attachment;
    {
      absl::MutexLock lock(&mutex_);
      AcquiredCache ready = FindLocked(job.owner, job.staging_id);
      if (ready.cache != nullptr) return ready;
      const auto found = attachments_.find(job.owner);
      if (found != attachments_.end() && found->second->cache->alive()) attachment = found->second;
    }
    if (attachment == nullptr) {
      CERTKV_ASSIGN_OR_RETURN(attachment, Attach(job.owner));
      absl::MutexLock lock(&mutex_);
      attachments_[job.owner] = attachment;
    }
    Wake();
    AcquiredCache acquired;
    acquired.cache = attachment->cache;
    if (job.staging_id != 0) {
      CERTKV_ASSIGN_OR_RETURN(acquired.staging, MapStaging(attachment.get(), job.staging_id));
    }
    return acquired;
  }

  // Calls a unary method so that stopping cancels it. Waits for a store that is just restarting.
  // More than one attempt only for what may be asked twice: a call may still go out on the
  // connection of a store that died a moment ago, and then fails at once.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::KvStore::Stub::*method)(grpc::ClientContext*, const Request&,
                                                              Response*),
                    const Request& request, Response* response, int attempts_max = 1) {
    const auto deadline =
        std::chrono::system_clock::now() + std::chrono::milliseconds(options_.timeout_ms);
    std::string token;
    if (!options_.token_file.empty()) {
      CERTKV_ASSIGN_OR_RETURN(token, ReadTokenFile(options_.token_file));
    }
    absl::Status status;
    for (int attempt = 0; attempt < attempts_max; ++attempt) {
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      SetTraceparent(traceparent_, &context);
      context.AddMetadata(kWireVersionsKey, WireVersionsToText(SupportedWireVersions()));
      context.set_deadline(deadline);
      if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
      {
        absl::MutexLock lock(&mutex_);
        if (stopping_) return Unreachable("the certifier is stopping");
        context_ = &context;
      }
      status = FromGrpcStatus((stub_.get()->*method)(&context, request, response));
      absl::MutexLock lock(&mutex_);
      context_ = nullptr;
      if (!absl::IsUnavailable(status)) break;
    }
    if (status.ok()) return status;
    return StoreError(status, absl::StrCat("the store at ", options_.store_socket,
                                           " did not answer within ", options_.timeout_ms, " ms"));
  }

  absl::StatusOr<std::shared_ptr<Attachment>> Attach(const CacheOwner& owner) {
    const SpecDigest& spec_digest = owner.spec_digest;
    v1::Stats stats;
    CERTKV_RETURN_IF_ERROR(
        Call(&v1::KvStore::Stub::GetStats, v1::GetStatsRequest(), &stats, kStatsAttemptsMax));
    const v1::CacheStats* cache = nullptr;
    for (const v1::CacheStats& candidate : stats.caches()) {
      const auto& tenants = candidate.pool_tenants();
      // A store that names no tenants has caches of nobody in particular only.
      const bool is_owned = tenants.empty() ? owner.tenant.empty()
                                            : std::find(tenants.begin(), tenants.end(),
                                                        owner.tenant) != tenants.end();
      if (is_owned && candidate.spec_digest() == std::string(spec_digest.view())) {
        cache = &candidate;
      }
    }
    if (cache == nullptr) {
      return MakeError(
          absl::StatusCode::kNotFound, "CACHE_NOT_FOUND",
          absl::StrCat("no cache of spec digest ", ToHex(spec_digest.view()),
                       " is registered for this tenant at the store of this certifier; "
                       "register it, "
                       "or ask the certifier beside its store"));
    }
    CERTKV_ASSIGN_OR_RETURN(CacheSpec spec, CacheSpecFromProto(cache->spec()));
    v1::AttachWorkerRequest request;
    request.set_cache_id(cache->cache_id());
    request.set_worker_name(std::string(kReaderName));
    request.set_role(v1::SESSION_ROLE_READER);
    request.set_tenant(owner.tenant);
    v1::AttachWorkerResponse attached;
    CERTKV_RETURN_IF_ERROR(Call(&v1::KvStore::Stub::AttachWorker, request, &attached));
    absl::StatusOr<std::shared_ptr<Attachment>> attachment =
        MapSlabs(spec_digest, std::move(spec), attached);
    if (!attachment.ok()) return StoreError(attachment.status(), "the store's descriptor socket");
    Log(LogLevel::kInfo, "store_attached",
        {{"cache", ToHex(spec_digest.view(), 8)},
         {"device_slots", (*attachment)->cache->device().layout().slot_count()},
         {"backing_slots", (*attachment)->cache->backing().layout().slot_count()}});
    return attachment;
  }

  absl::StatusOr<std::shared_ptr<Attachment>> MapSlabs(const SpecDigest& spec_digest,
                                                       CacheSpec spec,
                                                       const v1::AttachWorkerResponse& attached) {
    FdRequest request{};
    request.magic = kFdMagic;
    if (attached.fd_token().size() != sizeof(request.token)) {
      return Unreachable(absl::StrCat("the store's fd_token has ", attached.fd_token().size(),
                                      " bytes, expected ", sizeof(request.token)));
    }
    std::memcpy(request.token, attached.fd_token().data(), sizeof(request.token));
    auto attachment = std::make_shared<Attachment>();
    attachment->session_id = attached.session_id();
    std::memcpy(attachment->fd_token, request.token, sizeof(request.token));
    CERTKV_ASSIGN_OR_RETURN(attachment->socket, ConnectUnixSocket(attached.fd_socket()));
    CERTKV_ASSIGN_OR_RETURN(
        const Descriptors descriptors,
        AskForDescriptors(attachment->socket.get(), request, 2, options_.timeout_ms));
    CERTKV_ASSIGN_OR_RETURN(Mapping device,
                            Mapping::Map(descriptors.fds[0].get(), Mapping::Access::kReadOnly));
    CERTKV_ASSIGN_OR_RETURN(Mapping backing,
                            Mapping::Map(descriptors.fds[1].get(), Mapping::Access::kReadOnly));
    CERTKV_ASSIGN_OR_RETURN(
        attachment->cache,
        MappedCache::Create(std::move(spec), std::move(device), std::move(backing)));
    if (attachment->cache->spec_digest() != spec_digest) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "SLAB_MISMATCH",
                       absl::StrCat("the store's spec has digest ",
                                    ToHex(attachment->cache->spec_digest().view()), ", asked for ",
                                    ToHex(spec_digest.view()),
                                    "; store and certifier are of different versions"));
    }
    OpenOnDevice(attachment->cache.get());
    return attachment;
  }

  // What of it fails is left to the host, or to copies.
  void OpenOnDevice(MappedCache* cache) {
    if (options_.device == nullptr) return;
    const std::string name = ToHex(cache->spec_digest().view(), 8);
    const absl::Status imported = cache->ImportDeviceCopy(options_.device);
    if (!imported.ok()) {
      Log(LogLevel::kWarning, "device_copy_not_read",
          {{"cache", name}, {"why", imported.ToString()}});
      return;
    }
    if (!options_.pin_originals) return;
    const absl::Status pinned = cache->PinOriginals(options_.device);
    if (!pinned.ok()) {
      Log(LogLevel::kWarning, "originals_not_pinned",
          {{"cache", name}, {"why", pinned.ToString()}});
      return;
    }
    Log(LogLevel::kInfo, "originals_pinned",
        {{"cache", name}, {"bytes", cache->backing().layout().slab_bytes()}});
  }

  absl::StatusOr<std::shared_ptr<const StagingMap>> MapStaging(Attachment* attachment,
                                                               int64_t staging_id) {
    FdRequest request{};
    request.magic = kFdMagic;
    request.staging_id = staging_id;
    std::memcpy(request.token, attachment->fd_token, sizeof(request.token));
    const auto map = [&]() -> absl::StatusOr<std::shared_ptr<const StagingMap>> {
      CERTKV_ASSIGN_OR_RETURN(
          const Descriptors descriptors,
          AskForDescriptors(attachment->socket.get(), request, 1, options_.timeout_ms));
      CERTKV_ASSIGN_OR_RETURN(Mapping mapping,
                              Mapping::Map(descriptors.fds[0].get(), Mapping::Access::kReadOnly));
      CERTKV_ASSIGN_OR_RETURN(
          MappedSlab slab,
          MappedSlab::Create(attachment->cache->spec(), SlabKind::kStaging, std::move(mapping)));
      return std::make_shared<const StagingMap>(StagingMap{staging_id, std::move(slab)});
    };
    absl::StatusOr<std::shared_ptr<const StagingMap>> staging = map();
    if (!staging.ok()) {
      const std::string reason = ReasonOf(staging.status());
      // After half an exchange the socket can't be used any more: end the session with it.
      if (reason == "SOCKET_CLOSED" || reason == "STORE_UNREACHABLE") {
        shutdown(attachment->socket.get(), SHUT_RDWR);
      }
      return StoreError(staging.status(), "the store's descriptor socket");
    }
    absl::MutexLock lock(&mutex_);
    std::erase_if(attachment->staging, [](const auto& entry) { return entry.second.expired(); });
    attachment->staging[staging_id] = *staging;
    return staging;
  }

  // The watching thread: waits for descriptor sockets to close. It reads from them then alone;
  // before, that is the asking thread's business.
  void Watch() {
    while (true) {
      std::vector<pollfd> waiting = {{wake_.get(), POLLIN, 0}};
      std::vector<std::shared_ptr<Attachment>> watched;
      {
        absl::MutexLock lock(&mutex_);
        if (stopping_) return;
        for (const auto& [owner, attachment] : attachments_) {
          if (!attachment->cache->alive()) continue;
          watched.push_back(attachment);
          waiting.push_back({attachment->socket.get(), POLLRDHUP, 0});
        }
      }
      if (poll(waiting.data(), waiting.size(), -1) <= 0) continue;
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t drained = read(wake_.get(), &count, sizeof(count));
      for (size_t i = 0; i < watched.size(); ++i) {
        if (waiting[i + 1].revents == 0) continue;
        watched[i]->cache->MarkDead();
        const std::string cache = ToHex(watched[i]->cache->spec_digest().view(), 8);
        const std::string why = LastWords(watched[i]->socket.get());
        if (why.empty()) {
          Log(LogLevel::kWarning, "store_lost", {{"cache", cache}});
        } else {
          Log(LogLevel::kInfo, "store_session_ended", {{"cache", cache}, {"why", why}});
        }
        absl::MutexLock lock(&mutex_);
        std::erase_if(attachments_, [&](const auto& entry) { return entry.second == watched[i]; });
      }
    }
  }

  const StoreClientOptions options_;
  const std::unique_ptr<v1::KvStore::Stub> stub_;
  const UniqueFd wake_;  // wakes the watcher
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // of the call that runs
  std::string traceparent_;  // of the job that runs; the asking thread's own
  std::map<CacheOwner, std::shared_ptr<Attachment>> attachments_ ABSL_GUARDED_BY(mutex_);
  std::thread asker_;
  std::thread watcher_;
};

StoreClient::StoreClient(StoreClientOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

StoreClient::~StoreClient() = default;

void StoreClient::Acquire(const CacheOwner& owner, int64_t staging_id, Done done,
                          const std::string& traceparent) {
  impl_->Acquire(owner, staging_id, std::move(done), traceparent);
}

}  // namespace certkv::certifier
