#include "services/kvstore/bulk_plane.h"

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/kvstore/bulk_server.h"

namespace certkv::kvstore {

class BulkPlane::Impl {
 public:
  Impl(const BulkConfig& config, const Dependencies& with)
      : config_(config),
        with_(with),
        work_(io_context_.get_executor()),
        puller_(config, {with.engine, with.pool, with.clock, &counters_, with.detour},
                &io_context_) {}

  ~Impl() {
    Stop();
    work_.reset();
    for (std::thread& thread : threads_) thread.join();
    server_.reset();
  }

  absl::Status Start() {
    if (!config_.is_on()) return absl::OkStatus();
    if (!config_.address.empty()) {
      BulkServer::Dependencies with;
      with.engine = with_.engine;
      with.access = with_.access;
      with.clock = with_.clock;
      with.counters = &counters_;
      with.lease_ms = std::min(with_.lease_ms_max, std::max<int64_t>(2 * config_.timeout_ms, 1000));
      with.check_serving = with_.check_serving;
      CERTKV_ASSIGN_OR_RETURN(server_, BulkServer::Create(config_, std::move(with), &io_context_));
      const size_t colon = config_.address.rfind(':');
      Log(LogLevel::kInfo, "bulk_listening",
          {{"address", absl::StrCat(config_.address.substr(0, colon), ":", server_->port())}});
    }
    for (int32_t i = 0; i < config_.threads; ++i) {
      threads_.emplace_back([this] { io_context_.run(); });
    }
    return absl::OkStatus();
  }

  void Stop() {
    puller_.Stop();
    if (server_ != nullptr) server_->Stop();
  }

  const BulkConfig config_;
  const Dependencies with_;
  BulkCounters counters_;
  boost::asio::io_context io_context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_;
  BulkPuller puller_;
  std::unique_ptr<BulkServer> server_;
  std::vector<std::thread> threads_;
};

absl::StatusOr<std::unique_ptr<BulkPlane>> BulkPlane::Create(const BulkConfig& config,
                                                             const Dependencies& dependencies) {
  auto impl = std::make_unique<Impl>(config, dependencies);
  CERTKV_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<BulkPlane>(new BulkPlane(std::move(impl)));
}

BulkPlane::BulkPlane(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

BulkPlane::~BulkPlane() = default;

void BulkPlane::Pull(PullRequest request, BulkPuller::Done done) {
  impl_->puller_.Start(std::move(request), std::move(done));
}

void BulkPlane::Stop() { impl_->Stop(); }

int32_t BulkPlane::port() const { return impl_->server_ == nullptr ? 0 : impl_->server_->port(); }

const BulkCounters& BulkPlane::counters() const { return impl_->counters_; }

}  // namespace certkv::kvstore
