// Caches, sessions, and the time.
#include "services/kvstore/store_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/sha256.h"
#include "kernels/core/status.h"
#include "services/common/identity.h"
#include "services/common/random_id.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {
namespace {

constexpr int32_t kStagingSlotsMax = 4096;
constexpr size_t kWorkerNameBytesMax = 128;
constexpr size_t kFdTokenBytes = 16;

absl::Status CacheNotFound(CacheId cache) {
  return MakeError(absl::StatusCode::kNotFound, "CACHE_NOT_FOUND",
                   absl::StrCat("cache ", static_cast<int64_t>(cache),
                                " is not registered with this store process; register it first"));
}

std::string RootOf(const SpillTier* spill) {
  std::string root = spill == nullptr ? "" : spill->Secret();
  return root.empty() ? RandomBytes(kSpillSecretBytes) : root;
}

// 0 where no keys are dithered. docs/formats.md, section 3.
uint64_t DitherSecretOf(absl::string_view root, const CacheSpec& spec, const SpecDigest& cache) {
  if (!IsDithered(spec)) return 0;
  Sha256 hash;
  hash.AddBytes("certkv.dither.v1");
  hash.AddBytes(root);
  hash.AddBytes(cache.view());
  const auto bytes = hash.Finish();
  uint64_t secret = 0;
  std::memcpy(&secret, bytes.data(), sizeof(secret));
  return secret == 0 ? 1 : secret;
}

}  // namespace

StoreEngine::StoreEngine(const KvStoreConfig& config, const Clock* clock, ComputePool* pool,
                         SpillTier* spill, const DevicePlace& device)
    : config_(config),
      clock_(clock),
      pool_(pool),
      spill_(spill),
      device_(device),
      dither_root_(RootOf(spill)),
      events_(config.watcher_limit, config.event_queue_limit, config.event_history_limit,
              RandomId()),
      tenants_(config.tenant_quotas, config.tenant_limit) {}

StoreEngine::~StoreEngine() { events_.CloseAll(); }

StoreEngine::Now StoreEngine::ReadClock() const {
  return Now{clock_->MonotonicNs(), clock_->NowMs()};
}

absl::StatusOr<RegisteredCache> StoreEngine::RegisterCache(const CacheSpec& spec,
                                                           absl::string_view tenant) {
  CERTKV_RETURN_IF_ERROR(ValidateCacheSpec(spec));
  CERTKV_RETURN_IF_ERROR(CheckTenantName(tenant));
  const TenantPool pool = PoolOf(config_.pools, tenant);
  const SpecDigest digest = PoolCacheDigest(DigestCacheSpec(spec), pool.id);
  Lock lock(this);
  std::shared_ptr<Cache> cache;
  for (const auto& [id, known] : caches_) {
    if (known->cache_digest() == digest) cache = known;
  }
  if (cache == nullptr) {
    const Now now = ReadClock();
    ExpireLeases(now);
    CERTKV_RETURN_IF_ERROR(MakeRoomForCache(pool, spec, now));
    CERTKV_ASSIGN_OR_RETURN(
        cache,
        Cache::Create(
            CacheId{RandomId()}, spec, {config_.device_memory_bytes, config_.backing_memory_bytes},
            &events_, &counters_,
            CacheOptions{config_.eviction, spill_, pool, DitherSecretOf(dither_root_, spec, digest),
                         device_, config_.device == DeviceChoice::kCuda}));
    caches_.emplace(cache->id(), cache);
  }
  // A cache that was asked for just now isn't the first to make room for another.
  cache->last_attach_sequence = ++attach_sequence_;
  return RegisteredCache{cache->id(), cache->spec_digest(), cache->device().slot_count(),
                         cache->backing().slot_count(), PoolKeySalt(pool.id)};
}

int64_t StoreEngine::MemoryBytes() const {
  int64_t bytes = sessions_.staging_bytes();
  for (const auto& [id, cache] : caches_) bytes += cache->slab_bytes();
  return bytes;
}

