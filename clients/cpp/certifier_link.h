// CertifierLink: the way to the certifier at which a view is open.
//
// The target may name several certifiers of one store (IsReplicated, options.h). Which of them
// opens a view is up to gRPC: its resolver finds their addresses, and its balancer round_robin
// takes in turn those that are connected. The view is that replica's alone; so what follows goes to
// the address that answered, by a channel of its own. When the replica is gone, another OpenView
// finds another.
#ifndef CERTKV_CLIENTS_CPP_CERTIFIER_LINK_H_
#define CERTKV_CLIENTS_CPP_CERTIFIER_LINK_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "clients/cpp/options.h"

namespace certkv::client {

// The channel by which views are opened at one of several certifiers, for all links of a worker;
// null when options.certifier_target names one.
std::shared_ptr<grpc::Channel> MakeCertifierBalancer(const Options& options);  // targets resolved

// Threads: one call at a time, as an Attention.
class CertifierLink {
 public:
  // `balancer` is MakeCertifierBalancer's for the same options.
  CertifierLink(const Options& options, const std::shared_ptr<grpc::Channel>& balancer);

  // Opens a view; stub() leads to its certifier afterwards. Of several certifiers, a second is
  // asked when the first is unavailable: it may have died a moment ago. An answer that was lost
  // leaves a view that its certifier closes when it is idle.
  absl::Status OpenView(const std::string& traceparent,
                        const certkv::certifier::v1::OpenViewRequest& request,
                        certkv::certifier::v1::OpenViewResponse* response);

  // Of the last view that was opened; null before, when there are several certifiers.
  certkv::certifier::v1::Certifier::Stub* stub() const { return stub_.get(); }
  // Address of that certifier, as gRPC writes it; "" before.
  const std::string& peer() const { return peer_; }

 private:
  const Options options_;
  std::unique_ptr<certkv::certifier::v1::Certifier::Stub> chooser_;  // null: there is one certifier
  std::unique_ptr<certkv::certifier::v1::Certifier::Stub> stub_;
  std::string peer_;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_CERTIFIER_LINK_H_
