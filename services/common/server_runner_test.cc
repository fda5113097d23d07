#include "services/common/server_runner.h"

#include <fcntl.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "gmock/gmock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "gtest/gtest.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"
#include "services/common/runtime_directory.h"

namespace certkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kGateName[] = "certkv.gate.v1.Gate";

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using HealthStatus = HealthCheckResponse::ServingStatus;

// GetPolicy answers when `release` is notified, or at once when there is none.
class SlowGate : public gate::v1::Gate::CallbackService {
 public:
  grpc::ServerUnaryReactor* GetPolicy(grpc::CallbackServerContext* context,
                                      const gate::v1::GetPolicyRequest*,
                                      gate::v1::Policy* response) override {
    auto* reactor = context->DefaultReactor();
    const grpc::Status status = RequireDeadline(*context);
    response->set_version(7);
    if (!status.ok() || release == nullptr) {
      reactor->Finish(status);
      return reactor;
    }
    // As services do: what takes time runs on the io_context.
    boost::asio::post(*io, [this, reactor] {
      if (!entered.HasBeenNotified()) entered.Notify();
      release->WaitForNotificationWithTimeout(absl::Seconds(20));
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }
  boost::asio::io_context* io = nullptr;
  absl::Notification entered;
  absl::Notification* release = nullptr;
};

class ServerRunnerTest : public ::testing::Test {
 protected:
  ServerRunnerTest() {
    std::string pattern = absl::StrCat(::testing::TempDir(), "certkv_runner_XXXXXX");
    directory_ = mkdtemp(pattern.data());
    config_.unix_socket = directory_ + "/run/gate.sock";
    config_.io_threads = 2;
    config_.log_level = LogLevel::kError;
  }
  ~ServerRunnerTest() override {
    runner_.reset();
    [[maybe_unused]] const int result = std::system(("rm -rf " + directory_).c_str());
  }

  absl::Status Start() {
    runner_ = std::make_unique<ServerRunner>("test", config_);
    gate_.io = runner_->io_context();
    return runner_->Start({{.name = kGateName,
                            .services = {&gate_},
                            .drain = [this] { drained_ = true; },
                            .when_ready = when_ready_}});
  }
  std::shared_ptr<grpc::Channel> Channel(int index = 0) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxSendMessageSize(-1);
    return grpc::CreateCustomChannel(runner_->targets().at(index),
                                     grpc::InsecureChannelCredentials(), arguments);
  }
  static grpc::Status GetPolicy(const std::shared_ptr<grpc::Channel>& channel,
                                absl::Duration timeout = absl::Seconds(10)) {
    grpc::ClientContext context;
    if (timeout != absl::InfiniteDuration()) {
      context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
    }
    gate::v1::Policy policy;
    return gate::v1::Gate::NewStub(channel)->GetPolicy(&context, {}, &policy);
  }

  std::string directory_;
  ServerConfig config_;
  SlowGate gate_;
  std::atomic<bool> drained_ = false;
  std::function<void(std::function<void()>)> when_ready_;
  std::unique_ptr<ServerRunner> runner_;
};

// A call by raw bytes, because Debian ships no stubs of reflection. It writes one
// message and calls `on_answer` for each answer until that returns false.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     const std::string& request,
                     const std::function<bool(const std::string&)>& on_answer) {
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  grpc::GenericStub stub(channel);
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  bool good = wait();
  if (good) {
    grpc::Slice slice(request);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    good = wait();
  }
  while (good) {
    grpc::ByteBuffer answer;
    call->Read(&answer, nullptr);
    good = wait();
    grpc::Slice slice;
    if (good && answer.DumpToSingleSlice(&slice).ok() &&
        !on_answer(std::string(reinterpret_cast<const char*>(slice.begin()), slice.size()))) {
      context.TryCancel();
      break;
    }
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  queue.Shutdown();
  while (wait()) {
  }
  return status;
}

// The first status that Watch tells; and whether Check tells the same.
HealthStatus CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& name) {
  HealthCheckRequest request;
  request.set_service(name);
  HealthCheckResponse watched;
  HealthCheckResponse checked;
  grpc::ClientContext watch_context;
  auto stub = grpc::health::v1::Health::NewStub(channel);
  EXPECT_TRUE(stub->Watch(&watch_context, request)->Read(&watched));
  grpc::ClientContext check_context;
  const grpc::Status status = stub->Check(&check_context, request, &checked);
  if (!status.ok()) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    checked.set_status(HealthCheckResponse::SERVICE_UNKNOWN);
  }
  EXPECT_EQ(checked.status(), watched.status());
  return watched.status();
}

