#include "tests/support/packet_link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"

namespace certkv {
namespace {

constexpr char kDevice[] = "certkv-link";
constexpr char kNamespaceOfThread[] = "/proc/thread-self/ns/net";
constexpr int64_t kPollNs = 5'000'000;  // to see that it ends

absl::Status Failed(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(what, ": ", std::strerror(errno)));
}

int64_t NowNs() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// What waits for its time.
struct Packet {
  int64_t due_ns = 0;
  std::vector<char> bytes;
};

void SetAddress(const char* text, sockaddr* address) {
  auto* in = reinterpret_cast<sockaddr_in*>(address);
  in->sin_family = AF_INET;
  inet_pton(AF_INET, text, &in->sin_addr);
}

bool BringUp(int socket, const char* name) {
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  return ioctl(socket, SIOCSIFFLAGS, &request) == 0;
}

}  // namespace

// In a thread of its own, whose namespace the end gets.
absl::Status PacketLink::MakeEnd(int end, End* made) {
  if (unshare(CLONE_NEWNET) != 0) return Failed("no network namespace");
  made->netns = UniqueFd(open(kNamespaceOfThread, O_RDONLY | O_CLOEXEC));
  made->device = UniqueFd(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!made->netns.valid() || !made->device.valid()) return Failed("no TUN device");
  ifreq request{};
  std::strncpy(request.ifr_name, kDevice, IFNAMSIZ - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  if (ioctl(made->device.get(), TUNSETIFF, &request) != 0) return Failed("no TUN device");
  const UniqueFd control(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  SetAddress(address(end).c_str(), &request.ifr_addr);
  bool is_made = ioctl(control.get(), SIOCSIFADDR, &request) == 0;
  SetAddress(address(1 - end).c_str(), &request.ifr_dstaddr);
  is_made = is_made && ioctl(control.get(), SIOCSIFDSTADDR, &request) == 0;
  request.ifr_mtu = kPacketBytes;
  is_made = is_made && ioctl(control.get(), SIOCSIFMTU, &request) == 0;
  is_made = is_made && BringUp(control.get(), kDevice) && BringUp(control.get(), "lo");
  return is_made ? absl::OkStatus() : Failed("the TUN device can't be set up");
}

absl::StatusOr<std::unique_ptr<PacketLink>> PacketLink::Create(const LinkShape& shape,
                                                               uint64_t seed) {
  std::unique_ptr<PacketLink> link(new PacketLink());
  link->home_ = UniqueFd(open(kNamespaceOfThread, O_RDONLY | O_CLOEXEC));
  link->SetShape(shape);
  for (int end = 0; end < 2; ++end) {
    absl::Status status;
    std::thread([&] { status = MakeEnd(end, &link->ends_[end]); }).join();
    if (!status.ok()) return status;
  }
  for (int from = 0; from < 2; ++from) {
    link->threads_[from] =
        std::thread([link = link.get(), from, seed] { link->Carry(from, seed + from); });
  }
  return link;
}

PacketLink::~PacketLink() {
  is_stopped_ = true;
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void PacketLink::At(int end, const std::function<void()>& call) const {
  CERTKV_CHECK(setns(ends_[end].netns.get(), CLONE_NEWNET) == 0, "it was made by this process");
  call();
  CERTKV_CHECK(setns(home_.get(), CLONE_NEWNET) == 0, "it was there before");
}

void PacketLink::SetShape(const LinkShape& shape) {
  absl::MutexLock lock(&mutex_);
  shape_ = shape;
}

void PacketLink::Carry(int from, uint64_t seed) {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  std::mt19937_64 random(seed);
  const int in = ends_[from].device.get();
  const int out = ends_[1 - from].device.get();
  std::deque<Packet> waiting;
  int64_t free_ns = 0;  // when the link has sent what it took
  char buffer[kPacketBytes + 64];
  while (!is_stopped_) {
    int64_t now = NowNs();
    while (!waiting.empty() && waiting.front().due_ns <= now) {
      // A kernel whose queue is full drops it, as a switch would.
      const std::vector<char>& bytes = waiting.front().bytes;
      if (write(out, bytes.data(), bytes.size()) < 0) ++dropped_;
      waiting.pop_front();
    }
    const int64_t left = waiting.empty() ? kPollNs : waiting.front().due_ns - now;
    const timespec wait{0, std::clamp<int64_t>(left, 0, kPollNs)};
    pollfd readable{in, POLLIN, 0};
    if (ppoll(&readable, 1, &wait, nullptr) <= 0) continue;
    LinkShape shape;
    {
      absl::MutexLock lock(&mutex_);
      shape = shape_;
    }
    // Not all that is there: packets become due meanwhile.
    for (int i = 0; i < 16; ++i) {
      const ssize_t size = read(in, buffer, sizeof(buffer));
      if (size <= 0) break;
      if (static_cast<int64_t>(random() % 1'000'000) < shape.lost_per_million) {
        ++lost_;
        continue;
      }
      now = NowNs();
      const int64_t turn_ns = std::max(now, free_ns);
      if (shape.bytes_per_second > 0) {
        const double queued =
            static_cast<double>(turn_ns - now) / 1e9 * static_cast<double>(shape.bytes_per_second);
        if (shape.queue_bytes > 0 && queued > static_cast<double>(shape.queue_bytes)) {
          ++dropped_;
          continue;
        }
        free_ns = turn_ns + size * 1'000'000'000 / shape.bytes_per_second;
      } else {
        free_ns = now;
      }
      waiting.push_back(
          {free_ns + shape.delay_us * 1000, std::vector<char>(buffer, buffer + size)});
    }
  }
}

}  // namespace certkv
