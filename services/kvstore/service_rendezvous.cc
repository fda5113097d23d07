#include "services/kvstore/service_rendezvous.h"

#include <grpcpp/create_channel.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "certkv/kvstore/v1/links.grpc.pb.h"
#include "kernels/core/status.h"
#include "services/common/client_credentials.h"
#include "services/common/errors.h"
#include "services/common/private_file.h"
#include "services/common/wire_version.h"
#include "services/kvstore/convert_links.h"

namespace certkv::kvstore {
namespace {

// A peer that was restarted should be found again soon.
constexpr int kBackoffMinMs = 50;
constexpr int kBackoffMaxMs = 1000;

class GrpcRendezvous final : public NcclRendezvous {
 public:
  explicit GrpcRendezvous(const BulkConfig& config)
      : token_file_(config.token_file),
        credentials_(ClientCredentials(
            config.access.tcp_security == TcpSecurity::kInsecure
                ? CertificateFiles{}
                : CertificateFiles{config.certificate, config.key, config.peer_ca})) {}

  absl::StatusOr<NcclJoined> Join(const std::string& address, const NcclOffer& offer,
                                  int64_t timeout_ms) override {
    v1::JoinLinkResponse response;
    CERTKV_RETURN_IF_ERROR(Call(&v1::StoreLinks::Stub::JoinLink, address, NcclOfferToProto(offer),
                                timeout_ms, &response));
    return NcclJoined{response.link_id(), response.movement_bytes()};
  }

  absl::StatusOr<std::vector<BulkBlock>> Send(const std::string& address, const NcclAsk& ask,
                                              int64_t timeout_ms) override {
    v1::SendBlocksResponse response;
    CERTKV_RETURN_IF_ERROR(Call(&v1::StoreLinks::Stub::SendBlocks, address, NcclAskToProto(ask),
                                timeout_ms, &response));
    return SentBlocksFromProto(response, ask.parts);
  }

  void Cancel() override {
    absl::MutexLock lock(&mutex_);
    is_cancelled_ = true;
    for (grpc::ClientContext* context : running_) context->TryCancel();
  }

 private:
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::StoreLinks::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Response*),
                    const std::string& address, const Request& request, int64_t timeout_ms,
                    Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
    context.AddMetadata(kWireVersionsKey, WireVersionsToText(SupportedWireVersions()));
    if (!token_file_.empty()) {
      CERTKV_ASSIGN_OR_RETURN(const std::string token, ReadTokenFile(token_file_));
      context.AddMetadata("authorization", "Bearer " + token);
    }
    std::shared_ptr<v1::StoreLinks::Stub> stub;
    {
      absl::MutexLock lock(&mutex_);
      stub = StubOf(address);
      running_.push_back(&context);
      if (is_cancelled_) context.TryCancel();
    }
    const absl::Status status = FromGrpcStatus((stub.get()->*method)(&context, request, response));
    {
      absl::MutexLock lock(&mutex_);
      running_.erase(std::find(running_.begin(), running_.end(), &context));
    }
    if (status.ok() || !ReasonOf(status).empty()) return status;
    // gRPC's own words.
    return MakeError(absl::StatusCode::kUnavailable, "NCCL_PEER_UNREACHABLE",
                     absl::StrCat("the store at ", address, " did not answer: ", status.message(),
                                  "; check kvstore.nccl_peers, and that it runs this version"));
  }

  std::shared_ptr<v1::StoreLinks::Stub> StubOf(const std::string& address)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::shared_ptr<v1::StoreLinks::Stub>& stub = stubs_[address];
    if (stub == nullptr) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kBackoffMinMs);
      arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kBackoffMaxMs);
      stub = v1::StoreLinks::NewStub(grpc::CreateCustomChannel(address, credentials_, arguments));
    }
    return stub;
  }

  const std::string token_file_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<v1::StoreLinks::Stub>> stubs_ ABSL_GUARDED_BY(mutex_);
  std::vector<grpc::ClientContext*> running_ ABSL_GUARDED_BY(mutex_);
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::unique_ptr<NcclRendezvous> MakeGrpcRendezvous(const BulkConfig& config) {
  return std::make_unique<GrpcRendezvous>(config);
}

}  // namespace certkv::kvstore
