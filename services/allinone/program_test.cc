// The programs as an operator meets them: flags, config files, signals, and their documents.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

struct Outcome {
  int exit_status = -1;
  std::string out;
  std::string err;
};

std::string ReadWhole(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// A folder of its own for sockets and files; removed at the end.
class ProgramTest : public ::testing::Test {
 protected:
  ProgramTest() {
    std::string pattern = "/tmp/certkv_program_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~ProgramTest() override {
    [[maybe_unused]] const int result = std::system(("rm -rf " + directory_).c_str());
  }

  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name)) << text;
    return Path(name);
  }

  // Starts a program of the build with its outputs in files; the caller waits for it.
  pid_t Start(const std::string& program, std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), absl::StrCat(CERTKV_BINARY_DIRECTORY, "/", program));
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    std::remove(Path("err").c_str());  // so that WaitForEvent sees only this program's
    const pid_t pid = fork();
    if (pid != 0) return pid;
    if (std::freopen(Path("out").c_str(), "w", stdout) == nullptr ||
        std::freopen(Path("err").c_str(), "w", stderr) == nullptr) {
      _exit(126);
    }
    setenv("CERTKV_RUNTIME_DIR", directory_.c_str(), 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  Outcome Wait(pid_t pid) const {
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    Outcome outcome;
    outcome.exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = ReadWhole(Path("out"));
    outcome.err = ReadWhole(Path("err"));
    return outcome;
  }
  Outcome Run(const std::string& program, const std::vector<std::string>& arguments) const {
    return Wait(Start(program, arguments));
  }
  // Waits until the program has logged an event; false after a minute.
  bool WaitForEvent(const std::string& event) const {
    for (const absl::Time end = absl::Now() + absl::Minutes(1); absl::Now() < end;) {
      if (absl::StrContains(ReadWhole(Path("err")), "event=" + event)) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  std::string directory_;
};

const char* const kPrograms[] = {"certkvd", "certkv-kvstore", "certkv-certifier", "certkv-gate"};

TEST_F(ProgramTest, HelpListsTheFlags) {
  for (const char* program : kPrograms) {
    const Outcome outcome = Run(program, {"--help"});
    EXPECT_EQ(outcome.exit_status, 0);
    EXPECT_THAT(outcome.out, StartsWith(absl::StrCat("usage: ", program, " ")));
    for (const char* flag : {"--config", "--socket", "--tcp", "--check-config", "--print-config",
                             "--version", "--help"}) {
      EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("  ", flag)));
    }
    EXPECT_THAT(outcome.err, IsEmpty());
  }
}

TEST_F(ProgramTest, VersionNamesProgramAndCommit) {
  const Outcome outcome = Run("certkv-gate", {"--version"});
  EXPECT_EQ(outcome.exit_status, 0);
  EXPECT_THAT(outcome.out, ::testing::MatchesRegex("certkv-gate [0-9.]+ \\(commit .*\\)\n"));
}

TEST_F(ProgramTest, WrongFlagsEndWithStatusTwo) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"--nonsense"}, "unknown flag --nonsense"},
      {{"gate.yaml"}, "unexpected gate.yaml"},
      {{"--config"}, "--config needs a value"},
      {{"--config="}, "--config has an empty value"},
      {{"--socket=a", "--socket", "b"}, "--socket is given twice"},
      {{"--help=yes"}, "--help takes no value"},
      {{"--tcp", "7070"}, "tcp_address is 7070, must be host:port"},
      {{"--tcp=host:70700"}, "tcp_address is host:70700, must be host:port"},
      {{"--tcp=0.0.0.0:7070"}, "with tcp_security mutual_tls, which needs tls_certificate"},
      {{"--config", "/nonexistent.yaml"}, "can't read config file /nonexistent.yaml"}};
  for (const auto& [arguments, message] : cases) {
    const Outcome outcome = Run("certkv-gate", arguments);
    EXPECT_EQ(outcome.exit_status, 2) << arguments[0];
    EXPECT_THAT(outcome.err, HasSubstr(message));
    EXPECT_THAT(outcome.out, IsEmpty());
  }
}

TEST_F(ProgramTest, CheckConfigNamesEveryDefectWithItsLine) {
  const std::string path = Write("gate.yaml",
                                 "gate:\n  tv_tolerance: 1.4\n  tv_tolerence: 0.1\n"
                                 "  lease_duration: 30\n");
  const Outcome outcome = Run("certkv-gate", {"--config", path, "--check-config"});
  EXPECT_EQ(outcome.exit_status, 2);
  EXPECT_THAT(outcome.err, HasSubstr(path + ":2: gate.tv_tolerance is 1.4, must be in [0, 1]; "));
  EXPECT_THAT(outcome.err, HasSubstr(path + ":3: unknown key gate.tv_tolerence; did you mean "));
  EXPECT_THAT(outcome.err, HasSubstr(path + ":4: gate.lease_duration is 30, must be a duration"));
}

TEST_F(ProgramTest, StagingMemoryOnAGpuNeedsOne) {
  for (const char* device : {"host", "auto"}) {
    const std::string path =
        Write("device.yaml",
              absl::StrCat("kvstore:\n  device: ", device, "\n  device_staging_memory: 1GiB\n"));
    const Outcome outcome = Run("certkv-kvstore", {"--config", path, "--check-config"});
    const bool is_refused = device == std::string("host");
    EXPECT_EQ(outcome.exit_status, is_refused ? 2 : 0) << outcome.err;
    EXPECT_EQ(absl::StrContains(outcome.err, "device_staging_memory is on the GPU"), is_refused);
  }
}

