// The command line as a user runs it: exit codes, JSON, errors, the demo.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "tests/support/loopback.h"
#include "tests/system/cluster.h"
#include "tests/system/run_cli.h"

namespace certkv {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTrace[] = "tests/data/smollm2-135m-4-layers.safetensors";

class CliTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto cluster = Cluster::Start(ClusterShape::kAllInOne, "");
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    target_ = absl::StrCat("--target ", cluster_->options().kvstore_target, " ");
  }
  std::unique_ptr<Cluster> cluster_;
  std::string target_;
};

TEST_F(CliTest, PutThenListThenStatsAgree) {
  const RunResult put = RunCli(absl::StrCat(target_, "--json put --trace ", kTrace));
  ASSERT_EQ(put.exit_code, 0) << put.errors;
  const json data = json::parse(put.output);
  EXPECT_EQ(data["blocks"], 27);
  EXPECT_EQ(data["blocks_shared"], 0);
  EXPECT_GE(data["capacity"], 2.4);
  const RunResult again = RunCli(absl::StrCat(target_, "--json put --trace ", kTrace));
  EXPECT_EQ(json::parse(again.output)["blocks_shared"], 27);
  const RunResult list = RunCli(target_ + "--json ls");
  ASSERT_EQ(list.exit_code, 0) << list.errors;
  EXPECT_EQ(json::parse(list.output)["blocks"].size(), 27u);
  const RunResult stats = RunCli(target_ + "--json stats");
  EXPECT_EQ(json::parse(stats.output)["caches"][0]["device_slots_used"], 27);
  EXPECT_THAT(RunCli(target_ + "ls").output, HasSubstr("device"));
  EXPECT_THAT(RunCli(target_ + "stats").output, HasSubstr("SmolLM2-135M-Instruct"));
}

// Pinned blocks of `certkv ls`.
int CountPinned(const std::string& target) {
  int pinned = 0;
  const json list = json::parse(RunCli(target + "--json ls").output);
  for (const json& block : list["blocks"]) {
    pinned += block["pinned"] ? 1 : 0;
  }
  return pinned;
}

TEST_F(CliTest, PinsAPrefixAndLetsItGo) {
  ASSERT_EQ(RunCli(absl::StrCat(target_, "put --trace ", kTrace)).exit_code, 0);
  // The sixth block of the chain, by following parents from the first.
  const json blocks = json::parse(RunCli(target_ + "--json ls").output)["blocks"];
  std::string sixth(64, '0');
  for (int depth = 0; depth < 6; ++depth) {
    const std::string parent = sixth;
    for (const json& block : blocks) {
      if (block["parent_key"] == parent) sixth = block["block_key"];
    }
  }
  const std::string name = sixth.substr(0, 16);
  const RunResult pin = RunCli(absl::StrCat(target_, "--json pin ", name));
  ASSERT_EQ(pin.exit_code, 0) << pin.errors;
  EXPECT_EQ(json::parse(pin.output)["blocks"], 6);
  EXPECT_EQ(CountPinned(target_), 6);
  const RunResult unpin = RunCli(absl::StrCat(target_, "unpin ", name));
  EXPECT_THAT(unpin.output, HasSubstr("6 blocks unpinned"));
  EXPECT_EQ(CountPinned(target_), 0);

  // A pin with an end takes itself off.
  EXPECT_THAT(RunCli(absl::StrCat(target_, "pin --ttl-seconds 1 ", name)).output,
              HasSubstr("6 blocks pinned for 1"));
  absl::SleepFor(absl::Milliseconds(1100));
  EXPECT_EQ(CountPinned(target_), 0);
}

