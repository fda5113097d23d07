// What comes over the bulk plane that should not: each gets an error with a reason, nobody gets
// another tenant's blocks, and the next good call works.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "kernels/core/sha256.h"
#include "services/kvstore/bulk_frame.h"
#include "tests/support/bulk_fixture.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;

// A client that says what it likes.
class RawClient {
 public:
  explicit RawClient(int32_t port) : fd_(ConnectToLoopback(port)) {
    const timeval limit{10, 0};
    setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  void Send(const std::string& bytes) { SendAll(fd_.get(), bytes.data(), bytes.size()); }
  void EndSending() { shutdown(fd_.get(), SHUT_WR); }
  // "" when the server has closed the connection.
  std::string Receive(size_t size) {
    std::string bytes(size, '\0');
    const ssize_t got = recv(fd_.get(), bytes.data(), size, MSG_WAITALL);
    bytes.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return bytes;
  }
  // The frame that comes next, with its data after its body.
  std::pair<BulkHeader, std::string> ReceiveFrame() {
    const auto header = ParseBulkHeader(Receive(kBulkHeaderBytes));
    if (!header.ok()) return {};
    return {*header, Receive(static_cast<size_t>(header->body_bytes + header->data_bytes))};
  }
  // The error that comes next; OK: something else does.
  absl::Status ReceiveError(uint32_t* request_id = nullptr) {
    const auto [header, body] = ReceiveFrame();
    if (header.type != BulkFrameType::kError) return absl::OkStatus();
    absl::Status error;
    EXPECT_TRUE(ParseBulkError(body, &error).ok());
    if (request_id != nullptr) *request_id = header.request_id;
    return error;
  }
  bool IsClosed() { return Receive(1).empty(); }

 private:
  const UniqueFd fd_;
};

// A server that says what it is told to, to each connection.
class RawServer {
 public:
  explicit RawServer(std::string answer, bool waits = false)
      : answer_(std::move(answer)), waits_(waits), listener_(ListenOnLoopback(&port_)) {
    thread_ = std::thread([this] { Serve(); });
  }
  ~RawServer() {
    is_stopped_ = true;
    thread_.join();
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  void Serve() {
    std::vector<UniqueFd> open;
    while (!is_stopped_) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (poll(&waiting, 1, 5) <= 0) continue;
      UniqueFd client(accept(listener_.get(), nullptr, nullptr));
      char ignored[4096];
      recv(client.get(), ignored, sizeof(ignored), 0);
      SendAll(client.get(), answer_.data(), answer_.size());
      if (waits_) open.push_back(std::move(client));
    }
  }

  const std::string answer_;
  const bool waits_;
  int32_t port_ = 0;
  const UniqueFd listener_;
  std::atomic<bool> is_stopped_{false};
  std::thread thread_;
};

class BulkDoorTest : public BulkPlaneTest {
 protected:
  BulkHello Hello() const {
    BulkHello hello;
    hello.spec = DigestCacheSpec(source_.spec);
    return hello;
  }
  std::string Welcome() const {
    return EncodeBulkWelcome({SupportedWireVersions().max, plane_bytes_, original_bytes_});
  }
  BulkBlock Block(int32_t chain, int32_t index) const {
    BulkBlock block;
    block.key = ChainKey(chain, index);
    block.parent = ChainParent(chain, index);
    block.parts = kBulkAllParts;
    block.total_bytes = plane_bytes_ + original_bytes_;
    return block;
  }
  // What a pull says of a peer that answers so.
  absl::Status PullFrom(const std::string& answer, bool waits = false) {
    const RawServer peer(answer, waits);
    BulkConfig config = Config();
    config.timeout_ms = 100;
    config.connections = 1;
    client_.reset();
    StartTarget(config, peer.address());
    const absl::Status status = Pull(1, 1).status();
    WaitUntilIdle();
    EXPECT_EQ(SlotsUsed(), 0);
    client_.reset();
    return status;
  }
  // Two tenants, each with a token.
  std::unique_ptr<AccessControl> MakeAccess() {
    const std::string path = absl::StrCat(testing::TempDir(), "bulk_access_", getpid(), ".yaml");
    std::ofstream(path) << "identities:\n"
                        << Identity("a", "read", "a") << Identity("b", "read", "b")
                        << Identity("writer", "write", "a");
    chmod(path.c_str(), 0600);
    AccessConfig config;
    config.tcp_security = TcpSecurity::kInsecure;
    config.access_file = path;
    auto access = AccessControl::Create(config, RealClock());
    EXPECT_TRUE(access.ok()) << access.status();
    std::filesystem::remove(path);
    return *std::move(access);
  }
  static std::string Token(const std::string& name) { return name + std::string(40, '0'); }
  static std::string Identity(const std::string& name, const std::string& scopes,
                              const std::string& tenant) {
    Sha256 hash;
    hash.AddBytes(Token(name));
    const auto digest = hash.Finish();
    return absl::StrCat(
        "  - name: ", name, "\n    token_sha256: ",
        ToHex(absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size())),
        "\n    scopes: ", scopes, "\n    tenants: ", tenant, "\n");
  }
};

