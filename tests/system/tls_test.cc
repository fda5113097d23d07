// Servers on TCP: mutual TLS, tokens over TLS, what is refused and how it is said.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/rpc.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "tests/support/file_content.h"
#include "tests/system/certificates.h"
#include "tests/system/cluster.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

// One server of the build, with a config file.
class ListeningServer {
 public:
  explicit ListeningServer(const std::string& program) : program_(program) {
    std::string pattern = absl::StrCat(::testing::TempDir(), "certkv_listen_XXXXXX");
    directory_ = mkdtemp(pattern.data());
  }
  ~ListeningServer() {
    process_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  // Waits until it listens, or has said why not.
  void Start(const std::string& yaml) {
    std::ofstream(Path("config.yaml")) << yaml;
    auto process = cli::ChildProcess::Start(
        {absl::StrCat(BinaryDirectory(), "/", program_), "--config", Path("config.yaml")},
        {absl::StrCat("CERTKV_RUNTIME_DIR=", directory_)}, Path("log"));
    ASSERT_TRUE(process.ok()) << process.status();
    process_ = *std::move(process);
    for (int i = 0; i < 6000 && process_->CheckRunning().ok(); ++i) {
      if (absl::StrContains(Log(), "event=listening")) return;
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  std::string Log() const { return ContentOf(Path("log")); }
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  pid_t pid() const { return process_->pid(); }
  bool IsRunning() const { return process_->CheckRunning().ok(); }
  // "localhost:4711", of what it logged.
  std::string TcpTarget() const {
    const std::string log = Log();
    const size_t begin = log.find("localhost:", log.find("event=listening"));
    if (begin == std::string::npos) return "";
    return log.substr(begin, log.find_first_of(" \"\n,", begin) - begin);
  }

 private:
  const std::string program_;
  std::string directory_;
  std::unique_ptr<cli::ChildProcess> process_;
};

class TlsTest : public ::testing::Test {
 protected:
  void MakeCertificates() {
    ASSERT_TRUE(certificates_.Make("ca"));
    ASSERT_TRUE(certificates_.Make("server localhost 127.0.0.1"));
    ASSERT_TRUE(certificates_.Make("client engine read,write,risk a"));
    ASSERT_TRUE(certificates_.Make("token operator read,risk '*'"));
  }
  std::string Yaml(const std::string& security) const {
    return absl::StrCat("server:\n  tcp_address: localhost:0\n  tcp_security: ", security,
                        "\n  tls_certificate: ", certificates_.Path("server.crt"),
                        "\n  tls_key: ", certificates_.Path("server.key"),
                        "\n  tls_client_ca: ", certificates_.Path("ca.crt"),
                        "\n  access_file: ", certificates_.Path("access.yaml"), "\n");
  }
  void StartServer(const std::string& security, const std::string& program = "certkvd") {
    server_ = std::make_unique<ListeningServer>(program);
    server_->Start(Yaml(security));
    ASSERT_TRUE(server_->IsRunning()) << server_->Log();
    ASSERT_NE(server_->TcpTarget(), "") << server_->Log();
  }
  client::Options Options(const std::string& client, const std::string& token = "",
                          const Certificates* other = nullptr) const {
    const Certificates& from = other == nullptr ? certificates_ : *other;
    client::Options options;
    options.kvstore_target = server_->TcpTarget();
    options.rpc_timeout_ms = 20000;
    options.ca_file = certificates_.Path("ca.crt");
    if (!client.empty()) {
      options.certificate_file = from.Path(client + ".crt");
      options.key_file = from.Path(client + ".key");
    }
    if (!token.empty()) options.token_file = certificates_.Path(token + ".token");
    return client::ResolveTargets(options);
  }
  // One call, not retried.
  static absl::Status Call(const client::Options& options) {
    const auto stub =
        kvstore::v1::KvStore::NewStub(client::MakeChannel(options.kvstore_target, options));
    kvstore::v1::Stats stats;
    return client::CallUnary(20000, client::Retry::kNever, [&](grpc::ClientContext& context) {
      return stub->GetStats(&context, {}, &stats);
    });
  }

  Certificates certificates_;
  std::unique_ptr<ListeningServer> server_;
};

// Puts a sequence, reads it, holds the read against the truth and closes the request.
client::ReadResult PutAndRead(const client::Options& options) {
  const TestSequence data(SmallSpec(), 200, 3);
  auto worker = client::Worker::Attach(options, data.spec);
  EXPECT_TRUE(worker.ok()) << worker.status();
  if (!worker.ok()) return {};
  auto sequence =
      (*worker)->PutSequence(data.token_ids, data.layers(), client::DefaultKeyContext(data.spec));
  EXPECT_TRUE(sequence.ok()) << sequence.status();
  auto request = client::Request::Open(options, "r", {});
  EXPECT_TRUE(request.ok()) << request.status();
  if (!sequence.ok() || !request.ok()) return {};
  auto attention = client::Attention::Open(**worker, **sequence, **request);
  EXPECT_TRUE(attention.ok()) << attention.status();
  if (!attention.ok()) return {};
  const std::vector<float> queries = TestQueries(data.spec, 1);
  client::ReadRequest read;
  read.query_position = 199;
  read.queries = queries.data();
  auto results = (*attention)->Attend({read});
  EXPECT_TRUE(results.ok()) << results.status();
  if (!results.ok()) return {};
  EXPECT_EQ(CheckReadAgainstTruth(data, read, (*results)[0], Tolerances()), "");
  EXPECT_TRUE((*request)->Close().ok());
  return std::move((*results)[0]);
}

TEST_F(TlsTest, AnEngineWithACertificatePutsAndReadsOverTcp) {
  MakeCertificates();
  StartServer("mutual_tls");
  EXPECT_FALSE(PutAndRead(Options("engine")).in_process);
}

// A view's calls go to the address that opened it, whose certificate has the name, not the address.
TEST_F(TlsTest, CertifiersOfANameAreBelievedByThatName) {
  ASSERT_TRUE(certificates_.Make("ca"));
  ASSERT_TRUE(certificates_.Make("server localhost"));
  ASSERT_TRUE(certificates_.Make("client engine read,write,risk a"));
  StartServer("mutual_tls");
  client::Options options = Options("engine");
  options.certifier_target = absl::StrCat("dns:///", server_->TcpTarget());
  EXPECT_FALSE(PutAndRead(options).in_process);
}

TEST_F(TlsTest, EveryServerTakesCertificates) {
  MakeCertificates();
  for (const char* program : {"certkv-kvstore", "certkv-certifier", "certkv-gate"}) {
    StartServer("mutual_tls", program);
    const absl::Status status = Call(Options("engine"));
    // Only one of them has the method; the others say that, which a stranger would not hear.
    const bool is_store = std::strcmp(program, "certkv-kvstore") == 0;
    EXPECT_EQ(status.code(), is_store ? absl::StatusCode::kOk : absl::StatusCode::kUnimplemented)
        << program << status;
    EXPECT_EQ(ReasonOf(Call(Options(""))), "CONNECTION_CLOSED") << program;
  }
}

TEST_F(TlsTest, AClientWithoutACertificateIsClosed) {
  MakeCertificates();
  StartServer("mutual_tls");
  const absl::Status status = Call(Options(""));
  EXPECT_EQ(ReasonOf(status), "CONNECTION_CLOSED") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("certificate"));
  client::Options plain = Options("");
  plain.ca_file.clear();
  EXPECT_EQ(Call(plain).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Call(Options("engine")).ok()) << "and the server goes on";
}

TEST_F(TlsTest, AnExpiredCertificateIsRefusedAtBothEnds) {
  MakeCertificates();
  ASSERT_TRUE(certificates_.Make("client late read,write a", -1));
  StartServer("mutual_tls");
  const absl::Status own = client::Worker::Attach(Options("late"), SmallSpec()).status();
  EXPECT_EQ(ReasonOf(own), "TLS_CERTIFICATE_EXPIRED") << own;
  EXPECT_THAT(std::string(own.message()), HasSubstr("late.crt"));
  // A client that does not look at its own certificate.
  EXPECT_EQ(ReasonOf(Call(Options("late"))), "CONNECTION_CLOSED");
}

TEST_F(TlsTest, AServerDoesNotStartWithAnExpiredCertificate) {
  MakeCertificates();
  ASSERT_TRUE(certificates_.Make("server localhost", -1));
  server_ = std::make_unique<ListeningServer>("certkvd");
  server_->Start(Yaml("mutual_tls"));
  EXPECT_FALSE(server_->IsRunning());
  EXPECT_THAT(server_->Log(), HasSubstr("TLS_CERTIFICATE_EXPIRED"));
}

TEST_F(TlsTest, AServerDoesNotStartWithAKeyOfAnotherCertificateOrOneThatOthersMayRead) {
  MakeCertificates();
  server_ = std::make_unique<ListeningServer>("certkvd");
  chmod(certificates_.Path("server.key").c_str(), 0644);
  server_->Start(Yaml("mutual_tls"));
  EXPECT_FALSE(server_->IsRunning());
  EXPECT_THAT(server_->Log(), HasSubstr("SECRET_FILE_UNSAFE"));
  std::filesystem::copy_file(certificates_.Path("engine.key"), certificates_.Path("server.key"),
                             std::filesystem::copy_options::overwrite_existing);
  chmod(certificates_.Path("server.key").c_str(), 0600);
  server_->Start(Yaml("mutual_tls"));
  EXPECT_FALSE(server_->IsRunning());
  EXPECT_THAT(server_->Log(), HasSubstr("TLS_CERTIFICATE_INVALID"));
}

TEST_F(TlsTest, AnotherAuthoritysCertificateIsRefusedAtBothEnds) {
  MakeCertificates();
  const Certificates other;
  ASSERT_TRUE(other.Make("ca"));
  ASSERT_TRUE(other.Make("client engine read,write a"));
  StartServer("mutual_tls");
  EXPECT_EQ(ReasonOf(Call(Options("engine", "", &other))), "CONNECTION_CLOSED");
  client::Options distrustful = Options("engine");
  distrustful.ca_file = other.Path("ca.crt");
  const absl::Status status = Call(distrustful);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(ReasonOf(status), "TLS_HANDSHAKE_FAILED") << status;
}

TEST_F(TlsTest, ACertificateThatNoIdentityHasIsNamed) {
  MakeCertificates();
  ASSERT_TRUE(certificates_.Make("client stranger read a"));
  std::ofstream(certificates_.Path("access.yaml"))
      << "identities:\n  - {name: e, certificate: engine, scopes: read, tenants: a}\n";
  StartServer("mutual_tls");
  const absl::Status status = Call(Options("stranger"));
  EXPECT_EQ(ReasonOf(status), "TLS_CERTIFICATE_UNKNOWN") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("stranger"));
  EXPECT_TRUE(Call(Options("engine")).ok());
}

TEST_F(TlsTest, ATokenIsTakenOverTlsAndNeverSentWithout) {
  MakeCertificates();
  StartServer("tls");
  EXPECT_TRUE(Call(Options("", "operator")).ok());
  EXPECT_EQ(ReasonOf(Call(Options(""))), "TOKEN_REQUIRED");
  client::Options clear = Options("", "operator");
  clear.ca_file.clear();
  clear.kvstore_target = "cache.example.org:7070";
  EXPECT_EQ(ReasonOf(client::CheckAccess(clear)), "TOKEN_UNPROTECTED");
  EXPECT_FALSE(Call(clear).ok());
}

TEST_F(TlsTest, TheCommandLineTakesFilesByFlagsAndEnvironment) {
  MakeCertificates();
  StartServer("mutual_tls");
  const std::string program = absl::StrCat(BinaryDirectory(), "/certkv --target ",
                                           server_->TcpTarget(), " --timeout-ms 20000 ");
  const auto run = [](const std::string& command) {
    return WEXITSTATUS(std::system((command + " >/dev/null 2>&1").c_str()));
  };
  const std::string flags =
      absl::StrCat("--ca ", certificates_.Path("ca.crt"), " --cert ",
                   certificates_.Path("engine.crt"), " --key ", certificates_.Path("engine.key"));
  EXPECT_EQ(run(absl::StrCat(program, flags, " stats")), 0);
  EXPECT_EQ(run(absl::StrCat(program, flags, " risk")), 0);
  const std::string environment =
      absl::StrCat("CERTKV_CA_FILE=", certificates_.Path("ca.crt"),
                   " CERTKV_CERT_FILE=", certificates_.Path("engine.crt"),
                   " CERTKV_KEY_FILE=", certificates_.Path("engine.key"), " ");
  EXPECT_EQ(run(absl::StrCat(environment, program, "stats")), 0);
  EXPECT_EQ(run(absl::StrCat(environment, "CERTKV_TOKEN_FILE=",
                             certificates_.Path("operator.token"), " ", program, "risk")),
            0);
  EXPECT_NE(run(absl::StrCat(program, "stats")), 0);
  EXPECT_NE(run(absl::StrCat(program, flags, " --token-file /nowhere stats")), 0);
}

TEST_F(TlsTest, ARunningServerTakesNewCertificatesAndAuthorities) {
  MakeCertificates();
  StartServer("mutual_tls");
  ASSERT_TRUE(Call(Options("engine")).ok());
  const Certificates next;
  ASSERT_TRUE(next.Make("ca"));
  ASSERT_TRUE(next.Make("server localhost 127.0.0.1"));
  ASSERT_TRUE(next.Make("client engine read,write a"));
  for (const char* name : {"ca.crt", "server.key", "server.crt"}) {
    std::filesystem::rename(next.Path(name), certificates_.Path(name));
  }
  // The client trusts the new authority only, and shows a certificate of it.
  absl::Status status;
  for (int i = 0; i < 600; ++i) {
    status = Call(Options("engine", "", &next));
    if (status.ok()) break;
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ReasonOf(Call(Options("engine"))), "CONNECTION_CLOSED") << "the old one is refused";
}

// The inodes of the TCP and UDP sockets of this host's network namespace.
std::set<std::string> NetworkSockets() {
  std::set<std::string> inodes;
  for (const char* path :
       {"/proc/net/tcp", "/proc/net/tcp6", "/proc/net/udp", "/proc/net/udp6", "/proc/net/raw"}) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
      if (words.size() > 9) inodes.insert(words[9]);
    }
  }
  return inodes;
}

