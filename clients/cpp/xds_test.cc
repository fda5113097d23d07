// Certifiers that gRPC finds by xDS, told of by a control plane in this process, with the bootstrap
// of docs/operations.md.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cpp/certifier_link.h"
#include "xds/ads.grpc.pb.h"

namespace certkv::client {
namespace {

namespace xds = envoy::service::discovery::v3;
namespace v1 = certkv::certifier::v1;

constexpr char kTypes[] = "type.googleapis.com/envoy.";
constexpr char kName[] = "certifiers.example.org:7003";

class NumberedCertifier final : public v1::Certifier::Service {
 public:
  explicit NumberedCertifier(int64_t number) : number_(number) {}
  grpc::Status OpenView(grpc::ServerContext* /*context*/, const v1::OpenViewRequest* /*request*/,
                        v1::OpenViewResponse* response) override {
    response->set_view_id(number_);
    return grpc::Status::OK;
  }

 private:
  const int64_t number_;
};

template <typename Message>
void Pack(const std::string& type, const Message& message, google::protobuf::Any* any) {
  any->set_type_url(absl::StrCat(kTypes, type));
  any->set_value(message.SerializeAsString());
}

// One listener, one route, one cluster, and the endpoints that it is told.
class ControlPlane final : public xds::AggregatedDiscoveryService::Service {
 public:
  void SetPorts(std::vector<int> ports) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    ports_ = std::move(ports);
    ++version_;
  }
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }

  grpc::Status StreamAggregatedResources(
      grpc::ServerContext* /*context*/,
      grpc::ServerReaderWriter<xds::DiscoveryResponse, xds::DiscoveryRequest>* stream) override {
    absl::Mutex write_mutex;
    std::map<std::string, int> sent;  // version by type
    bool is_over = false;
    const auto answer = [&](const std::string& type_url) {
      xds::DiscoveryResponse response;
      int version = 0;
      {
        absl::MutexLock lock(&mutex_);
        version = version_;
        *response.add_resources() = Resource(type_url);
      }
      absl::MutexLock lock(&write_mutex);
      if (sent[type_url] == version) return;  // it has that
      sent[type_url] = version;
      response.set_type_url(type_url);
      response.set_version_info(absl::StrCat(version));
      response.set_nonce(absl::StrCat(version));
      stream->Write(response);
    };
    // Whoever asked for endpoints is told of changes.
    std::thread teller([&] {
      const auto over = [&] {
        absl::MutexLock lock(&mutex_);
        return is_over || stopping_;
      };
      while (!over()) {
        const std::string type_url = absl::StrCat(kTypes, kEndpoints);
        bool has_asked = false;
        {
          absl::MutexLock lock(&write_mutex);
          has_asked = sent.count(type_url) > 0;
        }
        if (has_asked) answer(type_url);
        absl::SleepFor(absl::Milliseconds(10));
      }
    });
    for (xds::DiscoveryRequest request; stream->Read(&request);) answer(request.type_url());
    {
      absl::MutexLock lock(&mutex_);
      is_over = true;
    }
    teller.join();
    return grpc::Status::OK;
  }

 private:
  static constexpr char kListener[] = "config.listener.v3.Listener";
  static constexpr char kManager[] =
      "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
  static constexpr char kRouter[] = "extensions.filters.http.router.v3.Router";
  static constexpr char kCluster[] = "config.cluster.v3.Cluster";
  static constexpr char kEndpoints[] = "config.endpoint.v3.ClusterLoadAssignment";