TEST_F(BulkDoorTest, ServerRefusesWhatIsNoHello) {
  source_.PutUnleased(writer_, 1, 0, 1);
  Start();
  BulkHello newer = Hello();
  newer.versions = {2, 3};
  BulkHello unknown = Hello();
  unknown.spec = DigestCacheSpec(TinySpec("unknown"));
  std::string damaged = EncodeBulkHello(Hello());
  damaged[50] = static_cast<char>(damaged[50] ^ 1);
  std::string absurd = EncodeBulkHello(Hello());
  absurd[15] = 0x7f;  // of body_bytes
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"GET / HTTP/1.1\r\nHost: store\r\nAccept: */*\r\n\r\n", "BULK_FRAME_INVALID"},
      {EncodeBulkGet(1, {ChainKey(1, 0), kBulkAllParts, 0}), "BULK_FRAME_INVALID"},
      {Welcome(), "BULK_FRAME_INVALID"},
      {damaged, "BULK_FRAME_INVALID"},
      {absurd, "BULK_FRAME_INVALID"},
      {EncodeBulkHello(newer), "BULK_VERSION"},
      {EncodeBulkHello(unknown), "CACHE_NOT_FOUND"},
  };
  for (const auto& [bytes, reason] : cases) {
    RawClient client(server_->port());
    client.Send(bytes);
    uint32_t request_id = 1;
    EXPECT_EQ(ReasonOf(client.ReceiveError(&request_id)), reason);
    EXPECT_EQ(request_id, 0u) << "it is about the connection";
    EXPECT_TRUE(client.IsClosed());
  }
  EXPECT_EQ(server_->counters().peers_refused, static_cast<int64_t>(cases.size()));
  ASSERT_TRUE(Pull(1, 1).ok());
  ExpectSame(1, 1);
}

TEST_F(BulkDoorTest, ServerAnswersBadRequestsAndGoesOnWhereItCan) {
  source_.PutUnleased(writer_, 1, 0, 1);
  Start();
  RawClient client(server_->port());
  client.Send(EncodeBulkHello(Hello()));
  ASSERT_EQ(client.ReceiveFrame().first.type, BulkFrameType::kWelcome);
  client.Send(EncodeBulkGet(7, {ChainKey(9, 9), kBulkAllParts, 0}));
  uint32_t request_id = 0;
  EXPECT_EQ(ReasonOf(client.ReceiveError(&request_id)), "BLOCK_NOT_FOUND");
  EXPECT_EQ(request_id, 7u);
  client.Send(EncodeBulkGet(8, {ChainKey(1, 0), kBulkPlanes, plane_bytes_ - 10}));
  const auto [header, bytes] = client.ReceiveFrame();
  EXPECT_EQ(header.type, BulkFrameType::kBlock);
  EXPECT_EQ(header.request_id, 8u);
  EXPECT_EQ(header.data_bytes, 10);
  client.Send(EncodeBulkGet(9, {ChainKey(1, 0), kBulkPlanes, plane_bytes_ + 1}));
  EXPECT_EQ(ReasonOf(client.ReceiveError()), "BULK_FRAME_INVALID");
  EXPECT_TRUE(client.IsClosed());
}

TEST_F(BulkDoorTest, ServerForgetsPeersThatGo) {
  source_.PutUnleased(writer_, 1, 0, 4);
  Start();
  const int32_t sessions = source_.engine.GetStats().session_count;
  {
    RawClient half(server_->port());  // of a header
    half.Send(EncodeBulkHello(Hello()).substr(0, 20));
    RawClient mute(server_->port());
    RawClient deaf(server_->port());  // asks for much and reads nothing
    deaf.Send(EncodeBulkHello(Hello()));
    for (uint32_t i = 1; i <= 500; ++i) {
      deaf.Send(EncodeBulkGet(i, {ChainKey(1, 0), kBulkAllParts, 0}));
    }
    for (int i = 0; i < 2000 && source_.engine.GetStats().session_count == sessions; ++i) {
      poll(nullptr, 0, 5);
    }
    EXPECT_EQ(source_.engine.GetStats().session_count, sessions + 1);
    half.EndSending();
  }
  for (int i = 0; i < 2000 && server_->counters().connections > 0; ++i) poll(nullptr, 0, 5);
  EXPECT_EQ(server_->counters().connections, 0);
  EXPECT_EQ(source_.engine.GetStats().session_count, sessions);
  EXPECT_EQ(source_.engine.GetStats().lease_count, 0);
}

