// Identities, access files, and what a call is let in with; without the wire.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/access_config.h"
#include "services/common/access_control.h"
#include "services/common/access_file.h"
#include "services/common/certificate.h"
#include "services/common/private_file.h"
#include "services/common/unix_peer.h"
#include "tests/support/fake_clock.h"

namespace certkv {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// sha256sum of 64 times 'a'.
constexpr char kToken[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
constexpr char kTokenSha256[] = "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb";

std::string AccessText(const std::string& scopes = "read, write",
                       const std::string& tenants = "a, b") {
  return absl::StrCat("identities:\n  - name: engine\n    token_sha256: ", kTokenSha256,
                      "\n    scopes: ", scopes, "\n    tenants: ", tenants,
                      "\n  - name: operator\n    certificate: ops.example.org\n    scopes: admin\n"
                      "    tenants: \"*\"\n");
}

class AccessFileTest : public ::testing::Test {
 protected:
  AccessFileTest() : path_(absl::StrCat(::testing::TempDir(), "/access_", getpid())) {}
  ~AccessFileTest() override { unlink(path_.c_str()); }
  void Write(const std::string& text, mode_t mode = 0600) {
    std::ofstream(path_) << text;
    chmod(path_.c_str(), mode);
  }
  const std::string path_;
};

TEST(IdentityTest, ScopesAreReadAndUnknownOnesRefused) {
  EXPECT_EQ(*ParseScopes("read, risk"),
            static_cast<uint8_t>(Scope::kRead) | static_cast<uint8_t>(Scope::kRisk));
  EXPECT_EQ(ReasonOf(ParseScopes("read, root").status()), "ACCESS_FILE_INVALID");
  EXPECT_EQ(ReasonOf(ParseScopes(" , ").status()), "ACCESS_FILE_INVALID");
}

TEST(IdentityTest, ActsForItsOnlyTenantUnasked) {
  const Identity one{"one", kAllScopes, false, {"a"}};
  EXPECT_EQ(*one.ResolveTenant(""), "a");
  EXPECT_EQ(*one.ResolveTenant("a"), "a");
  EXPECT_EQ(ReasonOf(one.ResolveTenant("b").status()), "TENANT_FORBIDDEN");
  const Identity two{"two", kAllScopes, false, {"a", "b"}};
  EXPECT_EQ(ReasonOf(two.ResolveTenant("").status()), "TENANT_FORBIDDEN");
  EXPECT_EQ(*OwnerIdentity().ResolveTenant(""), "");
  EXPECT_EQ(ReasonOf(OwnerIdentity().ResolveTenant("a b").status()), "TENANT_INVALID");
  EXPECT_EQ(ReasonOf(two.CheckAllTenants("it")), "TENANT_FORBIDDEN");
}

TEST_F(AccessFileTest, FindsTokensByTheirHashAndCertificatesByTheirNames) {
  Write(AccessText());
  const auto table = AccessTable::ReadFile(path_);
  ASSERT_TRUE(table.ok()) << table.status();
  const IdentityPtr engine = (*table)->FindToken(kToken);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->name, "engine");
  EXPECT_THAT(engine->tenants, ElementsAre("a", "b"));
  EXPECT_EQ(ReasonOf(engine->CheckScope(Scope::kAdmin)), "SCOPE_MISSING");
  EXPECT_EQ((*table)->FindToken(std::string(64, 'b')), nullptr);
  EXPECT_EQ((*table)->FindToken(""), nullptr);
  const IdentityPtr ops = (*table)->FindCertificate({"x", "ops.example.org"});
  ASSERT_NE(ops, nullptr);
  EXPECT_TRUE(ops->any_tenant);
  EXPECT_EQ((*table)->FindCertificate({"ops.example.or"}), nullptr);
  EXPECT_EQ((*table)->FindCertificate({""}), nullptr) << "who has no certificate has no name";
}

TEST_F(AccessFileTest, AFileThatOthersMayReadOrChangeIsNotUsed) {
  for (const mode_t mode : {0604, 0602, 0620, 0666}) {
    Write(AccessText(), mode);
    EXPECT_EQ(ReasonOf(AccessTable::ReadFile(path_).status()), "SECRET_FILE_UNSAFE") << mode;
  }
  Write(AccessText(), 0640);
  EXPECT_TRUE(AccessTable::ReadFile(path_).ok()) << "a group may read it";
  EXPECT_EQ(ReasonOf(AccessTable::ReadFile("/nowhere").status()), "SECRET_FILE_UNREADABLE");
}

TEST_F(AccessFileTest, DefectsAreNamed) {
  const std::pair<std::string, std::string> bad[] = {
      {AccessText("everything"), "scope everything is unknown"},
      {AccessText("read", "\"\""), "it has no tenants"},
      {AccessText("read", "a b"), "tenant a b is no name"},
      {"identities:\n  - {name: x, scopes: read, tenants: a}\n", "neither token_sha256 nor"},
      {"identities:\n  - {name: x, token_sha256: 12, scopes: read, tenants: a}\n",
       "must be 64 hexadecimal digits"},
      {"identities:\n  - {certificate: x, scopes: read, tenants: a}\n", "it has no name"},
      {AccessText() + AccessText().substr(12), "another identity has its name"},
  };
  for (const auto& [text, message] : bad) {
    const absl::Status status = AccessTable::Parse("access.yaml", text).status();
    EXPECT_EQ(ReasonOf(status), "ACCESS_FILE_INVALID") << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  EXPECT_EQ(ReasonOf(AccessTable::Parse("access.yaml", "identity: 1\n").status()),
            "CONFIG_INVALID");
  EXPECT_EQ((*AccessTable::Parse("access.yaml", ""))->size(), 0) << "nobody may call";
}

TEST_F(AccessFileTest, ATokenFileHasOneTokenAndNoErrorShowsIt) {
  Write(absl::StrCat(kToken, "\n"));
  EXPECT_EQ(*ReadTokenFile(path_), kToken);
  for (const std::string& text : {std::string("short\n"), absl::StrCat(kToken, " ", kToken),
                                  std::string(400, 'a'), std::string(kToken) + "\nsecond"}) {
    Write(text);
    const absl::Status status = ReadTokenFile(path_).status();
    EXPECT_EQ(ReasonOf(status), "TOKEN_FILE_INVALID");
    EXPECT_THAT(std::string(status.message()), ::testing::Not(HasSubstr("aaaa")));
  }
}

TEST_F(AccessFileTest, CallsAreLetInAsTheyCome) {
  FakeClock clock;
  Write(AccessText());
  AccessConfig config;
  config.access_file = path_;
  auto access = *AccessControl::Create(config, &clock);
  CallOrigin local{.is_unix = true};
  EXPECT_EQ((*access->Identify(local))->name, "owner");
  CallOrigin remote{};
  EXPECT_EQ(ReasonOf(access->Identify(remote).status()), "TOKEN_REQUIRED");
  remote.token = kToken;
  EXPECT_EQ((*access->Identify(remote))->name, "engine");
  local.token = kToken;
  EXPECT_EQ((*access->Identify(local))->name, "engine") << "a token limits its caller everywhere";
  local.token = "?";
  EXPECT_EQ(ReasonOf(access->Identify(local).status()), "TOKEN_UNKNOWN");
  CallOrigin certified{};
  certified.certificate_names = {"ops.example.org"};
  EXPECT_EQ((*access->Identify(certified))->name, "operator");
  certified.certificate_names = {"somebody"};
  EXPECT_EQ(ReasonOf(access->Identify(certified).status()), "TLS_CERTIFICATE_UNKNOWN");

  config.unix_requires_token = true;
  access = *AccessControl::Create(config, &clock);
  EXPECT_EQ(ReasonOf(access->Identify({.is_unix = true}).status()), "TOKEN_REQUIRED");

  AccessConfig open;
  open.tcp_address = "127.0.0.1:0";
  open.tcp_security = TcpSecurity::kInsecure;
  access = *AccessControl::Create(open, &clock);
  EXPECT_EQ((*access->Identify(CallOrigin{}))->name, "owner");
  EXPECT_EQ(ReasonOf(access->Identify(remote).status()), "TOKEN_UNKNOWN");
  open.access_file = path_;
  access = *AccessControl::Create(open, &clock);
  EXPECT_EQ(ReasonOf(access->Identify(CallOrigin{}).status()), "TOKEN_REQUIRED");
  EXPECT_EQ((*access->Identify(remote))->name, "engine");
}

TEST(AccessConfigTest, APortNeedsItsProtection) {
  AccessConfig config;
  EXPECT_TRUE(CheckAccessConfig(config).ok());
  config.tcp_address = "0.0.0.0:7070";
  const absl::Status bare = CheckAccessConfig(config);
  EXPECT_EQ(ReasonOf(bare), "CONFIG_INVALID");
  EXPECT_THAT(std::string(bare.message()),
              HasSubstr("tls_certificate, tls_key, tls_client_ca, access_file"));
  config.tls_certificate = config.tls_key = config.access_file = "x";
  EXPECT_THAT(std::string(CheckAccessConfig(config).message()), HasSubstr("needs tls_client_ca"));
  config.tcp_security = TcpSecurity::kTls;
  EXPECT_TRUE(CheckAccessConfig(config).ok());
  config.tcp_security = TcpSecurity::kInsecure;
  for (const char* address :
       {"0.0.0.0:1", "10.0.0.1:1", "example.org:1", "127.example.org:1", "[::]:1"}) {
    config.tcp_address = address;
    EXPECT_THAT(std::string(CheckAccessConfig(config).message()), HasSubstr("loopback")) << address;
  }
  for (const char* address : {"127.0.0.1:1", "127.1.2.3:1", "localhost:0", "[::1]:1"}) {
    config.tcp_address = address;
    EXPECT_TRUE(CheckAccessConfig(config).ok()) << address;
  }
  AccessConfig local;
  local.unix_requires_token = true;
  EXPECT_EQ(ReasonOf(CheckAccessConfig(local)), "CONFIG_INVALID");
  local = {};
  local.unix_users = "no-such-user-here";
  EXPECT_EQ(ReasonOf(CheckAccessConfig(local)), "CONFIG_INVALID");
}

TEST(CertificateTest, ValidityHasTwoEnds) {
  const CertificateInfo info{"CN = x", 1000, 2000, {}};
  EXPECT_TRUE(CheckValidity(info, 1000, "x").ok());
  EXPECT_TRUE(CheckValidity(info, 2000, "x").ok());
  EXPECT_EQ(ReasonOf(CheckValidity(info, 999, "x")), "TLS_CERTIFICATE_EXPIRED");
  EXPECT_EQ(ReasonOf(CheckValidity(info, 2001, "x")), "TLS_CERTIFICATE_EXPIRED");
  EXPECT_EQ(ReasonOf(ParseCertificate("no certificate").status()), "TLS_CERTIFICATE_INVALID");
  EXPECT_EQ(ReasonOf(CheckCertificateFiles({"a", "", ""}, 0)), "TLS_CERTIFICATE_INVALID");
}

TEST(UnixPeerTest, TheKernelSaysWhoConnected) {
  int sockets[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  const UniqueFd first(sockets[0]);
  const UniqueFd second(sockets[1]);
  const auto peer = PeerOf(first.get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->user, geteuid());
  EXPECT_TRUE(OwnUserOnly().Allows(*peer));
  EXPECT_FALSE((UnixPeerList{{geteuid() + 1}, {}}).Allows(*peer));
  EXPECT_TRUE((UnixPeerList{{}, {getegid()}}).Allows(*peer));
  EXPECT_FALSE((UnixPeerList{{}, {getegid() + 4711}}).Allows(*peer));
  EXPECT_EQ(ReasonOf(PeerOf(-1).status()), "PEER_UNKNOWN");
  EXPECT_THAT(ParseUnixPeers("0, 12", "")->users, ElementsAre(0, 12));
  EXPECT_TRUE(ParseUnixPeers("", "")->IsOwnUserOnly());
}

}  // namespace
}  // namespace certkv