TEST_F(CliTest, DropsABlockAndWhatComesAfterIt) {
  ASSERT_EQ(RunCli(absl::StrCat(target_, "put --trace ", kTrace)).exit_code, 0);
  const json blocks = json::parse(RunCli(target_ + "--json ls").output)["blocks"];
  std::string first;
  std::string second;
  for (const json& block : blocks) {
    if (block["parent_key"] == std::string(64, '0')) first = block["block_key"];
  }
  for (const json& block : blocks) {
    if (block["parent_key"] == first) second = block["block_key"];
  }
  const RunResult drop = RunCli(absl::StrCat(target_, "--json drop ", second));
  ASSERT_EQ(drop.exit_code, 0) << drop.errors;
  EXPECT_EQ(json::parse(drop.output)["blocks"], 26);
  const json left = json::parse(RunCli(target_ + "--json ls").output)["blocks"];
  ASSERT_EQ(left.size(), 1u);
  EXPECT_EQ(left[0]["block_key"], first);
}

TEST_F(CliTest, RoutesToTheStoreThatHasThePrefix) {
  ASSERT_EQ(RunCli(absl::StrCat(target_, "put --trace ", kTrace)).exit_code, 0);
  auto empty = Cluster::Start(ClusterShape::kAllInOne, "");
  ASSERT_TRUE(empty.ok()) << empty.status();
  const std::string route =
      absl::StrCat("route --trace ", kTrace, " --node b=", cluster_->options().kvstore_target);
  const RunResult both =
      RunCli(absl::StrCat("--json ", route, " --node a=", (*empty)->options().kvstore_target));
  ASSERT_EQ(both.exit_code, 0) << both.errors;
  const json nodes = json::parse(both.output)["nodes"];
  ASSERT_EQ(nodes.size(), 2u);
  EXPECT_EQ(nodes[0]["node"], "b");
  EXPECT_EQ(nodes[0]["memory_blocks"], 27);
  EXPECT_EQ(nodes[1]["memory_blocks"], 0);
  const RunResult dead = RunCli(absl::StrCat("--timeout-ms 500 ", route, " --node c=unix:/none"));
  EXPECT_EQ(dead.exit_code, 3);
  EXPECT_THAT(dead.output, HasSubstr("does not answer"));
  EXPECT_THAT(RunCli(absl::StrCat("route --trace ", kTrace, " --node x")).errors,
              HasSubstr("[NODE_INVALID]"));
}

TEST_F(CliTest, PullsAPrefixFromAnotherStore) {
  const std::string bulk = absl::StrCat("127.0.0.1:", UnusedPort());
  const std::string insecure = "server:\n  tcp_security: insecure\n";
  auto source = Cluster::Start(
      ClusterShape::kAllInOne, "",
      {.server_yaml = insecure, .store_yaml = "kvstore:\n  bulk_address: " + bulk + "\n"});
  ASSERT_TRUE(source.ok()) << source.status();
  auto target = Cluster::Start(
      ClusterShape::kAllInOne, "",
      {.server_yaml = insecure, .store_yaml = "kvstore:\n  bulk_peers: " + bulk + "\n"});
  ASSERT_TRUE(target.ok()) << target.status();
  const std::string there = absl::StrCat("--target ", (*source)->options().kvstore_target, " ");
  const std::string here = absl::StrCat("--target ", (*target)->options().kvstore_target, " ");
  ASSERT_EQ(RunCli(absl::StrCat(there, "put --trace ", kTrace)).exit_code, 0);
  const std::string pull = absl::StrCat(here, "--json pull ", bulk, " --trace ", kTrace);
  for (const char* order : {"originals-only", "whole", "originals-later"}) {
    const RunResult pulled = RunCli(absl::StrCat(pull, " --order ", order));
    ASSERT_EQ(pulled.exit_code, 0) << pulled.errors;
    const json data = json::parse(pulled.output);
    EXPECT_EQ(data["blocks"], 27);
    EXPECT_EQ(data["blocks_wanted"], 27);
    EXPECT_EQ(data["tokens"], 27 * 64);
  }
  // They are here, so a put finds all of them.
  const RunResult put = RunCli(absl::StrCat(here, "--json put --trace ", kTrace));
  EXPECT_EQ(json::parse(put.output)["blocks_shared"], 27);
  EXPECT_THAT(RunCli(pull + " --order never").errors, HasSubstr("[PULL_ORDER_UNKNOWN]"));
  const RunResult stranger = RunCli(absl::StrCat(here, "pull 127.0.0.1:1 --trace ", kTrace));
  EXPECT_EQ(stranger.exit_code, 1);
  EXPECT_THAT(stranger.errors, HasSubstr("[BULK_PEER_UNKNOWN]"));
}

