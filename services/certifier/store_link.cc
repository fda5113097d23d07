#include "services/certifier/store_link.h"

#include <grpcpp/grpcpp.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/limits.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/log.h"

namespace certkv::certifier {
namespace {

namespace v1 = kvstore::v1;

constexpr int kWatchIntervalMs = 20;  // how soon a store's death is noticed

absl::Status Unreachable(const absl::Status& cause) {
  return MakeError(absl::StatusCode::kUnavailable, "STORE_UNREACHABLE",
                   absl::StrCat("the store can't be reached: ", cause.message(),
                                "; is certkv-kvstore running?"));
}

// What the caller can do about a failed call: errors other than unavailability keep their reason.
absl::Status AsStoreError(const absl::Status& status) {
  const bool gone =
      absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
  return gone ? Unreachable(status) : status;
}

// One request on a descriptor socket, and its answer's descriptors.
absl::StatusOr<std::vector<UniqueFd>> FetchDescriptors(int socket, const std::string& token,
                                                       int64_t staging_id, size_t fd_count,
                                                       int64_t timeout_ms) {
  FdRequest request{};
  request.magic = kFdMagic;
  request.staging_id = staging_id;
  std::memcpy(request.token, token.data(), std::min(token.size(), sizeof(request.token)));
  CERTKV_RETURN_IF_ERROR(SendWithFds(
      socket, absl::string_view(reinterpret_cast<const char*>(&request), sizeof(request)), {}));
  CERTKV_ASSIGN_OR_RETURN(BytesWithFds answer, ReceiveWithFds(socket, sizeof(FdReply), timeout_ms));
  FdReply reply{};
  std::memcpy(&reply, answer.bytes.data(), sizeof(reply));
  reply.reason[sizeof(reply.reason) - 1] = '\0';
  reply.message[sizeof(reply.message) - 1] = '\0';
  if (reply.magic == kFdMagic && reply.code != 0) {
    return MakeError(static_cast<absl::StatusCode>(reply.code),
                     reply.reason[0] != '\0' ? reply.reason : "FD_REFUSED", reply.message);
  }
  if (reply.magic != kFdMagic || answer.fds.size() != fd_count) {
    return MakeError(absl::StatusCode::kInternal, "FD_REPLY_INVALID",
                     absl::StrCat("the store answered with ", answer.fds.size(),
                                  " descriptors, expected ", fd_count));
  }
  return std::move(answer.fds);
}

}  // namespace

struct StoreLink::Wire {
  std::unique_ptr<v1::KvStore::Stub> stub;
  int64_t timeout_ms;

  template <typename Method>
  absl::Status Call(const Method& method) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
    return FromGrpcStatus(method(context));
  }
};

struct StoreLink::Attachment {
  std::shared_ptr<MappedCache> cache;
  int64_t session_id = 0;
  std::string token;
  UniqueFd socket;  // the session lives while it is open
  absl::flat_hash_map<int64_t, std::weak_ptr<const StagingMap>> staging;  // under attach_mutex_
};

StoreLink::StoreLink(const std::string& target, int64_t timeout_ms)
    : wire_(std::make_unique<Wire>()), timeout_ms_(timeout_ms) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  wire_->stub = v1::KvStore::NewStub(
      grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
  wire_->timeout_ms = timeout_ms;
  watcher_ = std::thread([this] { WatchSockets(); });
}

StoreLink::~StoreLink() {
  stopping_ = true;
  watcher_.join();
  absl::MutexLock lock(&mutex_);
  // Closing the sockets ends the sessions at the store.
  for (const auto& [digest, attachment] : attachments_) attachment->cache->MarkDead();
}

std::shared_ptr<StoreLink::Attachment> StoreLink::FindAttachment(const SpecDigest& digest) const {
  absl::MutexLock lock(&mutex_);
  const auto found = attachments_.find(digest);
  return found == attachments_.end() ? nullptr : found->second;
}

absl::StatusOr<std::shared_ptr<MappedCache>> StoreLink::FindCache(const SpecDigest& digest) {
  if (const auto attachment = FindAttachment(digest)) return attachment->cache;
  absl::MutexLock attaching(&attach_mutex_);
  if (const auto attachment = FindAttachment(digest)) return attachment->cache;
  absl::StatusOr<std::shared_ptr<Attachment>> attached = Attach(digest);
  if (!attached.ok()) return AsStoreError(attached.status());
  Log(LogLevel::kInfo, "cache_attached",
      {{"spec", ToHex(digest.view(), 8)},
       {"description", DescribeCacheSpec((*attached)->cache->spec())}});
  absl::MutexLock lock(&mutex_);
  attachments_[digest] = *attached;
  return (*attached)->cache;
}

