#include "services/cluster/etcd_client.h"

#include <grpcpp/create_channel.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "etcd/rpc.grpc.pb.h"
#include "kernels/core/status.h"
#include "services/common/client_credentials.h"

namespace certkv::cluster {
namespace {

namespace pb = etcdserverpb;

// etcd refuses pings that come more often than every 5 s.
constexpr int kPingMs = 10'000;
constexpr int kPingTimeoutMs = 5'000;

// The first key that does not begin with `prefix`, as etcd's range_end.
std::string EndOf(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');
  ++prefix.back();
  return prefix;
}

EtcdEntry EntryOf(const pb::KeyValue& kv) { return {kv.key(), kv.value(), kv.mod_revision()}; }

}  // namespace

class EtcdClient::Call {
 public:
  // `timeout_ms` 0: as long as it takes.
  Call(EtcdClient* client, int64_t timeout_ms) : client_(client) {
    if (timeout_ms > 0) {
      context_.set_deadline(std::chrono::system_clock::now() +
                            std::chrono::milliseconds(timeout_ms));
    }
    absl::MutexLock lock(&client_->mutex_);
    client_->running_.push_back(&context_);
    if (client_->stopped_) context_.TryCancel();
  }
  ~Call() {
    absl::MutexLock lock(&client_->mutex_);
    auto& running = client_->running_;
    running.erase(std::find(running.begin(), running.end(), &context_));
  }
  grpc::ClientContext* context() { return &context_; }

 private:
  EtcdClient* const client_;
  grpc::ClientContext context_;
};

std::shared_ptr<grpc::Channel> EtcdClient::Channel(std::string* endpoint) {
  absl::MutexLock lock(&mutex_);
  *endpoint = options_.endpoints[endpoint_ % options_.endpoints.size()];
  if (channel_ == nullptr) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
    // Not one connection for all clients of the process: a broken one must be made anew.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channel_ = grpc::CreateCustomChannel(*endpoint, ClientCredentials(options_.tls), arguments);
  }
  return channel_;
}

absl::Status EtcdClient::Failed(const std::string& endpoint, const grpc::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (options_.endpoints[endpoint_ % options_.endpoints.size()] == endpoint) ++endpoint_;
    channel_.reset();
  }
  return MakeError(
      absl::StatusCode::kUnavailable, "ETCD_UNAVAILABLE",
      absl::StrCat("etcd at ", endpoint, " does not answer as it should: ",
                   status.error_message().empty() ? "the call broke off" : status.error_message(),
                   "; the nodes known so far stay; check the endpoints"));
}

absl::Status EtcdClient::Ask(
    absl::FunctionRef<grpc::Status(const std::shared_ptr<grpc::Channel>&, grpc::ClientContext*)>
        method) {
  std::string endpoint;
  const std::shared_ptr<grpc::Channel> channel = Channel(&endpoint);
  Call call(this, options_.timeout_ms);
  const grpc::Status status = method(channel, call.context());
  return status.ok() ? absl::OkStatus() : Failed(endpoint, status);
}

absl::StatusOr<int64_t> EtcdClient::GrantLease(int64_t ttl_seconds) {
  pb::LeaseGrantRequest request;
  request.set_ttl(ttl_seconds);
  pb::LeaseGrantResponse response;
  CERTKV_RETURN_IF_ERROR(Ask([&](const auto& channel, grpc::ClientContext* context) {
    const grpc::Status status =
        pb::Lease::NewStub(channel)->LeaseGrant(context, request, &response);
    if (!status.ok() || response.error().empty()) return status;
    return grpc::Status(grpc::StatusCode::INTERNAL, response.error());
  }));
  return response.id();
}

absl::Status EtcdClient::KeepAlive(int64_t lease) {
  std::string endpoint;
  const auto stub = pb::Lease::NewStub(Channel(&endpoint));
  Call call(this, options_.timeout_ms);
  const auto stream = stub->LeaseKeepAlive(call.context());
  pb::LeaseKeepAliveRequest request;
  request.set_id(lease);
  pb::LeaseKeepAliveResponse response;
  const bool answered = stream->Write(request) && stream->WritesDone() && stream->Read(&response);
  if (!answered) return Failed(endpoint, stream->Finish());
  // etcd ends the stream when it is done writing; a Finish that fails changes no answer.
  stream->Finish();
  if (response.ttl() > 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kNotFound, "ETCD_LEASE_ENDED",
                   absl::StrCat("lease ", lease,
                                " has ended at etcd: it was not kept alive in "
                                "time, or was revoked; the node registers again"));
}