  google::protobuf::Any Resource(const std::string& type_url) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    google::protobuf::Any any;
    if (absl::EndsWith(type_url, kListener)) {
      xds::HttpConnectionManager manager;
      xds::VirtualHost* host = manager.mutable_route_config()->add_virtual_hosts();
      host->add_domains("*");
      xds::Route* route = host->add_routes();
      route->mutable_match()->set_prefix("/");
      route->mutable_route()->set_cluster("certifiers");
      xds::HttpFilter* filter = manager.add_http_filters();
      filter->set_name("router");
      filter->mutable_typed_config()->set_type_url(absl::StrCat(kTypes, kRouter));
      xds::Listener listener;
      listener.set_name(kName);
      Pack(kManager, manager, listener.mutable_api_listener()->mutable_api_listener());
      Pack(kListener, listener, &any);
    } else if (absl::EndsWith(type_url, kCluster)) {
      xds::Cluster cluster;
      cluster.set_name("certifiers");
      cluster.set_type(3);
      cluster.mutable_eds_cluster_config()->mutable_eds_config()->mutable_ads();
      Pack(kCluster, cluster, &any);
    } else {
      xds::ClusterLoadAssignment assignment;
      assignment.set_cluster_name("certifiers");
      xds::LocalityLbEndpoints* locality = assignment.add_endpoints();
      locality->mutable_locality()->set_region("here");
      locality->mutable_load_balancing_weight()->set_value(1);
      for (const int port : ports_) {
        xds::SocketAddress* address = locality->add_lb_endpoints()
                                          ->mutable_endpoint()
                                          ->mutable_address()
                                          ->mutable_socket_address();
        address->set_address("127.0.0.1");
        address->set_port_value(static_cast<uint32_t>(port));
      }
      Pack(kEndpoints, assignment, &any);
    }
    return any;
  }

  mutable absl::Mutex mutex_;
  int version_ ABSL_GUARDED_BY(mutex_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<int> ports_ ABSL_GUARDED_BY(mutex_);
};

std::unique_ptr<grpc::Server> Serve(grpc::Service* service, int* port) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), port);
  builder.RegisterService(service);
  return builder.BuildAndStart();
}

class XdsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i = 0; i < 3; ++i) {
      certifiers_.push_back(std::make_unique<NumberedCertifier>(i + 1));
      ports_.push_back(0);
      servers_.push_back(Serve(certifiers_.back().get(), &ports_.back()));
    }
    int port = 0;
    control_server_ = Serve(&control_, &port);
    setenv("GRPC_XDS_BOOTSTRAP_CONFIG",
           absl::StrReplaceAll(kBootstrap,
                               {{"xds.example.org:18000", absl::StrCat("127.0.0.1:", port)}})
               .c_str(),
           1);
    options_.certifier_target = absl::StrCat("xds:///", kName);
    options_.rpc_timeout_ms = 5000;
    balancer_ = MakeCertifierBalancer(options_);
  }
  void TearDown() override {
    balancer_.reset();
    control_.Stop();
    const auto now = std::chrono::system_clock::now();
    control_server_->Shutdown(now);
    for (const auto& server : servers_) server->Shutdown(now);
  }
  // Which certifiers open views now, as often as is asked for.
  std::map<int64_t, int> Open(int count) {
    std::map<int64_t, int> opened;
    CertifierLink link(options_, balancer_);
    for (int i = 0; i < count; ++i) {
      v1::OpenViewResponse response;
      const absl::Status status = link.OpenView("", {}, &response);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return opened;
      EXPECT_EQ(link.peer(), absl::StrCat("ipv4:127.0.0.1:", ports_[response.view_id() - 1]));
      ++opened[response.view_id()];
    }
    return opened;
  }
  // Until exactly these open views.
  bool Opens(const std::vector<int64_t>& wanted) {
    for (int i = 0; i < 200; ++i) {
      const std::map<int64_t, int> opened = Open(4 * static_cast<int>(wanted.size()));
      std::vector<int64_t> seen;
      for (const auto& [number, times] : opened) seen.push_back(number);
      if (seen == wanted) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }

  // As docs/operations.md has it.
  static constexpr char kBootstrap[] = R"({
    "xds_servers": [{"server_uri": "xds.example.org:18000",
                     "channel_creds": [{"type": "insecure"}],
                     "server_features": ["xds_v3"]}],
    "node": {"id": "engine-1"}})";

  std::vector<std::unique_ptr<NumberedCertifier>> certifiers_;
  std::vector<int> ports_;
  std::vector<std::unique_ptr<grpc::Server>> servers_;
  ControlPlane control_;
  std::unique_ptr<grpc::Server> control_server_;
  Options options_;
  std::shared_ptr<grpc::Channel> balancer_;
};

TEST_F(XdsTest, ViewsAreOpenedWhereTheControlPlaneSays) {
  ASSERT_NE(balancer_, nullptr) << "xds: is a target of several";
  control_.SetPorts({ports_[0], ports_[1]});
  EXPECT_TRUE(Opens({1, 2}));
  control_.SetPorts({ports_[1], ports_[2]});
  EXPECT_TRUE(Opens({2, 3})) << "the next answer of the control plane";
}

}  // namespace
}  // namespace certkv::client
