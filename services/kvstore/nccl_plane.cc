#include "services/kvstore/nccl_plane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/nccl/library.h"
#include "services/common/log.h"

namespace certkv::kvstore {

absl::StatusOr<std::unique_ptr<NcclPlane>> NcclPlane::Create(const NcclConfig& config,
                                                             Dependencies with) {
  std::unique_ptr<NcclPlane> plane(new NcclPlane(config));
  plane->rendezvous_ = std::move(with.rendezvous);
  if (!config.is_on()) {
    plane->off_ = MakeError(absl::StatusCode::kFailedPrecondition, "NCCL_OFF",
                            "kvstore.nccl is off at this store; set auto there, or ask by TCP");
    return plane;
  }
  const absl::Status opened = plane->Open(with);
  if (opened.ok()) return plane;
  if (config.choice == NcclChoice::kRequire) return opened;
  plane->off_ =
      MakeError(absl::StatusCode::kFailedPrecondition, "NCCL_OFF",
                absl::StrCat("this store has no NCCL (", opened.message(), "); ask by TCP"));
  plane->counters_.CountFailure(ReasonOf(opened));
  Log(LogLevel::kWarning, "nccl_not_used",
      {{"reason", ReasonOf(opened)}, {"message", opened.message()}, {"instead", "TCP"}});
  return plane;
}

NcclPlane::NcclPlane(const NcclConfig& config) : config_(config) {}

NcclPlane::~NcclPlane() { Stop(); }

absl::Status NcclPlane::Open(const Dependencies& with) {
  CERTKV_ASSIGN_OR_RETURN(const auto addresses, config_.PeerAddresses());
  if (with.place.runtime == nullptr) {
    if (!with.no_device.ok()) return with.no_device;
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                     "kvstore.nccl moves bytes between GPUs, and this store has none; set "
                     "kvstore.device to auto or cuda, or nccl: off");
  }
  CERTKV_ASSIGN_OR_RETURN(library_, nccl::OpenLibrary(config_.library));
  const int64_t lease_ms =
      std::min(with.lease_ms_max, std::max<int64_t>(2 * config_.timeout_ms, 1000));
  server_ = std::make_unique<NcclServer>(
      config_, NcclServer::Dependencies{with.engine, library_.get(), with.place, with.clock,
                                        &counters_, lease_ms});
  puller_ =
      std::make_unique<NcclPuller>(config_, addresses,
                                   NcclPuller::Dependencies{library_.get(), with.place, with.clock,
                                                            rendezvous_.get(), &counters_});
  Log(LogLevel::kInfo, "nccl_used",
      {{"version", CommunicatorVersionText(library_->version())},
       {"library", library_->path()},
       {"device", with.place.device.device}});
  return absl::OkStatus();
}

absl::StatusOr<NcclServer*> NcclPlane::server() const {
  if (server_ == nullptr) return off_;
  return server_.get();
}

void NcclPlane::Stop() {
  if (puller_ != nullptr) puller_->Stop();
  if (server_ != nullptr) server_->Stop();
}

}  // namespace certkv::kvstore