TEST_F(CliTest, RefusesNamesThatAreNotOneBlock) {
  ASSERT_EQ(RunCli(absl::StrCat(target_, "put --trace ", kTrace)).exit_code, 0);
  for (const char* name : {"abc", "xyz01234", "0000000"}) {
    const RunResult pin = RunCli(absl::StrCat(target_, "pin ", name));
    EXPECT_EQ(pin.exit_code, 1) << name;
    EXPECT_THAT(pin.errors, HasSubstr("[BLOCK_NAME_INVALID]")) << name;
  }
  const RunResult missing = RunCli(target_ + "drop 00000000");
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(missing.errors, HasSubstr("[BLOCK_NOT_FOUND]"));
  EXPECT_EQ(RunCli(target_ + "pin").exit_code, 2);
  EXPECT_EQ(RunCli(target_ + "pin --ttl-seconds 0 00000000").exit_code, 2);
}

TEST_F(CliTest, AttendShowsCertificatesAndRiskKnowsTheRequest) {
  const RunResult attend = RunCli(
      absl::StrCat(target_, "--json attend --trace ", kTrace, " --request cli-risk --layer 1"));
  ASSERT_EQ(attend.exit_code, 0) << attend.errors;
  const json certificates = json::parse(attend.output)["certificates"];
  ASSERT_EQ(certificates.size(), 9u);
  for (const json& certificate : certificates) {
    EXPECT_EQ(certificate["outcome"], "certified");
    EXPECT_LE(certificate["worst_case_tv"], 0.2);
  }
  const RunResult risk = RunCli(target_ + "--json risk cli-risk");
  ASSERT_EQ(risk.exit_code, 0) << risk.errors;
  EXPECT_EQ(json::parse(risk.output)["read_count"], 9);
  const RunResult list = RunCli(target_ + "--json risk --all");
  EXPECT_EQ(json::parse(list.output)["risks"][0]["request"], "requests/cli-risk");
}

TEST_F(CliTest, RiskShowsAHeatMapAndTheWorstReads) {
  ASSERT_EQ(RunCli(absl::StrCat(target_, "attend --trace ", kTrace, " --request mapped")).exit_code,
            0);
  const RunResult risk = RunCli(target_ + "risk mapped");
  ASSERT_EQ(risk.exit_code, 0) << risk.errors;
  EXPECT_THAT(risk.output, HasSubstr("query heads 0 to 8"));
  EXPECT_THAT(risk.output, HasSubstr("worst reads"));
  EXPECT_THAT(risk.output, Not(HasSubstr("\x1b"))) << "no colours but in a terminal";
  const json data = json::parse(RunCli(target_ + "--json risk mapped").output);
  EXPECT_EQ(data["heads"].size(), 4u * 9u) << "all of them";
  EXPECT_EQ(data["worst_reads"].size(), 16u);
  const RunResult top = RunCli(target_ + "top --count 1");
  ASSERT_EQ(top.exit_code, 0) << top.errors;
  EXPECT_THAT(top.output, HasSubstr("open requests, the riskiest first"));
}