absl::Status StoreEngine::MakeRoomForCache(const TenantPool& pool, const CacheSpec& spec,
                                           const Now& now) {
  const bool is_within = static_cast<int32_t>(caches_.size()) < config_.cache_limit;
  const int64_t wanted = config_.device_memory_bytes + config_.backing_memory_bytes;
  const bool fits =
      config_.memory_limit_bytes == 0 || MemoryBytes() + wanted <= config_.memory_limit_bytes;
  if (is_within && fits) return absl::OkStatus();
  auto victim = caches_.end();
  for (auto it = caches_.begin(); it != caches_.end(); ++it) {
    const Cache& cache = *it->second;
    // Readers that lease nothing stay attached for as long as they run, and come back when they
    // are asked for the cache again.
    const bool is_used = cache.worker_count > 0 || cache.index().held_count() > 0 ||
                         cache.index().pinned_count() > 0;
    // Another pool's blocks are not this one's to evict.
    if (is_used || cache.pool().id != pool.id) continue;
    const bool is_older = victim == caches_.end() ||
                          cache.last_attach_sequence < victim->second->last_attach_sequence;
    if (is_older) victim = it;
  }
  if (victim == caches_.end() && is_within) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "MEMORY_LIMIT",
        absl::StrCat("a cache of ", DescribeCacheSpec(spec), " may take ", wanted,
                     " bytes, all caches and staging memory have ", MemoryBytes(), " now, at most ",
                     config_.memory_limit_bytes,
                     "; lower device_memory and backing_memory, which are of each cache, or raise "
                     "memory_limit"));
  }
  if (victim == caches_.end()) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "CACHE_LIMIT",
        absl::StrCat("the store has ", caches_.size(), " caches, at most ", config_.cache_limit,
                     ", all with workers, leased or pinned blocks, or of other tenants; detach the "
                     "workers of one or raise cache_limit"));
  }
  for (const SessionId reader : sessions_.Of(*victim->second)) {
    EndSessionLocked(reader, "its cache, which no worker used, made room for another");
  }
  victim->second->EvictAll(now.epoch_ms);
  caches_.erase(victim);
  return MakeRoomForCache(pool, spec, now);
}

absl::StatusOr<std::shared_ptr<Cache>> StoreEngine::FindCache(CacheId cache) const {
  const auto it = caches_.find(cache);
  if (it != caches_.end()) return it->second;
  return CacheNotFound(cache);
}

absl::Status StoreEngine::CheckSessionTenant(SessionId id, const MayUse& may_use) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(const Session* session, FindSession(id, ReadClock()));
  return may_use(tenants_.NameOf(session->tenant)) ? absl::OkStatus() : SessionTable::NotFound(id);
}

absl::Status StoreEngine::CheckCacheTenant(CacheId id, const MayUse& may_use) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  const auto& tenants = cache->pool().tenants;
  return std::any_of(tenants.begin(), tenants.end(), may_use) ? absl::OkStatus()
                                                              : CacheNotFound(id);
}

absl::Status StoreEngine::CheckCache(CacheId cache) {
  Lock lock(this);
  return FindCache(cache).status();
}

absl::StatusOr<AttachedSession> StoreEngine::AttachWorker(const AttachRequest& request) {
  if (request.worker_name.empty() || request.worker_name.size() > kWorkerNameBytesMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "WORKER_NAME_INVALID",
                     absl::StrCat("worker_name has ", request.worker_name.size(),
                                  " bytes, must have 1 to ", kWorkerNameBytesMax));
  }
  Lock lock(this);
  const Now now = ReadClock();
  CERTKV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache, FindCache(request.cache));
  if (!cache->pool().Has(request.tenant)) return CacheNotFound(request.cache);
  if (sessions_.size() >= config_.session_limit) {
    return MakeError(absl::StatusCode::kResourceExhausted, "SESSION_LIMIT",
                     absl::StrCat("the store has ", sessions_.size(), " sessions, at most ",
                                  config_.session_limit, "; detach one or raise session_limit"));
  }
  CERTKV_ASSIGN_OR_RETURN(const TenantIndex tenant, TenantFor(request));
  auto session = std::make_unique<Session>();
  session->id = SessionId{RandomId()};
  session->role = request.role;
  session->worker_name = request.worker_name;
  session->tenant = tenant;
  session->fd_token = RandomBytes(kFdTokenBytes);
  session->cache = cache;
  session->connect_deadline_ns = now.monotonic_ns + config_.connect_timeout_ms * 1'000'000;
  AttachedSession attached{session->id, session->fd_token, 0, 0};
  if (request.role == SessionRole::kWorker) {
    CERTKV_ASSIGN_OR_RETURN(attached.staging_slot_count, StagingSlotsFor(request, cache->spec()));
    CERTKV_ASSIGN_OR_RETURN(auto memory, SlabMemory::Create(cache->spec(), SlabKind::kStaging,
                                                            attached.staging_slot_count));
    session->staging = std::make_shared<StagingArea>(std::move(memory));
    session->staging_id = RandomId();
    attached.staging_id = session->staging_id;
  }
  const std::shared_ptr<StagingArea> staging = session->staging;
  sessions_.Add(std::move(session));
  cache->SetQuota(tenant, tenants_.QuotaOf(tenant));
  ++tenant_sessions_[static_cast<size_t>(tenant)];
  ++cache->session_count;
  if (request.role == SessionRole::kWorker) ++cache->worker_count;
  cache->last_attach_sequence = ++attach_sequence_;
  if (request.wants_device_staging && staging != nullptr) {
    GiveDeviceStaging(attached.session, cache, staging);
  }
  return attached;
}