// Watches a service's health on a thread until the server ends the stream.
class HealthWatch {
 public:
  HealthWatch(const std::shared_ptr<grpc::Channel>& channel, const std::string& name)
      : thread_([this, channel, name] {
          HealthCheckRequest request;
          request.set_service(name);
          auto reader = grpc::health::v1::Health::NewStub(channel)->Watch(&context_, request);
          HealthCheckResponse response;
          while (reader->Read(&response)) {
            seen_.push_back(response.status());
            if (seen_.size() == 1) first_seen_.Notify();
          }
          status_ = reader->Finish();
        }) {
    first_seen_.WaitForNotificationWithTimeout(absl::Seconds(10));
  }
  // All statuses seen, when the server has ended the stream: with OK, or, where gRPC's client
  // writes to a connection that the server has closed behind that and gives up what it hadn't read
  // yet, with UNAVAILABLE.
  std::vector<HealthStatus> Join() {
    thread_.join();
    if (!status_.ok()) {
      EXPECT_EQ(status_.error_code(), grpc::StatusCode::UNAVAILABLE) << status_.error_message();
    }
    return seen_;
  }

 private:
  grpc::ClientContext context_;
  absl::Notification first_seen_;
  std::vector<HealthStatus> seen_;
  grpc::Status status_;
  std::thread thread_;
};