TEST_F(CliTest, PolicyIsTriedSetAndAudited) {
  ASSERT_EQ(RunCli(absl::StrCat(target_, "attend --trace ", kTrace)).exit_code, 0);
  const RunResult same = RunCli(target_ + "--json policy try");
  ASSERT_EQ(same.exit_code, 0) << same.errors;
  const json as_it_is = json::parse(same.output);
  EXPECT_GT(std::stoll(as_it_is["read_count"].get<std::string>()), 0);
  EXPECT_EQ(as_it_is["tried_first"], as_it_is["recorded_first"]);
  const json strict =
      json::parse(RunCli(target_ + "--json policy try --tv-tolerance 0.000001").output);
  EXPECT_EQ(strict["tried_first"], "0");
  EXPECT_THAT(RunCli(target_ + "policy try").output, HasSubstr("certified at once"));
  EXPECT_EQ(RunCli(target_ + "policy set --tv-tolerance 0.1").exit_code, 0);
  const RunResult show = RunCli(target_ + "policy show");
  EXPECT_THAT(show.output, HasSubstr("\"version\": \"2\""));
  EXPECT_THAT(show.output, HasSubstr("tv 0.1, value"));
  EXPECT_THAT(show.output, HasSubstr("start"));
  EXPECT_EQ(RunCli(target_ + "policy set --tv-tolerance 2").exit_code, 2);
  EXPECT_EQ(RunCli(target_ + "policy set --canary-share 1.5").exit_code, 2);
  EXPECT_EQ(RunCli(target_ + "policy set --canary-share 0.25").exit_code, 0);
  const json watched = json::parse(RunCli(target_ + "--json policy show").output);
  EXPECT_EQ(watched["canary_share"], 0.25);
  EXPECT_NEAR(watched["tolerances"]["tv_tolerance"].get<double>(), 0.1, 1e-6) << "kept";
  const std::string path = absl::StrCat(::testing::TempDir(), "/policy.json");
  std::ofstream(path) << "{\"tolerances\": 5}";
  const RunResult bad = RunCli(absl::StrCat(target_, "policy set --file ", path));
  EXPECT_EQ(bad.exit_code, 1);
  EXPECT_THAT(bad.errors, HasSubstr("POLICY_INVALID"));
  EXPECT_THAT(RunCli(target_ + "policy set --file /nowhere").errors, HasSubstr("FILE_NOT_FOUND"));
  EXPECT_EQ(RunCli(target_ + "events").exit_code, 0);
}

TEST(ReloadTest, SighupPutsTheFilesPolicyInForceAndABadFileChangesNothing) {
  auto started = Cluster::Start(ClusterShape::kAllInOne, "gate:\n  tv_tolerance: 0.15\n");
  ASSERT_TRUE(started.ok()) << started.status();
  Cluster& cluster = **started;
  const std::string target = absl::StrCat("--target ", cluster.options().kvstore_target, " ");
  const auto reload = [&](const std::string& text) {
    std::ofstream(cluster.ConfigPath(ClusterService::kGate)) << text;
    cluster.Signal(ClusterService::kGate, SIGHUP);
  };
  const auto policy = [&] { return json::parse(RunCli(target + "--json policy show").output); };
  const auto wait_for_version = [&](const std::string& version) {
    for (int i = 0; i < 100 && policy()["version"] != version; ++i) {
      absl::SleepFor(absl::Milliseconds(50));
    }
    return policy();
  };
  reload("gate:\n  tv_tolerance: 0.05\ngate_overrides:\n  - tenant: a\n    tv_tolerance: 0.01\n");
  const json second = wait_for_version("2");
  EXPECT_EQ(second["version"], "2");
  EXPECT_NEAR(second["tolerances"]["tv_tolerance"].get<double>(), 0.05, 1e-6);
  EXPECT_EQ(second["overrides"][0]["tenant"], "a");
  reload("gate:\n  tv_tolerance: 7\n");
  // Only then the next: a server reads the file when it gets to the signal.
  for (int i = 0; i < 100 && !absl::StrContains(cluster.Logs(), "event=config_refused"); ++i) {
    absl::SleepFor(absl::Milliseconds(50));
  }
  ASSERT_THAT(cluster.Logs(), HasSubstr("event=config_refused"));
  reload("gate:\n  value_tolerance: 0.02\n");  // what is left out has its default again
  const json third = wait_for_version("3");
  EXPECT_EQ(third["version"], "3") << "the bad file was no version";
  EXPECT_NEAR(third["tolerances"]["tv_tolerance"].get<double>(), 0.2, 1e-6);
  EXPECT_NEAR(third["tolerances"]["value_tolerance"].get<double>(), 0.02, 1e-6);
  EXPECT_TRUE(third["overrides"].empty());
  EXPECT_THAT(cluster.Logs(), HasSubstr("event=config_reloaded"));
}