TEST_F(BulkDoorTest, ServerCutsOffAPeerThatDoesNotRead) {
  source_.PutUnleased(writer_, 1, 0, 4);
  BulkConfig config = Config();
  config.timeout_ms = 200;
  Start(config);
  RawClient deaf(server_->port());
  deaf.Send(EncodeBulkHello(Hello()));
  for (uint32_t i = 1; i <= 1000; ++i) {
    deaf.Send(EncodeBulkGet(i, {ChainKey(1, 0), kBulkAllParts, 0}));
  }
  while (server_->counters().connections == 0) poll(nullptr, 0, 5);
  for (int i = 0; i < 4000 && server_->counters().connections > 0; ++i) poll(nullptr, 0, 5);
  EXPECT_EQ(server_->counters().connections, 0);
  EXPECT_EQ(source_.engine.GetStats().lease_count, 0) << "its block is free again";
}

TEST_F(BulkDoorTest, ConnectionsAreLimited) {
  source_.PutUnleased(writer_, 1, 0, 1);
  BulkConfig config = Config();
  config.connection_limit = 2;
  Start(config);
  RawClient first(server_->port());
  RawClient second(server_->port());
  while (server_->counters().connections < 2) poll(nullptr, 0, 5);
  RawClient third(server_->port());
  EXPECT_TRUE(third.IsClosed());
  EXPECT_EQ(server_->counters().peers_refused, 1);
}

TEST_F(BulkDoorTest, TenantsReadTheirOwnBlocksOnly) {
  const auto access = MakeAccess();
  ASSERT_TRUE(source_.engine.RegisterCache(source_.spec, "a").ok());
  ASSERT_TRUE(source_.engine.RegisterCache(source_.spec, "b").ok());
  source_.PutUnleased(writer_, 1, 0, 1);  // of nobody
  Start(Config(), access.get());
  struct Case {
    std::string token;
    std::string tenant;
    std::string reason;
  };
  const std::vector<Case> cases = {
      {"", "a", "TOKEN_REQUIRED"},
      {Token("nobody"), "a", "TOKEN_UNKNOWN"},
      {Token("a"), "b", "TENANT_FORBIDDEN"},
      {Token("b"), "a", "TENANT_FORBIDDEN"},
      {Token("writer"), "a", "SCOPE_MISSING"},
      {Token("a"), "a", ""},
      {Token("a"), "", ""},  // its only one
  };
  for (const Case& one : cases) {
    RawClient client(server_->port());
    BulkHello hello = Hello();
    hello.tenant = one.tenant;
    hello.token = one.token;
    client.Send(EncodeBulkHello(hello));
    EXPECT_EQ(ReasonOf(client.ReceiveError()), one.reason) << one.token << " " << one.tenant;
    if (!one.reason.empty()) continue;
    client.Send(EncodeBulkGet(1, {ChainKey(1, 0), kBulkAllParts, 0}));
    EXPECT_EQ(ReasonOf(client.ReceiveError()), "BLOCK_NOT_FOUND") << "another's is as none";
  }
}

