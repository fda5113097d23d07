// Against a real etcd.
#include "services/cluster/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "tests/support/etcd_server.h"
#include "tests/support/http_client.h"

namespace certkv::cluster {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kPatienceMs = 30'000;
constexpr int64_t kTtlSeconds = 2;

using Names = std::set<std::string>;

Names NamesIn(const ShardMap& map) {
  Names names;
  for (const Node& node : map.nodes()) names.insert(node.name);
  return names;
}

bool Sees(const Membership& membership, const Names& names) {
  return membership.WaitUntil([&names](const ShardMap& map) { return NamesIn(map) == names; },
                              kPatienceMs);
}

template <typename IsSo>
bool Eventually(const IsSo& is_so) {
  for (int64_t waited = 0; waited < kPatienceMs; waited += 20) {
    if (is_so()) return true;
    absl::SleepFor(absl::Milliseconds(20));
  }
  return is_so();
}

class MembershipTest : public ::testing::Test {
 protected:
  MembershipOptions Options() const {
    MembershipOptions options;
    options.etcd.endpoints = {etcd_.endpoint()};
    options.etcd.timeout_ms = 1000;
    options.ttl_seconds = kTtlSeconds;
    return options;
  }
  std::unique_ptr<Membership> Join(const std::string& name, const std::string& target = "") const {
    MembershipOptions options = Options();
    options.self = Node{name, target.empty() ? name + ":1" : target, "", 1, ""};
    auto membership = Membership::Start(std::move(options));
    EXPECT_TRUE(membership.ok()) << membership.status();
    return *std::move(membership);
  }
  // For calls of the test itself, on a machine that does much else.
  EtcdOptions Patient() const {
    EtcdOptions options = Options().etcd;
    options.timeout_ms = kPatienceMs;
    return options;
  }
  std::unique_ptr<Membership> Watch() const { return *Membership::Start(Options()); }

