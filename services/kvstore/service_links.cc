#include "services/kvstore/service_links.h"

#include <string>
#include <utility>

#include "kernels/core/status.h"
#include "services/common/errors.h"
#include "services/kvstore/convert.h"
#include "services/kvstore/convert_links.h"

namespace certkv::kvstore {
namespace {

constexpr absl::string_view kDomain = "kvstore.certkv";

class LinkCalls final : public v1::StoreLinks::CallbackService {
 public:
  explicit LinkCalls(LinkCallsDependencies with) : with_(std::move(with)) {}

  grpc::ServerUnaryReactor* JoinLink(grpc::CallbackServerContext* context,
                                     const v1::JoinLinkRequest* request,
                                     v1::JoinLinkResponse* response) override {
    return Finish(context->DefaultReactor(), Join(*context, *request, response));
  }

  grpc::ServerUnaryReactor* SendBlocks(grpc::CallbackServerContext* context,
                                       const v1::SendBlocksRequest* request,
                                       v1::SendBlocksResponse* response) override {
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    const absl::Status status = Send(*context, *request, reactor, response);
    return status.ok() ? reactor : Finish(reactor, status);
  }

 private:
  absl::Status Join(const grpc::CallbackServerContext& context, const v1::JoinLinkRequest& request,
                    v1::JoinLinkResponse* response) const {
    CERTKV_ASSIGN_OR_RETURN(const IdentityPtr caller, CheckCaller(context));
    CERTKV_ASSIGN_OR_RETURN(NcclServer* const server, with_.nccl->server());
    CERTKV_ASSIGN_OR_RETURN(NcclOffer offer, NcclOfferFromProto(request));
    CERTKV_ASSIGN_OR_RETURN(offer.tenant, caller->ResolveTenant(request.tenant()));
    CERTKV_ASSIGN_OR_RETURN(const NcclJoined joined, server->Join(offer, context.peer()));
    response->set_link_id(joined.link_id);
    response->set_movement_bytes(joined.movement_bytes);
    return absl::OkStatus();
  }

  // OK: the link finishes the call.
  absl::Status Send(const grpc::CallbackServerContext& context,
                    const v1::SendBlocksRequest& request, grpc::ServerUnaryReactor* reactor,
                    v1::SendBlocksResponse* response) const {
    CERTKV_ASSIGN_OR_RETURN(const IdentityPtr caller, CheckCaller(context));
    CERTKV_ASSIGN_OR_RETURN(NcclServer* const server, with_.nccl->server());
    // Asked for every run: a token may be withdrawn, and a link may be another tenant's.
    CERTKV_RETURN_IF_ERROR(server->CheckTenant(
        request.link_id(), [&caller](absl::string_view tenant) { return caller->MayUse(tenant); }));
    CERTKV_ASSIGN_OR_RETURN(NcclAsk ask, NcclAskFromProto(request));
    server->Send(std::move(ask), [reactor, response](const auto& blocks) {
      if (blocks.ok()) SentBlocksToProto(*blocks, response);
      Finish(reactor, blocks.status());
    });
    return absl::OkStatus();
  }

  absl::StatusOr<IdentityPtr> CheckCaller(const grpc::CallbackServerContext& context) const {
    const grpc::Status deadline = RequireDeadline(context, kDomain);
    if (!deadline.ok()) return FromGrpcStatus(deadline);
    CERTKV_ASSIGN_OR_RETURN(IdentityPtr caller, Admit(with_.access, context, Scope::kRead));
    CERTKV_RETURN_IF_ERROR(with_.check_serving());
    return caller;
  }

  static grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor,
                                          const absl::Status& status) {
    reactor->Finish(ToGrpcStatus(status, kDomain));
    return reactor;
  }

  const LinkCallsDependencies with_;
};

}  // namespace

std::unique_ptr<v1::StoreLinks::CallbackService> MakeLinkCalls(LinkCallsDependencies with) {
  return std::make_unique<LinkCalls>(std::move(with));
}

}  // namespace certkv::kvstore
