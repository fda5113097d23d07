#include "services/kvstore/bulk_pool.h"

#include <algorithm>
#include <boost/asio/strand.hpp>
#include <chrono>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "kernels/core/sha256.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;

}  // namespace

BulkPool::BulkPool(const BulkConfig& config, const Clock* clock, BulkCounters* counters,
                   boost::asio::io_context* io_context)
    : config_(config),
      clock_(clock),
      counters_(counters),
      io_context_(io_context),
      timer_(*io_context) {}

BulkPool::~BulkPool() { Stop(); }

std::string BulkPool::FilesDigest() const {
  Sha256 hash;
  for (const std::string& path : {config_.peer_ca, config_.certificate, config_.key}) {
    std::ifstream file(path);
    std::ostringstream content;
    content << file.rdbuf();
    // With its size, so that no two sets of files are one text.
    hash.AddBytes(absl::StrCat(content.str().size(), ":", content.str()));
  }
  const auto digest = hash.Finish();
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

absl::StatusOr<BulkSocket::Tls> BulkPool::CurrentTls() {
  if (config_.access.tcp_security == TcpSecurity::kInsecure) return BulkSocket::Tls();
  const std::string digest = FilesDigest();
  const int64_t now_ns = clock_->MonotonicNs();
  absl::MutexLock lock(&mutex_);
  const bool is_same = tls_ != nullptr && digest == tls_digest_;
  // To read a private key takes OpenSSL 3 longer than to pull a block.
  if (is_same && now_ns - tls_checked_ns_ < kFilesCheckMs * kNsPerMs) return tls_;
  CERTKV_ASSIGN_OR_RETURN(BulkSocket::Tls made, MakeBulkClientTls(config_, clock_->NowMs()));
  tls_checked_ns_ = now_ns;
  if (is_same) return tls_;
  tls_ = std::move(made);
  tls_digest_ = digest;
  return tls_;
}

BulkPool::ClientPtr BulkPool::Take(const BulkPeer& peer) {
  absl::MutexLock lock(&mutex_);
  CloseExpired();
  for (auto idle = idle_.rbegin(); idle != idle_.rend(); ++idle) {
    if (!idle->client->peer().IsSame(peer)) continue;
    ClientPtr client = std::move(idle->client);
    idle_.erase(std::next(idle).base());
    counters_->idle_connections.fetch_sub(1, std::memory_order_relaxed);
    return client;
  }
  return std::make_shared<BulkClient>(boost::asio::make_strand(*io_context_), peer, counters_,
                                      clock_->MonotonicNs());
}

void BulkPool::Return(const ClientPtr& client) {
  if (!client->IsConnected()) return;
  absl::MutexLock lock(&mutex_);
  const auto same = std::count_if(idle_.begin(), idle_.end(), [&](const Idle& idle) {
    return idle.client->peer().IsSame(client->peer());
  });
  if (is_stopped_ || IsOld(*client) || same >= config_.idle_connections) return client->Close();
  client->Rest();
  idle_.push_back({client, clock_->MonotonicNs()});
  counters_->idle_connections.fetch_add(1, std::memory_order_relaxed);
  if (idle_.size() > kIdleMax) CloseFirst();
  if (!is_scheduled_) Schedule();
}

bool BulkPool::IsOld(const BulkClient& client) const {
  return clock_->MonotonicNs() - client.begun_ns() > kAgeMsMax * kNsPerMs;
}

void BulkPool::CloseFirst() {
  idle_.front().client->Close();
  idle_.pop_front();
  counters_->idle_connections.fetch_sub(1, std::memory_order_relaxed);
}

void BulkPool::CloseExpired() {
  const int64_t before_ns = clock_->MonotonicNs() - config_.idle_time_ms * kNsPerMs;
  const auto count = idle_.size();
  idle_.remove_if([&](const Idle& idle) {
    const bool is_expired = idle.since_ns <= before_ns || IsOld(*idle.client);
    if (is_expired) idle.client->Close();
    return is_expired;
  });
  counters_->idle_connections.fetch_sub(static_cast<int64_t>(count - idle_.size()),
                                        std::memory_order_relaxed);
}

void BulkPool::Schedule() {
  const int64_t end_ns = idle_.front().since_ns + config_.idle_time_ms * kNsPerMs;
  const int64_t left_ns = std::max<int64_t>(end_ns - clock_->MonotonicNs(), kNsPerMs);
  is_scheduled_ = true;
  timer_.expires_after(std::chrono::nanoseconds(left_ns));
  timer_.async_wait([weak = weak_from_this()](const boost::system::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr) self->Sweep();
  });
}

void BulkPool::Sweep() {
  absl::MutexLock lock(&mutex_);
  is_scheduled_ = false;
  CloseExpired();
  if (!idle_.empty() && !is_stopped_) Schedule();
}

void BulkPool::Stop() {
  absl::MutexLock lock(&mutex_);
  is_stopped_ = true;
  while (!idle_.empty()) CloseFirst();
  boost::system::error_code ignored;
  timer_.cancel(ignored);
}

}  // namespace certkv::kvstore