  EtcdServer etcd_;
};

TEST_F(MembershipTest, AllSeeWhoComesAndGoes) {
  const auto watcher = Watch();
  auto a = Join("a");
  EXPECT_TRUE(Sees(*watcher, {"a"}));
  auto b = Join("b");
  for (const Membership* membership : {watcher.get(), a.get(), b.get()}) {
    EXPECT_TRUE(Sees(*membership, {"a", "b"}));
  }
  EXPECT_EQ(watcher->map()->Find("a")->target, "a:1");
  EXPECT_FALSE(watcher->status().is_registered);
  EXPECT_TRUE(Eventually([&a] { return a->status().is_registered && a->status().is_watching; }));
  EXPECT_TRUE(a->status().problem.ok());
  const int64_t before = watcher->map()->revision();
  b.reset();  // leaves at once, not when its lease ends
  EXPECT_TRUE(watcher->WaitUntil([](const ShardMap& map) { return map.Find("b") == nullptr; },
                                 kTtlSeconds * 1000 / 2));
  EXPECT_GT(watcher->map()->revision(), before);
}

TEST_F(MembershipTest, ClustersDoNotSeeEachOther) {
  const auto a = Join("a");
  MembershipOptions options = Options();
  options.cluster = "default2";  // begins with the other's name
  const auto other = *Membership::Start(options);
  EXPECT_TRUE(Sees(*a, {"a"}));
  EXPECT_TRUE(Eventually([&other] { return other->status().is_watching; }));
  EXPECT_EQ(NamesIn(*other->map()), Names{});
}

TEST_F(MembershipTest, ANodeThatDiesIsGoneWhenItsLeaseEnds) {
  const auto watcher = Watch();
  EtcdClient etcd(Patient());
  const auto lease = etcd.GrantLease(2 * kTtlSeconds);
  ASSERT_TRUE(lease.ok()) << lease.status();
  const Node node{"dying", "d:1", "", 1, "i"};
  ASSERT_TRUE(*etcd.PutIf("/certkv/default/nodes/dying", NodeToText(node), *lease, 0));
  EXPECT_TRUE(Sees(*watcher, {"dying"}));
  const absl::Time start = absl::Now();
  for (int i = 0; i < 8; ++i) {  // kept alive beyond its time
    absl::SleepFor(absl::Milliseconds(kTtlSeconds * 1000 / 3));
    EXPECT_TRUE(etcd.KeepAlive(*lease).ok());
  }
  EXPECT_EQ(NamesIn(*watcher->map()), Names{"dying"}) << absl::Now() - start;
  EXPECT_TRUE(Sees(*watcher, {}));
  EXPECT_EQ(ReasonOf(etcd.KeepAlive(*lease)), "ETCD_LEASE_ENDED");
}

TEST_F(MembershipTest, WithoutEtcdTheLastMapStaysAndNodesComeBack) {
  auto a = Join("a");
  auto b = Join("b");
  ASSERT_TRUE(Sees(*a, {"a", "b"}));
  const int64_t revision = a->map()->revision();
  etcd_.Kill();
  EXPECT_TRUE(Eventually([&a] { return !a->status().is_watching; }));
  const absl::Status problem = a->status().problem;
  EXPECT_EQ(ReasonOf(problem), "ETCD_UNAVAILABLE");
  EXPECT_THAT(std::string(problem.message()), HasSubstr(etcd_.endpoint()));
  absl::SleepFor(absl::Milliseconds(kTtlSeconds * 1000 * 3 / 2));
  EXPECT_EQ(NamesIn(*a->map()), (Names{"a", "b"}));
  EXPECT_EQ(a->map()->revision(), revision);
  etcd_.Start();
  EXPECT_TRUE(Eventually([&a, &b] {
    return a->status().is_watching && b->status().is_watching && a->status().problem.ok() &&
           b->status().problem.ok();
  }));
  EXPECT_TRUE(Sees(*a, {"a", "b"}));
  auto c = Join("c");
  EXPECT_TRUE(Sees(*a, {"a", "b", "c"}));
  EXPECT_TRUE(Sees(*b, {"a", "b", "c"}));
}

// One that was made anew, or a member that lags: what it says was true once.
TEST_F(MembershipTest, AnEtcdOfAnOlderRevisionChangesNothing) {
  const auto watcher = Watch();
  {
    EtcdClient etcd(Patient());
    const auto lease = etcd.GrantLease(600);
    ASSERT_TRUE(lease.ok()) << lease.status();
    for (const char* name : {"a", "b"}) {
      const Node node{name, "h:1", "", 1, "i"};
      const std::string key = absl::StrCat("/certkv/default/nodes/", name);
      ASSERT_TRUE(*etcd.PutIf(key, NodeToText(node), *lease, 0));
    }
  }
  ASSERT_TRUE(Sees(*watcher, {"a", "b"}));
  const int64_t revision = watcher->map()->revision();
  etcd_.Kill();
  std::filesystem::remove_all(etcd_.directory() + "/data");
  etcd_.Start();
  EXPECT_TRUE(Eventually([&watcher] {
    const absl::Status problem = watcher->status().problem;
    return absl::StrContains(std::string(problem.message()), "that was seen before");
  }));
  EXPECT_FALSE(watcher->status().is_watching);
  EXPECT_EQ(NamesIn(*watcher->map()), (Names{"a", "b"}));
  EXPECT_EQ(watcher->map()->revision(), revision);
}

TEST_F(MembershipTest, AnEtcdThatHangsIsNoticed) {
  const auto a = Join("a");
  ASSERT_TRUE(Sees(*a, {"a"}));
  etcd_.Signal(SIGSTOP);
  EXPECT_TRUE(Eventually([&a] { return !a->status().problem.ok(); }));
  EXPECT_EQ(NamesIn(*a->map()), Names{"a"});
  // Its lease may end while etcd does not run: then it registers again.
  absl::SleepFor(absl::Milliseconds(kTtlSeconds * 1000 * 3 / 2));
  etcd_.Signal(SIGCONT);
  EXPECT_TRUE(Eventually([&a] { return a->status().problem.ok() && a->status().is_registered; }));
  EXPECT_TRUE(Sees(*a, {"a"}));
}

TEST_F(MembershipTest, ADeletedRegistrationIsMadeAgain) {
  const auto a = Join("a");
  ASSERT_TRUE(Sees(*a, {"a"}));
  // Put under a lease that is revoked: the key is gone, a's own lease lives on.
  EtcdClient etcd(Patient());
  const auto entry = etcd.Get("/certkv/default/nodes/a");
  ASSERT_TRUE(entry.ok() && entry->mod_revision > 0);
  const auto lease = etcd.GrantLease(kTtlSeconds);
  ASSERT_TRUE(*etcd.PutIf(entry->key, entry->value, *lease, entry->mod_revision));
  ASSERT_TRUE(etcd.Revoke(*lease).ok());
  EXPECT_TRUE(
      Eventually([&etcd] { return etcd.Get("/certkv/default/nodes/a")->mod_revision > 0; }));
  EXPECT_TRUE(Sees(*a, {"a"}));
}

TEST_F(MembershipTest, TwoProcessesOfOneNameAreNeverBothRegistered) {
  const auto first = Join("a", "host-1:1");
  ASSERT_TRUE(Sees(*first, {"a"}));
  const auto second = Join("a", "host-2:1");
  EXPECT_TRUE(Eventually([&second] { return !second->status().problem.ok(); }));
  EXPECT_EQ(ReasonOf(second->status().problem), "NODE_NAME_TAKEN");
  EXPECT_THAT(std::string(second->status().problem.message()), HasSubstr("host-1:1"));
  EXPECT_EQ(second->map()->Find("a")->target, "host-1:1");
  EXPECT_FALSE(second->status().is_registered);
  EXPECT_TRUE(first->status().is_registered);
}

TEST_F(MembershipTest, APutOverWhatChangedMeanwhileIsRefused) {
  EtcdClient etcd(Patient());
  const auto lease = etcd.GrantLease(60);
  ASSERT_TRUE(*etcd.PutIf("/x", "first", *lease, 0));
  EXPECT_FALSE(*etcd.PutIf("/x", "second", *lease, 0)) << "it is there by now";
  const int64_t revision = etcd.Get("/x")->mod_revision;
  ASSERT_TRUE(*etcd.PutIf("/x", "third", *lease, revision));
  EXPECT_FALSE(*etcd.PutIf("/x", "fourth", *lease, revision));
  EXPECT_EQ(etcd.Get("/x")->value, "third");
}

TEST_F(MembershipTest, OfTwoThatComeAtOnceOneIsRegistered) {
  // Who was ever registered by each name.
  absl::Mutex mutex;
  std::map<std::string, Names> targets;
  EtcdClient observer(Patient());
  std::thread observing([&] {
    observer
        .Watch("/certkv/default/nodes/", 1,
               [&](const std::vector<EtcdChange>& changes, int64_t) {
                 absl::MutexLock lock(&mutex);
                 for (const EtcdChange& change : changes) {
                   if (change.deleted) continue;
                   targets[change.entry.key].insert(NodeFromText(change.entry.value)->target);
                 }
               })
        .IgnoreError();
  });
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(round);
    const std::string name = absl::StrCat("n", round);
    // Join returns at once: both ask whether the name is free before either has it.
    const auto first = Join(name, "host-1:1");
    const auto second = Join(name, "host-2:1");
    const auto is_refused = [](const Membership& membership) {
      return ReasonOf(membership.status().problem) == "NODE_NAME_TAKEN";
    };
    EXPECT_TRUE(Eventually([&] {
      return (first->status().is_registered && is_refused(*second)) ||
             (second->status().is_registered && is_refused(*first));
    }));
    EXPECT_NE(first->status().is_registered, second->status().is_registered);
    const auto registered = [&] {
      absl::MutexLock lock(&mutex);
      return targets["/certkv/default/nodes/" + name].size();
    };
    EXPECT_TRUE(Eventually([&] { return registered() > 0; }));
    EXPECT_EQ(registered(), 1u) << "the other never was";
  }
  observer.Stop();
  observing.join();
}