TEST_F(CliTest, HealthTellsServersThatServeFromThoseThatAreGone) {
  const RunResult all = RunCli(target_ + "health");
  EXPECT_EQ(all.exit_code, 0) << all.errors;
  EXPECT_EQ(all.output, "SERVING\n");
  EXPECT_EQ(RunCli(target_ + "health --service certkv.gate.v1.Gate").exit_code, 0);
  const RunResult unknown = RunCli(target_ + "health --alive --service certkv.nothing");
  EXPECT_EQ(unknown.exit_code, 1);
  EXPECT_THAT(unknown.errors, HasSubstr("[SERVICE_NOT_FOUND]"));
  EXPECT_EQ(RunCli("--target unix:/nonexistent.sock health --alive").exit_code, 3);
}

// A server that is there and does not serve, as one that opens a large store.
class OpeningServer : public grpc::health::v1::Health::Service {
 public:
  explicit OpeningServer(const std::string& target) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(target, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest*,
                     grpc::health::v1::HealthCheckResponse* response) override {
    response->set_status(grpc::health::v1::HealthCheckResponse::NOT_SERVING);
    return grpc::Status::OK;
  }

 private:
  std::unique_ptr<grpc::Server> server_;
};

TEST(CliHealthTest, AServerThatDoesNotServeYetIsAlive) {
  const std::string target = absl::StrCat("unix:", ::testing::TempDir(), "/health-", getpid());
  const OpeningServer server(target);
  const RunResult health = RunCli(absl::StrCat("--target ", target, " health"));
  EXPECT_EQ(health.exit_code, 1);
  EXPECT_EQ(health.output, "NOT_SERVING\n");
  const RunResult alive = RunCli(absl::StrCat("--target ", target, " --json health --alive"));
  EXPECT_EQ(alive.exit_code, 0);
  EXPECT_EQ(json::parse(alive.output)["status"], "NOT_SERVING");
}

TEST_F(CliTest, ATruncatedTraceIsAnErrorThatNamesIt) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/truncated.safetensors");
  std::filesystem::copy_file(kTrace, path, std::filesystem::copy_options::overwrite_existing);
  std::filesystem::resize_file(path, 1000000);
  const RunResult put = RunCli(absl::StrCat(target_, "put --trace ", path));
  EXPECT_EQ(put.exit_code, 1);
  EXPECT_THAT(put.errors, HasSubstr("FILE_TRUNCATED"));
  EXPECT_THAT(put.errors, HasSubstr("truncated.safetensors"));
}

TEST(CliUsageTest, WrongArgumentsExitWithTwo) {
  EXPECT_EQ(RunCli("").exit_code, 2);
  EXPECT_EQ(RunCli("put").exit_code, 2);
  EXPECT_EQ(RunCli("nonsense").exit_code, 2);
  EXPECT_EQ(RunCli("--help").exit_code, 0);
}

TEST(CliUsageTest, AServerThatIsNotThereExitsWithThree) {
  const RunResult stats = RunCli("--timeout-ms 500 --target unix:/nonexistent/certkvd.sock stats");
  EXPECT_EQ(stats.exit_code, 3);
  EXPECT_THAT(stats.errors, HasSubstr("error:"));
}