TEST_F(ServerRunnerTest, ServesOnAUnixSocketInAPrivateDirectory) {
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(runner_->targets(), std::vector<std::string>{"unix:" + config_.unix_socket});
  EXPECT_TRUE(GetPolicy(Channel()).ok());
  struct stat info {};
  ASSERT_EQ(stat((directory_ + "/run").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST_F(ServerRunnerTest, ServesOnTcpWhenAsked) {
  config_.access.tcp_address = "127.0.0.1:0";
  config_.access.tcp_security = TcpSecurity::kInsecure;
  ASSERT_TRUE(Start().ok());
  ASSERT_EQ(runner_->targets().size(), 2u);
  EXPECT_THAT(runner_->targets()[1], StartsWith("127.0.0.1:"));
  EXPECT_NE(runner_->targets()[1], "127.0.0.1:0");
  EXPECT_TRUE(GetPolicy(Channel(1)).ok());
}

TEST_F(ServerRunnerTest, RefusesATakenTcpPort) {
  config_.access.tcp_address = "127.0.0.1:0";
  config_.access.tcp_security = TcpSecurity::kInsecure;
  ASSERT_TRUE(Start().ok());
  ServerConfig other = config_;
  other.unix_socket.clear();
  other.access.tcp_address = runner_->targets()[1];
  ServerRunner second("second", other);
  const absl::Status status = second.Start({});
  EXPECT_EQ(ReasonOf(status), "LISTEN_FAILED");
  EXPECT_THAT(std::string(status.message()), HasSubstr(other.access.tcp_address));
}

TEST_F(ServerRunnerTest, RefusesCallsWithoutADeadline) {
  ASSERT_TRUE(Start().ok());
  const absl::Status status = FromGrpcStatus(GetPolicy(Channel(), absl::InfiniteDuration()));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "DEADLINE_REQUIRED");
}

TEST_F(ServerRunnerTest, RefusesOversizedMessages) {
  ASSERT_TRUE(Start().ok());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  gate::v1::OpenRequestRequest request;
  request.set_label(std::string(kMessageBytesMax + 1, 'x'));
  gate::v1::OpenRequestResponse response;
  const grpc::Status status =
      gate::v1::Gate::NewStub(Channel())->OpenRequest(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(ServerRunnerTest, HealthKnowsTheServerAndEachService) {
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(CheckHealth(Channel(), ""), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth(Channel(), kGateName), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth(Channel(), "certkv.nothing"), HealthCheckResponse::SERVICE_UNKNOWN);
}

TEST_F(ServerRunnerTest, HealthSaysServingOnceTheServiceIsReady) {
  std::function<void()> ready;
  when_ready_ = [&ready](std::function<void()> call) { ready = std::move(call); };
  ASSERT_TRUE(Start().ok());
  EXPECT_EQ(CheckHealth(Channel(), kGateName), HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(CheckHealth(Channel(), ""), HealthCheckResponse::NOT_SERVING);
  HealthWatch service(Channel(), kGateName);
  HealthWatch whole(Channel(), "");
  ready();
  EXPECT_EQ(CheckHealth(Channel(), kGateName), HealthCheckResponse::SERVING);
  EXPECT_EQ(CheckHealth(Channel(), ""), HealthCheckResponse::SERVING);
  runner_->RequestStop();
  runner_->Run();  // Stop would cancel the watches before their end has been sent
  for (HealthWatch* watch : {&service, &whole}) {
    EXPECT_THAT(watch->Join(),
                ElementsAre(HealthCheckResponse::NOT_SERVING, HealthCheckResponse::SERVING,
                            HealthCheckResponse::NOT_SERVING));
  }
}

TEST_F(ServerRunnerTest, AServerThatStopsBeforeItIsReadyEndsItsWatches) {
  when_ready_ = [](const std::function<void()>&) {};
  ASSERT_TRUE(Start().ok());
  HealthWatch watch(Channel(), kGateName);
  runner_->RequestStop();
  runner_->Run();  // as above
  EXPECT_THAT(watch.Join(), ElementsAre(HealthCheckResponse::NOT_SERVING));
}

TEST_F(ServerRunnerTest, ReflectionListsTheServices) {
  ASSERT_TRUE(Start().ok());
  std::string answer;
  // ServerReflectionRequest{list_services: ""}
  CallRaw(Channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
          std::string("\x3a\x00", 2), [&answer](const std::string& bytes) {
            answer = bytes;
            return false;
          });
  EXPECT_THAT(answer, HasSubstr(kGateName));
  EXPECT_THAT(answer, HasSubstr("grpc.health.v1.Health"));
}

TEST_F(ServerRunnerTest, DrainSaysNotServingAndFinishesRunningCalls) {
  absl::Notification release;
  gate_.release = &release;
  ASSERT_TRUE(Start().ok());
  const auto channel = Channel();
  grpc::Status slow_status;
  std::thread slow([&] { slow_status = GetPolicy(channel); });
  gate_.entered.WaitForNotification();

  HealthWatch watch(channel, kGateName);
  std::thread run([&] { runner_->Run(); });
  runner_->RequestStop();
  EXPECT_THAT(watch.Join(),
              ElementsAre(HealthCheckResponse::SERVING, HealthCheckResponse::NOT_SERVING));
  // New calls are refused while the old one is still running.
  grpc::Status late_status;
  do {  // one that comes within the first milliseconds may still be taken, and waits like the first
    late_status = GetPolicy(Channel(), absl::Milliseconds(300));
  } while (late_status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED ||
           late_status.error_code() == grpc::StatusCode::CANCELLED);
  EXPECT_EQ(late_status.error_code(), grpc::StatusCode::UNAVAILABLE);
  // Services are told just after that, while the old call is still running.
  for (int n = 0; n < 1000 && !drained_; ++n) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_TRUE(drained_);
  release.Notify();
  slow.join();
  run.join();
  EXPECT_TRUE(slow_status.ok()) << slow_status.error_message();
  struct stat info {};
  EXPECT_NE(stat(config_.unix_socket.c_str(), &info), 0) << "the socket file is removed";
}

TEST_F(ServerRunnerTest, DrainCancelsWhatOutlivesTheTimeout) {
  absl::Notification release;
  gate_.release = &release;
  config_.drain_timeout_ms = 100;
  ASSERT_TRUE(Start().ok());
  grpc::Status slow_status;
  std::thread slow([&, channel = Channel()] { slow_status = GetPolicy(channel); });
  gate_.entered.WaitForNotification();
  std::thread run([&] { runner_->Run(); });
  runner_->RequestStop();
  slow.join();  // the client hears it although the server's work still hangs
  EXPECT_FALSE(slow_status.ok());
  release.Notify();
  run.join();
}

TEST_F(ServerRunnerTest, AnOpenHealthWatchDoesNotHoldUpTheDrain) {
  config_.drain_timeout_ms = 8000;
  ASSERT_TRUE(Start().ok());
  HealthWatch watch(Channel(), kGateName);
  std::thread run([&] { runner_->Run(); });
  const auto begin = std::chrono::steady_clock::now();
  runner_->RequestStop();
  run.join();
  watch.Join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
}

TEST_F(ServerRunnerTest, DrainsOnSigterm) {
  ASSERT_TRUE(Start().ok());
  std::thread run([&] { runner_->Run(); });
  kill(getpid(), SIGTERM);
  run.join();
  EXPECT_TRUE(drained_);
}

TEST_F(ServerRunnerTest, ReplacesTheSocketOfADeadServer) {
  ASSERT_EQ(mkdir((directory_ + "/run").c_str(), 0700), 0);
  {
    UniqueFd dead(socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, config_.unix_socket.c_str(), sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ASSERT_TRUE(Start().ok());
  EXPECT_TRUE(GetPolicy(Channel()).ok());
}

TEST_F(ServerRunnerTest, RefusesTheSocketOfALiveServer) {
  ASSERT_TRUE(Start().ok());
  ServerRunner second("second", config_);
  const absl::Status status = second.Start({});
  EXPECT_EQ(ReasonOf(status), "SOCKET_IN_USE");
  EXPECT_THAT(std::string(status.message()), HasSubstr(config_.unix_socket));
  EXPECT_TRUE(GetPolicy(Channel()).ok()) << "the first one is unharmed";
}

TEST_F(ServerRunnerTest, RefusesTheSocketOfALiveStranger) {
  ASSERT_EQ(mkdir((directory_ + "/run").c_str(), 0700), 0);
  UniqueFd stranger(socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, config_.unix_socket.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(stranger.get(), 1), 0);
  EXPECT_EQ(ReasonOf(Start()), "SOCKET_IN_USE");
}

TEST_F(ServerRunnerTest, LeavesAFileAloneThatIsNoSocket) {
  ASSERT_EQ(mkdir((directory_ + "/run").c_str(), 0700), 0);
  std::ofstream(config_.unix_socket) << "precious";
  EXPECT_EQ(ReasonOf(Start()), "SOCKET_PATH_TAKEN");
  std::string text;
  std::ifstream(config_.unix_socket) >> text;
  EXPECT_EQ(text, "precious");
}

TEST_F(ServerRunnerTest, RefusesAPathThatIsTooLong) {
  config_.unix_socket = directory_ + "/" + std::string(100, 'x');
  const absl::Status status = Start();
  EXPECT_EQ(ReasonOf(status), "SOCKET_PATH_TOO_LONG");
  EXPECT_THAT(std::string(status.message()), HasSubstr("the system allows 107"));
}

TEST_F(ServerRunnerTest, RefusesADirectoryThatOthersMayChange) {
  ASSERT_EQ(mkdir((directory_ + "/run").c_str(), 0700), 0);
  ASSERT_EQ(chmod((directory_ + "/run").c_str(), 0777), 0);
  EXPECT_EQ(ReasonOf(Start()), "SOCKET_DIRECTORY_UNSAFE");
}

TEST_F(ServerRunnerTest, RefusesToServeNowhere) {
  config_.unix_socket.clear();
  EXPECT_EQ(ReasonOf(Start()), "NO_ADDRESS");
}

TEST(RuntimeDirectoryTest, FollowsTheEnvironment) {
  setenv("CERTKV_RUNTIME_DIR", "/a", 1);
  setenv("XDG_RUNTIME_DIR", "/b", 1);
  EXPECT_EQ(RuntimeDirectory(), "/a");
  unsetenv("CERTKV_RUNTIME_DIR");
  EXPECT_EQ(RuntimeDirectory(), "/b/certkv");
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(RuntimeDirectory(), absl::StrCat("/tmp/certkv-", getuid()));
}

}  // namespace
}  // namespace certkv