absl::Status EtcdClient::Revoke(int64_t lease) {
  pb::LeaseRevokeRequest request;
  request.set_id(lease);
  pb::LeaseRevokeResponse response;
  CERTKV_RETURN_IF_ERROR(Ask([&](const auto& channel, grpc::ClientContext* context) {
    return pb::Lease::NewStub(channel)->LeaseRevoke(context, request, &response);
  }));
  return absl::OkStatus();
}

absl::StatusOr<bool> EtcdClient::PutIf(const std::string& key, const std::string& value,
                                       int64_t lease, int64_t mod_revision) {
  pb::TxnRequest request;
  pb::Compare* compare = request.add_compare();
  compare->set_result(pb::Compare::EQUAL);
  compare->set_target(pb::Compare::MOD);
  compare->set_key(key);
  compare->set_mod_revision(mod_revision);
  pb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(key);
  put->set_value(value);
  put->set_lease(lease);
  pb::TxnResponse response;
  CERTKV_RETURN_IF_ERROR(Ask([&](const auto& channel, grpc::ClientContext* context) {
    return pb::KV::NewStub(channel)->Txn(context, request, &response);
  }));
  return response.succeeded();
}

absl::StatusOr<EtcdListing> EtcdClient::List(const std::string& prefix) {
  pb::RangeRequest request;
  request.set_key(prefix);
  request.set_range_end(EndOf(prefix));
  pb::RangeResponse response;
  CERTKV_RETURN_IF_ERROR(Ask([&](const auto& channel, grpc::ClientContext* context) {
    return pb::KV::NewStub(channel)->Range(context, request, &response);
  }));
  EtcdListing listing;
  listing.revision = response.header().revision();
  for (const pb::KeyValue& kv : response.kvs()) listing.entries.push_back(EntryOf(kv));
  return listing;
}

absl::StatusOr<EtcdEntry> EtcdClient::Get(const std::string& key) {
  pb::RangeRequest request;
  request.set_key(key);
  pb::RangeResponse response;
  CERTKV_RETURN_IF_ERROR(Ask([&](const auto& channel, grpc::ClientContext* context) {
    return pb::KV::NewStub(channel)->Range(context, request, &response);
  }));
  return response.kvs_size() == 0 ? EtcdEntry{key, "", 0} : EntryOf(response.kvs(0));
}

absl::Status EtcdClient::Watch(
    const std::string& prefix, int64_t revision,
    const std::function<void(const std::vector<EtcdChange>&, int64_t revision)>& on_changes) {
  std::string endpoint;
  const auto stub = pb::Watch::NewStub(Channel(&endpoint));
  Call call(this, /*timeout_ms=*/0);
  const auto stream = stub->Watch(call.context());
  pb::WatchRequest request;
  request.mutable_create_request()->set_key(prefix);
  request.mutable_create_request()->set_range_end(EndOf(prefix));
  request.mutable_create_request()->set_start_revision(revision);
  pb::WatchResponse response;
  bool open = stream->Write(request);
  while (open && stream->Read(&response)) {
    if (response.compact_revision() > 0) {
      call.context()->TryCancel();
      stream->Finish();
      return MakeError(absl::StatusCode::kOutOfRange, "ETCD_COMPACTED",
                       absl::StrCat("etcd has forgotten the changes from revision ", revision,
                                    " to ", response.compact_revision(), "; list again"));
    }
    if (response.canceled()) {
      call.context()->TryCancel();
      stream->Finish();
      return Failed(endpoint, grpc::Status(grpc::StatusCode::CANCELLED, response.cancel_reason()));
    }
    std::vector<EtcdChange> changes;
    for (const pb::Event& event : response.events()) {
      changes.push_back({event.type() == pb::Event::DELETE, EntryOf(event.kv())});
    }
    if (!changes.empty()) on_changes(changes, response.header().revision());
  }
  return Failed(endpoint, stream->Finish());
}

void EtcdClient::Stop() {
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
  for (grpc::ClientContext* context : running_) context->TryCancel();
}

}  // namespace certkv::cluster