TEST_F(MembershipTest, ARestartedNodeTakesItsNameOverAtOnce) {
  const auto before = Join("a", "host-1:1");
  ASSERT_TRUE(Sees(*before, {"a"}));
  const std::string instance = before->map()->Find("a")->instance;
  const auto after = Join("a", "host-1:1");
  const auto is_other = [&instance](const ShardMap& map) {
    return map.Find("a") != nullptr && map.Find("a")->instance != instance;
  };
  EXPECT_TRUE(after->WaitUntil(is_other, kTtlSeconds * 1000 / 2));
  // The old one does not take it back.
  EXPECT_TRUE(Eventually([&before] { return !before->status().is_registered; }));
  absl::SleepFor(absl::Seconds(kTtlSeconds));
  EXPECT_TRUE(is_other(*after->map()));
  EXPECT_TRUE(after->status().is_registered);
}

TEST_F(MembershipTest, WhatIsNoRegistrationIsPassedOver) {
  EtcdClient etcd(Patient());
  const auto lease = etcd.GrantLease(60);
  ASSERT_TRUE(*etcd.PutIf("/certkv/default/nodes/junk", "{", *lease, 0));
  const Node liar{"b", "b:1", "", 1, "i"};
  ASSERT_TRUE(*etcd.PutIf("/certkv/default/nodes/not-b", NodeToText(liar), *lease, 0));
  const auto a = Join("a");
  EXPECT_TRUE(Sees(*a, {"a"}));
}