std::vector<std::string> SocketsOf(pid_t pid) {
  std::vector<std::string> inodes;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"))) {
    std::error_code error;
    const std::string link = std::filesystem::read_symlink(entry.path(), error).string();
    if (absl::StartsWith(link, "socket:[")) inodes.push_back(link.substr(8, link.size() - 9));
  }
  return inodes;
}

TEST(ListenTest, TheDefaultConfigOpensNothingToTheNetwork) {
  for (const char* program : {"certkvd", "certkv-kvstore", "certkv-certifier", "certkv-gate"}) {
    ListeningServer server(program);
    server.Start("");
    ASSERT_TRUE(server.IsRunning()) << server.Log();
    const std::set<std::string> network = NetworkSockets();
    const std::vector<std::string> sockets = SocketsOf(server.pid());
    EXPECT_FALSE(sockets.empty()) << "its Unix sockets are seen";
    for (const std::string& inode : sockets) EXPECT_FALSE(network.contains(inode)) << program;
  }
  // That the test would see one.
  ListeningServer open("certkv-gate");
  open.Start("server:\n  tcp_address: localhost:0\n  tcp_security: insecure\n");
  ASSERT_TRUE(open.IsRunning()) << open.Log();
  const std::set<std::string> network = NetworkSockets();
  int count = 0;
  for (const std::string& inode : SocketsOf(open.pid())) count += network.contains(inode) ? 1 : 0;
  EXPECT_GT(count, 0);
}