TEST_F(ProgramTest, ASectionOfAnotherProgramIsUnknown) {
  const std::string path = Write("gate.yaml", "kvstore: {}\n");
  EXPECT_EQ(Run("certkv-gate", {"--config", path, "--check-config"}).exit_status, 2);
  EXPECT_EQ(Run("certkvd", {"--config", path, "--check-config"}).exit_status, 0);
}

TEST_F(ProgramTest, TheSamplesAreGood) {
  for (const char* program : kPrograms) {
    const std::string name(absl::StripPrefix(program, "certkv-"));
    const std::string path = absl::StrCat("deploy/config/", name, ".yaml");
    const Outcome outcome = Run(program, {"--config", path, "--check-config"});
    EXPECT_EQ(outcome.exit_status, 0) << outcome.err;
    EXPECT_EQ(outcome.out, path + ": good\n");
  }
}

TEST_F(ProgramTest, PrintConfigGivesAFileThatSaysTheSame) {
  for (const char* program : kPrograms) {
    const std::string name(absl::StripPrefix(program, "certkv-"));
    const std::string sample = absl::StrCat("deploy/config/", name, ".yaml");
    const Outcome first = Run(program, {"--config", sample, "--print-config"});
    ASSERT_EQ(first.exit_status, 0) << first.err;
    const std::string printed = Write("printed.yaml", first.out);
    const Outcome second = Run(program, {"--config", printed, "--print-config"});
    EXPECT_EQ(second.exit_status, 0) << second.err;
    EXPECT_EQ(first.out, second.out);
  }
}

TEST_F(ProgramTest, FlagsWinOverTheFile) {
  const std::string path = Write("gate.yaml", "server: {unix_socket: /tmp/from-file.sock}\n");
  const Outcome outcome =
      Run("certkv-gate", {"--config", path, "--socket", "/tmp/from-flag.sock", "--print-config"});
  EXPECT_THAT(outcome.out, HasSubstr("unix_socket: \"/tmp/from-flag.sock\""));
}

TEST_F(ProgramTest, CertkvdPutsAllOnOneSocket) {
  const Outcome outcome = Run("certkvd", {"--print-config"});
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("unix_socket: \"", Path("certkvd.sock"), "\"")));
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("fd_socket: \"", Path("certkvd.sock.fd"), "\"")));
  EXPECT_THAT(outcome.out, HasSubstr(absl::StrCat("store_socket: \"", Path("certkvd.sock"), "\"")));
}

TEST_F(ProgramTest, SigtermDrainsAndEndsWithStatusZero) {
  for (const char* program : kPrograms) {
    const pid_t pid = Start(program, {});
    ASSERT_TRUE(WaitForEvent("listening")) << program;
    ASSERT_EQ(kill(pid, SIGTERM), 0);
    const Outcome outcome = Wait(pid);
    EXPECT_EQ(outcome.exit_status, 0) << program << "\n" << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr("event=drained"));
    EXPECT_NE(access(Path("certkvd.sock").c_str(), F_OK), 0) << "the socket is removed";
  }
}

TEST_F(ProgramTest, ASecondServerOnTheSocketEndsWithStatusOneAndHarmsNothing) {
  const pid_t first = Start("certkvd", {});
  ASSERT_TRUE(WaitForEvent("listening"));
  const Outcome second = Run("certkvd", {});
  EXPECT_EQ(second.exit_status, 1);
  EXPECT_THAT(second.err, HasSubstr("reason=SOCKET_IN_USE"));
  EXPECT_EQ(access(Path("certkvd.sock.fd").c_str(), F_OK), 0);
  kill(first, SIGTERM);
  EXPECT_EQ(Wait(first).exit_status, 0);
}

TEST_F(ProgramTest, StartsAgainAfterAKill) {
  const pid_t first = Start("certkvd", {});
  ASSERT_TRUE(WaitForEvent("listening"));
  kill(first, SIGKILL);
  Wait(first);
  const pid_t second = Start("certkvd", {});
  EXPECT_TRUE(WaitForEvent("listening"));
  kill(second, SIGTERM);
  EXPECT_EQ(Wait(second).exit_status, 0);
}

TEST_F(ProgramTest, DocsOfTheConfigAreUpToDate) {
  const Outcome outcome = Run("certkvd", {"--print-config-docs"});
  ASSERT_EQ(outcome.exit_status, 0);
  EXPECT_EQ(outcome.out, ReadWhole("docs/config.md"))
      << "repair with: certkvd --print-config-docs > docs/config.md";
}

TEST_F(ProgramTest, DocsOfTheMetricsAreUpToDate) {
  const Outcome outcome = Run("certkvd", {"--print-metrics-docs"});
  ASSERT_EQ(outcome.exit_status, 0);
  EXPECT_EQ(outcome.out, ReadWhole("docs/metrics.md"))
      << "repair with: certkvd --print-metrics-docs > docs/metrics.md";
}

}  // namespace
}  // namespace certkv
