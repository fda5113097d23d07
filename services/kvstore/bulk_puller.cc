#include "services/kvstore/bulk_puller.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/bulk_pool.h"
#include "services/kvstore/bulk_pull_job.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kPullsMax = 64;  // at a time
constexpr int64_t kPullRetryMs = 100;

}  // namespace

BulkPuller::BulkPuller(const BulkConfig& config, Dependencies dependencies,
                       boost::asio::io_context* io_context)
    : config_(config),
      with_(dependencies),
      io_context_(io_context),
      connections_(std::make_shared<BulkPool>(config, dependencies.clock, dependencies.counters,
                                              io_context)) {}

BulkPuller::~BulkPuller() { Stop(); }

void BulkPuller::Start(PullRequest request, Done done) {
  const std::vector<std::string> peers = config_.peer_list();
  const bool is_known = std::find(peers.begin(), peers.end(), request.peer) != peers.end();
  const bool is_protected = config_.access.tcp_security != TcpSecurity::kInsecure;
  const absl::string_view host = absl::string_view(request.peer).substr(0, request.peer.rfind(':'));
  if (request.is_member && !is_protected && !IsLoopback(host)) {
    return done(MakeError(absl::StatusCode::kInvalidArgument, "BULK_PEER_UNKNOWN",
                          absl::StrCat("node ", request.peer,
                                       " is on another machine, and server.tcp_security insecure "
                                       "is for this one only; use mutual_tls or tls")));
  }
  if (!request.is_member && !is_known) {
    return done(MakeError(absl::StatusCode::kInvalidArgument, "BULK_PEER_UNKNOWN",
                          absl::StrCat("peer \"", request.peer, "\" is none of the ", peers.size(),
                                       " of kvstore.bulk_peers; name one of them, or add it")));
  }
  std::shared_ptr<PullJob> job;
  absl::Status refused;
  {
    absl::MutexLock lock(&mutex_);
    jobs_.erase(
        std::remove_if(jobs_.begin(), jobs_.end(), [](const auto& weak) { return weak.expired(); }),
        jobs_.end());
    if (is_stopped_) {
      refused = MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                          "the store is stopping; retry when it is back");
    } else if (jobs_.size() >= kPullsMax) {
      refused = WithRetryDelay(MakeError(absl::StatusCode::kResourceExhausted, "BULK_PULL_LIMIT",
                                         absl::StrCat(jobs_.size(), " pulls run, at most ",
                                                      kPullsMax, "; retry after some have ended")),
                               kPullRetryMs);
    } else {
      job = std::make_shared<PullJob>(config_, with_, connections_, std::move(request), done);
      jobs_.push_back(job);
    }
  }
  if (!refused.ok()) return done(refused);
  boost::asio::post(*io_context_, [job] { job->Begin(); });
}

void BulkPuller::Stop() {
  std::vector<std::weak_ptr<PullJob>> jobs;
  {
    absl::MutexLock lock(&mutex_);
    is_stopped_ = true;
    jobs.swap(jobs_);
  }
  for (const auto& weak : jobs) {
    if (const auto job = weak.lock()) job->Stop();
  }
  connections_->Stop();
}

}  // namespace certkv::kvstore
