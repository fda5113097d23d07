#include "clients/cpp/certifier_link.h"

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "clients/cpp/rpc.h"
#include "services/common/call_trace.h"

namespace certkv::client {
namespace {

namespace v1 = certkv::certifier::v1;

constexpr int kReplicasAskedMax = 2;  // for one view

// The name that certificates of the replicas have: that of "dns:///name:port",
// "dns://server/name:port" and "xds:///name:port". "": an address is its own name.
std::string ServerNameOf(absl::string_view target) {
  if (!absl::ConsumePrefix(&target, "dns:") && !absl::ConsumePrefix(&target, "xds:")) return "";
  target.remove_prefix(target.rfind('/') + 1);  // npos + 1 = 0
  if (absl::StartsWith(target, "[")) return "";
  return std::string(target.substr(0, target.rfind(':')));
}

}  // namespace

std::shared_ptr<grpc::Channel> MakeCertifierBalancer(const Options& options) {
  if (!IsReplicated(options.certifier_target)) return nullptr;
  return MakeChannel(options.certifier_target, options, {.balance = true, .server_name = ""});
}

CertifierLink::CertifierLink(const Options& options, const std::shared_ptr<grpc::Channel>& balancer)
    : options_(options) {
  if (balancer != nullptr) {
    chooser_ = v1::Certifier::NewStub(balancer);
  } else {
    stub_ = v1::Certifier::NewStub(MakeChannel(options_.certifier_target, options_));
  }
}

absl::Status CertifierLink::OpenView(const std::string& traceparent,
                                     const v1::OpenViewRequest& request,
                                     v1::OpenViewResponse* response) {
  v1::Certifier::Stub* const asked = chooser_ != nullptr ? chooser_.get() : stub_.get();
  std::string peer;
  absl::Status status;
  for (int i = 0; i < (chooser_ != nullptr ? kReplicasAskedMax : 1); ++i) {
    status = CallUnary(options_.rpc_timeout_ms, Retry::kNever, [&](grpc::ClientContext& context) {
      SetTraceparent(traceparent, &context);
      grpc::Status answer = asked->OpenView(&context, request, response);
      peer = context.peer();
      return answer;
    });
    if (!absl::IsUnavailable(status)) break;
  }
  if (!status.ok()) return status;
  if (chooser_ != nullptr && (stub_ == nullptr || peer != peer_)) {
    stub_ = v1::Certifier::NewStub(
        MakeChannel(peer, options_,
                    {.balance = false, .server_name = ServerNameOf(options_.certifier_target)}));
  }
  peer_ = peer;
  return status;
}

}  // namespace certkv::client