TEST_F(MembershipTest, AnotherEndpointIsAskedWhenOneIsDead) {
  MembershipOptions options = Options();
  options.etcd.endpoints = {absl::StrCat("127.0.0.1:", UnusedPort()), etcd_.endpoint()};
  options.self = Node{"a", "a:1", "", 1, ""};
  const auto a = *Membership::Start(options);
  EXPECT_TRUE(Sees(*a, {"a"}));
}

TEST_F(MembershipTest, ChangesThatEtcdForgotAreAnError) {
  EtcdClient etcd(Patient());
  const auto lease = etcd.GrantLease(60);
  for (int i = 0; i < 3; ++i) {
    const auto entry = etcd.Get("/x");
    ASSERT_TRUE(*etcd.PutIf("/x", absl::StrCat(i), *lease, entry->mod_revision));
  }
  const auto listing = etcd.List("/");
  ASSERT_TRUE(listing.ok());
  // Of its JSON API, since our client never does this.
  const HttpAnswer answer =
      HttpPost(etcd_.port(), "/v3/kv/compaction",
               absl::StrCat(R"({"revision":")", listing->revision, R"(","physical":true})"));
  ASSERT_EQ(answer.status, 200) << answer.body;
  const absl::Status status =
      etcd.Watch("/", 2, [](const std::vector<EtcdChange>&, int64_t) { FAIL(); });
  EXPECT_EQ(ReasonOf(status), "ETCD_COMPACTED");
}

TEST(MembershipOptionsTest, RefusesWhatCannotWork) {
  MembershipOptions options;
  EXPECT_EQ(ReasonOf(Membership::Start(options).status()), "CONFIG_INVALID");
  options.etcd.endpoints = {"localhost:1"};
  options.cluster = "a/b";
  EXPECT_EQ(ReasonOf(Membership::Start(options).status()), "CONFIG_INVALID");
  options.cluster = "a";
  options.ttl_seconds = 0;
  EXPECT_EQ(ReasonOf(Membership::Start(options).status()), "CONFIG_INVALID");
  options.ttl_seconds = 10;
  options.self = Node{"a", "", "", 1, ""};
  EXPECT_EQ(ReasonOf(Membership::Start(options).status()), "NODE_INVALID");
}

}  // namespace
}  // namespace certkv::cluster
