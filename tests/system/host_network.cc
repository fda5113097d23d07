#include "tests/system/host_network.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "tests/support/file_content.h"

namespace certkv {
namespace {

constexpr char kNsenter[] = "/usr/bin/nsenter";
constexpr char kUnshare[] = "/usr/bin/unshare";
constexpr char kNetem[] = "netem delay 40ms 10ms loss 1%";
constexpr char kTbf[] = "tbf rate 8mbit burst 16kb latency 200ms";

}  // namespace

absl::StatusOr<std::unique_ptr<HostNetwork>> HostNetwork::Create(HostKind kind, int host_count,
                                                                 const std::string& name,
                                                                 const std::vector<int>& named,
                                                                 const std::string& directory) {
  std::unique_ptr<HostNetwork> network(new HostNetwork(kind));
  network->directory_ = directory;
  network->name_ = name;
  network->named_ = named;
  network->is_root_ = geteuid() == 0;
  if (kind == HostKind::kNamespaces) {
    CERTKV_RETURN_IF_ERROR(network->MakeNamespaces(host_count));
  }
  return network;
}

std::string HostNetwork::address(int host) const {
  return kind_ == HostKind::kNamespaces ? absl::StrCat("198.18.0.", host + 1)
                                        : absl::StrCat("127.0.", host + 1, ".1");
}

std::vector<std::string> HostNetwork::words(int host) const {
  if (kind_ == HostKind::kLoopback) return {};
  return WordsOf(*anchors_[static_cast<size_t>(host)]);
}

std::string HostNetwork::target(int port) const {
  if (kind_ == HostKind::kNamespaces) return absl::StrCat("dns:///", name_, ":", port);
  std::vector<std::string> addresses;
  for (const int host : named_) addresses.push_back(absl::StrCat(address(host), ":", port));
  return "ipv4:" + absl::StrJoin(addresses, ",");
}

std::vector<std::string> HostNetwork::WordsOf(const cli::ChildProcess& anchor) const {
  std::vector<std::string> words = {kNsenter, "-t", absl::StrCat(anchor.pid()), "-n", "-m"};
  if (is_root_) return words;
  // Entering a user namespace takes the death signal away that the program was started with.
  words.insert(words.end(), {"-U", "--preserve-credentials", "setpriv", "--pdeathsig", "KILL"});
  return words;
}

absl::Status HostNetwork::Run(const cli::ChildProcess& anchor, const std::string& command) const {
  const std::string output = directory_ + "/network.out";
  const std::string line = absl::StrCat(absl::StrJoin(WordsOf(anchor), " "), " sh -c '", command,
                                        "' >", output, " 2>&1");
  if (std::system(line.c_str()) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(command, ": ", ContentOf(output)));
}

absl::StatusOr<std::unique_ptr<cli::ChildProcess>> HostNetwork::StartAnchor(bool is_first) {
  std::vector<std::string> words;
  if (!is_root_ && !is_first) words = WordsOf(*switch_);
  words.insert(words.end(), {kUnshare, "-n", "-m"});
  if (!is_root_ && is_first) words.push_back("-Ur");
  const std::string log = absl::StrCat(directory_, "/anchor.log");
  words.insert(words.end(), {"sh", "-c",
                             absl::StrCat("mount --bind ", directory_,
                                          "/hosts /etc/hosts && echo made >&2 && "
                                          "exec sleep infinity")});
  std::ofstream(log, std::ios::trunc).flush();
  CERTKV_ASSIGN_OR_RETURN(auto anchor, cli::ChildProcess::Start(words, {}, log));
  for (int i = 0; i < 500; ++i) {
    if (ContentOf(log) == "made\n") return anchor;
    if (!anchor->CheckRunning().ok()) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return absl::FailedPreconditionError(absl::StrCat("no network namespace: ", ContentOf(log)));
}

absl::Status HostNetwork::MakeNamespaces(int host_count) {
  {
    std::ofstream hosts(directory_ + "/hosts");
    hosts << "127.0.0.1 localhost\n";
    for (const int host : named_) hosts << address(host) << " " << name_ << "\n";
  }
  CERTKV_ASSIGN_OR_RETURN(switch_, StartAnchor(/*is_first=*/true));
  CERTKV_RETURN_IF_ERROR(
      Run(*switch_, "ip link add switch0 type bridge && ip link set switch0 up"));
  for (int host = 0; host < host_count; ++host) {
    CERTKV_ASSIGN_OR_RETURN(auto anchor, StartAnchor(/*is_first=*/false));
    CERTKV_RETURN_IF_ERROR(Run(
        *switch_, absl::StrCat("ip link add port", host, " type veth peer name eth0 netns ",
                               anchor->pid(), " && ip link set port", host, " master switch0 up")));
    CERTKV_RETURN_IF_ERROR(
        Run(*anchor, absl::StrCat("ip link set lo up && ip addr add ", address(host),
                                  "/24 dev eth0 && ip link set eth0 up")));
    anchors_.push_back(std::move(anchor));
  }
  const bool has_netem = Run(*switch_, absl::StrCat("tc qdisc add dev lo root ", kNetem)).ok();
  slow_link_ = has_netem ? kNetem : kTbf;
  return absl::OkStatus();
}

absl::Status HostNetwork::SetLink(int host, bool is_up) {
  return Run(*switch_, absl::StrCat("ip link set port", host, is_up ? " up" : " down"));
}

absl::Status HostNetwork::SetPath(int a, int b, bool is_open) {
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    CERTKV_RETURN_IF_ERROR(
        Run(*anchors_[static_cast<size_t>(from)],
            absl::StrCat("ip route ", is_open ? "del" : "add", " blackhole ", address(to), "/32")));
  }
  return absl::OkStatus();
}

absl::Status HostNetwork::SetSlow(int host, bool is_slow) {
  const auto command = [&](const std::string& device) {
    return absl::StrCat("tc qdisc ", is_slow ? "add" : "del", " dev ", device, " root ",
                        is_slow ? slow_link_ : "");
  };
  CERTKV_RETURN_IF_ERROR(Run(*anchors_[static_cast<size_t>(host)], command("eth0")));
  return Run(*switch_, command(absl::StrCat("port", host)));
}

}  // namespace certkv