absl::StatusOr<TenantIndex> StoreEngine::TenantFor(const AttachRequest& request) {
  const auto is_unused = [this](TenantIndex tenant) {
    mutex_.AssertHeld();
    if (tenant_sessions_[static_cast<size_t>(tenant)] > 0) return false;
    for (const auto& [id, cache] : caches_) {
      const TenantUse use = cache->UseOf(tenant);
      if (use.backing.used > 0 || use.device.used > 0) return false;
    }
    return true;
  };
  CERTKV_ASSIGN_OR_RETURN(const TenantIndex tenant, tenants_.FindOrAdd(request.tenant, is_unused));
  tenant_sessions_.resize(static_cast<size_t>(tenants_.size()));
  return tenant;
}

absl::StatusOr<int32_t> StoreEngine::StagingSlotsFor(const AttachRequest& request,
                                                     const CacheSpec& spec) {
  if (request.staging_slot_count < 0 || request.staging_slot_count > kStagingSlotsMax) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "STAGING_SLOTS_INVALID",
        absl::StrCat("staging_slot_count is ", request.staging_slot_count, ", must be in [1, ",
                     kStagingSlotsMax, "], or 0 for ", config_.staging_slots));
  }
  int64_t bytes_left = config_.staging_memory_bytes - sessions_.staging_bytes();
  if (config_.memory_limit_bytes > 0) {
    bytes_left = std::min(bytes_left, config_.memory_limit_bytes - MemoryBytes());
  }
  const bool is_default = request.staging_slot_count == 0;
  int32_t count = is_default ? config_.staging_slots : request.staging_slot_count;
  const int32_t least = is_default ? 1 : count;
  while (count >= least && SlabLayout(spec, SlabKind::kStaging, count).slab_bytes() > bytes_left) {
    --count;
  }
  if (count >= least) return count;
  return MakeError(
      absl::StatusCode::kResourceExhausted, "STAGING_MEMORY_FULL",
      absl::StrCat("staging memory has ", std::max<int64_t>(bytes_left, 0), " of ",
                   config_.staging_memory_bytes, " bytes left, ", least, " slots of ",
                   DescribeCacheSpec(spec), " need ",
                   SlabLayout(spec, SlabKind::kStaging, least).slab_bytes(),
                   "; detach a worker, ask for fewer slots, or raise staging_memory (and "
                   "memory_limit, where that is the limit)"));
}

void StoreEngine::EndSession(SessionId session, absl::string_view why) {
  Lock lock(this);
  EndSessionLocked(session, why);
}

void StoreEngine::EndSessionLocked(SessionId id, absl::string_view why) {
  const absl::StatusOr<Session*> found = sessions_.Find(id);
  if (!found.ok()) return;
  // The newest leases go first: they cover the ends of chains, which thereby become the least
  // recently used.
  std::vector<LeaseId> leases((*found)->leases.begin(), (*found)->leases.end());
  std::sort(leases.begin(), leases.end(), [this](LeaseId a, LeaseId b) {
    mutex_.AssertHeld();
    return leases_.Get(a).sequence > leases_.Get(b).sequence;
  });
  for (const LeaseId lease : leases) DropLease(lease, *found);
  const std::unique_ptr<Session> session = sessions_.TakeOut(id, why);
  // Slots that a running seal reads are counted by that seal, which gives up.
  if (session->staging != nullptr) {
    counters_.blocks_aborted += session->staging->reserved_count();
    session->staging->Abandon();
    // Memory of a GPU is given back by another thread: that may wait for the device.
    if (session->staging->on_device() != nullptr) {
      pool_->TryPost([staging = std::move(session->staging)] {});
    }
  }
  --session->cache->session_count;
  if (session->role == SessionRole::kWorker) --session->cache->worker_count;
  --tenant_sessions_[static_cast<size_t>(session->tenant)];
  session->cache->last_attach_sequence = ++attach_sequence_;
  if (session->on_end) session->on_end(why);
}

absl::StatusOr<SessionSlabs> StoreEngine::ConnectSession(
    absl::string_view fd_token, std::function<void(absl::string_view why)> on_end) {
  Lock lock(this);
  Session* session = sessions_.FindByToken(fd_token);
  if (session == nullptr || session->connected) {
    return MakeError(absl::StatusCode::kUnauthenticated, "FD_TOKEN_INVALID",
                     session == nullptr
                         ? "the token is of no session that is attached; attach again and send "
                           "the fd_token of the answer"
                         : "the token's session is connected already; a session has one "
                           "connection, attach again for another");
  }
  session->connected = true;
  session->on_end = std::move(on_end);
  return SessionSlabs{session->id, session->cache->device_memory(),
                      session->cache->backing_memory(),
                      session->staging == nullptr ? nullptr : session->staging->memory()};
}