absl::StatusOr<std::shared_ptr<StoreLink::Attachment>> StoreLink::Attach(const SpecDigest& digest) {
  v1::Stats stats;
  CERTKV_RETURN_IF_ERROR(wire_->Call([&](grpc::ClientContext& context) {
    return wire_->stub->GetStats(&context, v1::GetStatsRequest(), &stats);
  }));
  const auto cache = std::find_if(
      stats.caches().begin(), stats.caches().end(),
      [&](const v1::CacheStats& entry) { return entry.spec_digest() == digest.view(); });
  if (cache == stats.caches().end()) {
    return MakeError(absl::StatusCode::kNotFound, "CACHE_NOT_FOUND",
                     absl::StrCat("no cache with spec digest ", ToHex(digest.view(), 8),
                                  "... is registered at this certifier's store; register it, or "
                                  "use the certifier beside the right store"));
  }
  CERTKV_ASSIGN_OR_RETURN(CacheSpec spec, CacheSpecFromProto(cache->spec()));
  v1::AttachWorkerRequest request;
  request.set_cache_id(cache->cache_id());
  request.set_worker_name("certifier");
  request.set_role(v1::SESSION_ROLE_READER);
  v1::AttachWorkerResponse response;
  CERTKV_RETURN_IF_ERROR(wire_->Call([&](grpc::ClientContext& context) {
    return wire_->stub->AttachWorker(&context, request, &response);
  }));
  auto attachment = std::make_shared<Attachment>();
  attachment->session_id = response.session_id();
  attachment->token = response.fd_token();
  CERTKV_ASSIGN_OR_RETURN(attachment->socket, ConnectUnixSocket(response.fd_socket()));
  CERTKV_ASSIGN_OR_RETURN(
      std::vector<UniqueFd> fds,
      FetchDescriptors(attachment->socket.get(), attachment->token, 0, 2, timeout_ms_));
  CERTKV_ASSIGN_OR_RETURN(Mapping device, Mapping::Map(fds[0].get(), Mapping::Access::kReadOnly));
  CERTKV_ASSIGN_OR_RETURN(Mapping backing, Mapping::Map(fds[1].get(), Mapping::Access::kReadOnly));
  CERTKV_ASSIGN_OR_RETURN(attachment->cache, MappedCache::Create(std::move(spec), std::move(device),
                                                                 std::move(backing)));
  return attachment;
}

absl::StatusOr<std::shared_ptr<const StagingMap>> StoreLink::FindStaging(const MappedCache& cache,
                                                                         int64_t staging_id) {
  absl::MutexLock attaching(&attach_mutex_);
  const auto attachment = FindAttachment(cache.spec_digest());
  if (attachment == nullptr) return cache.CheckAlive();
  if (const auto found = attachment->staging[staging_id].lock()) return found;
  absl::StatusOr<std::vector<UniqueFd>> fds =
      FetchDescriptors(attachment->socket.get(), attachment->token, staging_id, 1, timeout_ms_);
  if (!fds.ok()) return AsStoreError(fds.status());
  CERTKV_ASSIGN_OR_RETURN(Mapping mapping,
                          Mapping::Map((*fds)[0].get(), Mapping::Access::kReadOnly));
  CERTKV_ASSIGN_OR_RETURN(MappedSlab slab,
                          MappedSlab::Create(cache.spec(), SlabKind::kStaging, std::move(mapping)));
  auto staging = std::make_shared<const StagingMap>(StagingMap{staging_id, std::move(slab)});
  // Maps that no view holds any more leave their entries behind; workers are few.
  absl::erase_if(attachment->staging, [](const auto& entry) { return entry.second.expired(); });
  attachment->staging[staging_id] = staging;
  return staging;
}

void StoreLink::WatchSockets() {
  while (!stopping_) {
    std::vector<std::pair<SpecDigest, std::shared_ptr<Attachment>>> watched;
    {
      absl::MutexLock lock(&mutex_);
      watched.assign(attachments_.begin(), attachments_.end());
    }
    std::vector<pollfd> sockets;
    for (const auto& [digest, attachment] : watched) {
      sockets.push_back({attachment->socket.get(), POLLRDHUP, 0});
    }
    if (poll(sockets.data(), sockets.size(), kWatchIntervalMs) <= 0) continue;
    for (size_t i = 0; i < sockets.size(); ++i) {
      if ((sockets[i].revents & (POLLRDHUP | POLLHUP | POLLERR)) == 0) continue;
      watched[i].second->cache->MarkDead();
      Log(LogLevel::kWarning, "store_lost", {{"spec", ToHex(watched[i].first.view(), 8)}});
      absl::MutexLock lock(&mutex_);
      const auto found = attachments_.find(watched[i].first);
      if (found != attachments_.end() && found->second == watched[i].second) {
        attachments_.erase(found);
      }
    }
  }
}

}  // namespace certkv::certifier