TEST(ListenTest, OnlyTheOwnUserMayOpenTheSockets) {
  ListeningServer server("certkv-kvstore");
  server.Start("");
  ASSERT_TRUE(server.IsRunning()) << server.Log();
  for (const char* name : {"kvstore.sock", "kvstore.sock.fd"}) {
    struct stat info {};
    ASSERT_EQ(stat(server.Path(name).c_str(), &info), 0) << name;
    EXPECT_EQ(info.st_mode & 0777, 0600u) << name;
  }
}

TEST(ListenTest, AUserThatIsNotListedIsClosedAndLogged) {
  ListeningServer server("certkv-kvstore");
  server.Start(absl::StrCat("server:\n  unix_users: \"", geteuid() + 4711, "\"\n"));
  ASSERT_TRUE(server.IsRunning()) << server.Log();
  client::Options options;
  options.kvstore_target = absl::StrCat("unix:", server.Path("kvstore.sock"));
  options.rpc_timeout_ms = 2000;
  const absl::Status status = client::StoreClient(options).GetStats().status();
  EXPECT_EQ(ReasonOf(status), "CONNECTION_CLOSED") << status;
  EXPECT_THAT(server.Log(), HasSubstr("event=unix_peer_refused"));
  // The descriptor socket says why.
  const auto socket = ConnectUnixSocket(server.Path("kvstore.sock.fd"));
  ASSERT_TRUE(socket.ok()) << socket.status();
  const auto answer = ReceiveWithFds(socket->get(), sizeof(FdReply), 20000);
  ASSERT_TRUE(answer.ok()) << answer.status();
  FdReply reply{};
  std::memcpy(&reply, answer->bytes.data(), sizeof(reply));
  EXPECT_STREQ(reply.reason, "PEER_FORBIDDEN");
  EXPECT_THAT(answer->fds, IsEmpty());
}

TEST(ListenTest, AGroupOfTheCallerIsEnough) {
  ListeningServer server("certkv-kvstore");
  server.Start(absl::StrCat("server:\n  unix_groups: \"", getegid(), "\"\n"));
  ASSERT_TRUE(server.IsRunning()) << server.Log();
  client::Options options;
  options.kvstore_target = absl::StrCat("unix:", server.Path("kvstore.sock"));
  EXPECT_TRUE(client::StoreClient(options).GetStats().ok());
}

}  // namespace
}  // namespace certkv