absl::StatusOr<std::shared_ptr<SlabMemory>> StoreEngine::FindStaging(SessionId session_id,
                                                                     int64_t staging_id) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ReadClock()));
  if (session->role != SessionRole::kReader) {
    return MakeError(absl::StatusCode::kPermissionDenied, "ROLE_FORBIDS",
                     absl::StrCat("session of ", session->worker_name,
                                  " is a WORKER, which may not read another's staging memory; "
                                  "attach as a READER"));
  }
  const Session* owner = sessions_.FindByStagingId(staging_id);
  if (owner == nullptr || owner->cache != session->cache || owner->tenant != session->tenant) {
    return MakeError(absl::StatusCode::kNotFound, "STAGING_NOT_FOUND",
                     absl::StrCat("staging memory ", staging_id,
                                  " is of no worker attached to this session's cache; the worker "
                                  "may have ended"));
  }
  return owner->staging->memory();
}

void StoreEngine::Tick() {
  Lock lock(this);
  const Now now = ReadClock();
  ExpireLeases(now);
  ExpirePins(now);
  for (const SessionId id : sessions_.NeverConnected(now.monotonic_ns)) {
    EndSessionLocked(id, absl::StrCat("it did not connect to the descriptor socket within ",
                                      config_.connect_timeout_ms, " ms"));
  }
}

absl::StatusOr<Session*> StoreEngine::FindSession(SessionId session, const Now& now) {
  ExpireLeases(now);
  return sessions_.Find(session);
}

absl::StatusOr<Session*> StoreEngine::FindWorker(SessionId id, const Now& now,
                                                 absl::string_view call) {
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(id, now));
  if (session->role == SessionRole::kWorker) return session;
  return MakeError(absl::StatusCode::kPermissionDenied, "ROLE_FORBIDS",
                   absl::StrCat("session of ", session->worker_name,
                                " is a READER, which may not call ", call, "; attach as a WORKER"));
}

SpillStats StoreEngine::GetSpillStats() const {
  return spill_ == nullptr ? SpillStats{} : spill_->GetStats();
}

StoreStats StoreEngine::GetStats() {
  Lock lock(this);
  ExpireLeases(ReadClock());
  StoreStats stats;
  for (const auto& [id, cache] : caches_) {
    CacheStats entry;
    entry.cache = id;
    entry.spec = cache->spec();
    entry.digest = cache->spec_digest();
    entry.device_slot_count = cache->device().slot_count();
    entry.device_slots_used = entry.device_slot_count - cache->device().free_count();
    entry.backing_slot_count = cache->backing().slot_count();
    entry.backing_slots_used = entry.backing_slot_count - cache->backing().free_count();
    entry.device_slot_bytes = cache->device().layout().slot_bytes();
    entry.backing_slot_bytes = cache->backing().layout().slot_bytes();
    entry.blocks_leased = cache->index().held_count();
    entry.blocks_pinned = cache->index().pinned_count();
    entry.blocks_writing = cache->device().writing_count();
    entry.session_count = cache->session_count;
    for (int32_t i = 0; i < tenants_.size(); ++i) {
      const auto tenant = static_cast<TenantIndex>(i);
      const TenantUse use = cache->UseOf(tenant);
      const bool is_here = use.backing.used > 0 || use.device.used > 0 ||
                           (i < static_cast<int32_t>(tenant_sessions_.size()) &&
                            tenant_sessions_[i] > 0 && use.backing.limit > 0);
      if (is_here) entry.tenants.push_back({tenants_.NameOf(tenant), use});
    }
    entry.pool_tenants = cache->pool().tenants;
    entry.device_error = cache->device_error();
    entry.device_staging_error = cache->device_staging_error();
    if (const DeviceCopy* const copy = cache->device_memory()->device_copy()) {
      entry.has_device_copy = copy->is_ready();
      entry.device_copied_bytes = copy->uploaded_bytes();
    }
    stats.caches.push_back(std::move(entry));
  }
  stats.session_count = sessions_.size();
  stats.lease_count = leases_.size();
  stats.counters = counters_;
  stats.memory_bytes = MemoryBytes();
  stats.memory_limit_bytes = config_.memory_limit_bytes;
  stats.spill = GetSpillStats();
  return stats;
}

}  // namespace certkv::kvstore