TEST_F(BulkDoorTest, ClientRefusesAnswersThatAreNone) {
  BulkBlock other = Block(1, 1);
  BulkBlock part = Block(1, 0);
  part.parts = kBulkPlanes;
  part.total_bytes = plane_bytes_;
  BulkBlock absurd = Block(1, 0);
  absurd.total_bytes = int64_t{1} << 35;
  BulkBlock late = Block(1, 0);
  late.offset = 64;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "CKBF"},
      {Welcome() + EncodeBulkBlock(1, other), "another block"},
      {Welcome() + EncodeBulkBlock(1, part), "asked for 3"},
      {Welcome() + EncodeBulkBlock(1, absurd), "34359738368 bytes"},
      {Welcome() + EncodeBulkBlock(1, late), "begins at 64"},
      {Welcome() + EncodeBulkBlock(2, Block(1, 0)), "out of order"},
      {Welcome() + Welcome(), "out of order"},
      {EncodeBulkBlock(1, Block(1, 0)), "no WELCOME"},
      {EncodeBulkWelcome({7, plane_bytes_, original_bytes_}), "version 7"},
  };
  for (const auto& [answer, text] : cases) {
    const absl::Status status = PullFrom(answer);
    EXPECT_EQ(ReasonOf(status), "BULK_FRAME_INVALID") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

TEST_F(BulkDoorTest, ClientRefusesAPeerOfOtherSizes) {
  EXPECT_EQ(ReasonOf(PullFrom(EncodeBulkWelcome({1, plane_bytes_, original_bytes_ + 1}))),
            "BULK_PEER_MISMATCH");
}

TEST_F(BulkDoorTest, ClientHandsThePeersErrorOn) {
  const absl::Status error =
      MakeError(absl::StatusCode::kPermissionDenied, "TENANT_FORBIDDEN", "not yours");
  const absl::Status got = PullFrom(EncodeBulkError(0, error));
  EXPECT_EQ(ReasonOf(got), "TENANT_FORBIDDEN");
  EXPECT_EQ(got.code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(BulkDoorTest, ClientGivesUpOnAPeerThatSaysNothingOrHalf) {
  EXPECT_EQ(ReasonOf(PullFrom("", true)), "BULK_DISCONNECTED");
  EXPECT_EQ(ReasonOf(PullFrom(Welcome().substr(0, 40))), "BULK_DISCONNECTED");
  // It is asked to go on from the four bytes that came, and begins anew.
  const absl::Status half = PullFrom(Welcome() + EncodeBulkBlock(1, Block(1, 0)) + "half");
  EXPECT_EQ(ReasonOf(half), "BULK_FRAME_INVALID");
  EXPECT_THAT(std::string(half.message()), HasSubstr("begins at 0, asked for 4"));
}

TEST_F(BulkDoorTest, ClientRefusesABlockOfZeros) {
  const std::string zeros(static_cast<size_t>(block_bytes()), '\0');
  EXPECT_EQ(ReasonOf(PullFrom(Welcome() + EncodeBulkBlock(1, Block(1, 0)) + zeros)),
            "BULK_BLOCK_DAMAGED");
}

TEST(BulkConfigTest, PeersAndPortAreProtectedAsTheServerIs) {
  BulkConfig good;
  good.access.tcp_security = TcpSecurity::kMutualTls;
  good.access.tls_certificate = "server.crt";
  good.access.tls_key = "server.key";
  good.access.tls_client_ca = "ca.crt";
  good.access.access_file = "access.yaml";
  good.address = "0.0.0.0:7071";
  good.peers = "cache-1.example.org:7071, cache-2.example.org:7071";
  good.peer_ca = "ca.crt";
  good.certificate = "store.crt";
  good.key = "store.key";
  EXPECT_TRUE(CheckBulkConfig(good).ok()) << CheckBulkConfig(good);
  EXPECT_EQ(good.peer_list().size(), 2u);
  EXPECT_TRUE(CheckBulkConfig(BulkConfig()).ok()) << "off needs nothing";
  const std::vector<std::pair<std::string, std::function<void(BulkConfig*)>>> cases = {
      {"access_file", [](BulkConfig* bad) { bad->access.access_file = ""; }},
      {"tls_client_ca", [](BulkConfig* bad) { bad->access.tls_client_ca = ""; }},
      {"loopback", [](BulkConfig* bad) { bad->access.tcp_security = TcpSecurity::kInsecure; }},
      {"cache-1.example.org:7071",
       [](BulkConfig* bad) {
         bad->access.tcp_security = TcpSecurity::kInsecure;
         bad->address = "127.0.0.1:7071";
       }},
      {"bulk_peer_ca", [](BulkConfig* bad) { bad->peer_ca = ""; }},
      {"bulk_certificate", [](BulkConfig* bad) { bad->key = ""; }},
      {"bulk_token_file", [](BulkConfig* bad) { bad->access.tcp_security = TcpSecurity::kTls; }},
      {"host:port", [](BulkConfig* bad) { bad->peers = "cache-1.example.org"; }},
      {"host:port", [](BulkConfig* bad) { bad->address = "7071"; }},
  };
  for (const auto& [text, spoil] : cases) {
    BulkConfig bad = good;
    spoil(&bad);
    const absl::Status status = CheckBulkConfig(bad);
    EXPECT_EQ(ReasonOf(status), "CONFIG_INVALID") << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

}  // namespace
}  // namespace certkv::kvstore