TEST(CliUsageTest, TraceRecordHandsEveryArgumentToThePackage) {
  // A stand-in for Python that shows what it was given.
  const std::string python = absl::StrCat(::testing::TempDir(), "/python-", getpid());
  std::ofstream(python) << "#!/bin/sh\necho \"$@\"\nexit 7\n";
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  setenv("CERTKV_PYTHON", python.c_str(), 1);
  const RunResult record = RunCli("trace record --model /m --layers 0,9 rest --help");
  EXPECT_EQ(record.exit_code, 7);
  EXPECT_EQ(record.output, "-m certkv.trace record --model /m --layers 0,9 rest --help\n");
  setenv("CERTKV_PYTHON", "/nonexistent/python", 1);
  const RunResult none = RunCli("trace record --model /m");
  EXPECT_EQ(none.exit_code, 1);
  EXPECT_THAT(none.errors, HasSubstr("[SPAWN_FAILED] /nonexistent/python can't be started"));
  unsetenv("CERTKV_PYTHON");
  std::filesystem::remove(python);
}

TEST(CliUsageTest, CompletionKnowsTheSubcommands) {
  const RunResult completion = RunCli("completion");
  EXPECT_EQ(completion.exit_code, 0);
  for (const char* word : {"put", "attend", "risk", "demo", "--json", "--tv-tolerance"}) {
    EXPECT_THAT(completion.output, HasSubstr(word));
  }
}

TEST(ServerConfigTest, ATypoIsRefusedWithFileAndLine) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/typo.yaml");
  std::ofstream(path) << "gate:\n  tv_tolerence: 0.1\n";
  const RunResult check = RunCli(absl::StrCat("--check-config --config ", path), "certkvd");
  EXPECT_NE(check.exit_code, 0);
  EXPECT_THAT(check.output + check.errors, HasSubstr("typo.yaml:2"));
  EXPECT_THAT(check.output + check.errors, HasSubstr("tv_tolerence"));
}

// The whole main job on the real trace.
TEST(DemoTest, NoBoundIsViolatedAndTheLadderClimbs) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/demo-", getpid(), ".json");
  const RunResult demo = RunCli(absl::StrCat("demo --json ", path));
  ASSERT_EQ(demo.exit_code, 0) << demo.errors << demo.output;
  EXPECT_THAT(demo.output, HasSubstr("0 bounds violated"));
  std::ifstream file(path);
  const json runs = json::parse(file)["runs"];
  std::filesystem::remove(path);
  ASSERT_EQ(runs.size(), 5u);
  for (const json& run : runs) {
    EXPECT_EQ(run["reads"], 64 * 9 * 4);
    EXPECT_EQ(run["violations"], 0) << run;
    EXPECT_EQ(run["uncertified_outputs"], 0) << run;
    EXPECT_EQ(run["failed_reads"], 0) << run;
    EXPECT_EQ(run["blocks_shared"], 27) << run;
    EXPECT_GT(run["worst_true_tv"], 0) << "a truth of zero was not computed";
    EXPECT_EQ(run["risk"]["read_count"], run["reads"]);
  }
  EXPECT_EQ(runs[0]["format"], "K8V4");
  EXPECT_GE(runs[0]["capacity"], 2.4);
  EXPECT_GE(runs[0]["coverage"], 0.99);
  EXPECT_LE(runs[0]["worst_bound"], 0.2);
  EXPECT_LT(runs[1]["coverage"], runs[0]["coverage"]);
  EXPECT_GT(runs[1]["repair_bytes"], 0);
  EXPECT_LT(runs[2]["coverage"], 1.0);  // FP8: some reads can't be certified and are repaired
  EXPECT_LT(runs[3]["coverage"], 0.5);  // 4-bit keys
  EXPECT_GT(runs[3]["worst_unrepaired_tv"], runs[3]["tv_tolerance"]);
  EXPECT_EQ(runs[0]["skipped_tokens"], 0);
  EXPECT_GT(runs[4]["skipped_tokens"], runs[4]["read_tokens"].get<int64_t>() / 10);
  EXPECT_LT(runs[4]["read_bytes"], runs[0]["read_bytes"]);
  EXPECT_LE(runs[4]["worst_bound"], 0.2);
}

}  // namespace
}  // namespace certkv
