// Two network namespaces of this process's own and a link between them that is as slow, far and
// lossy as a test likes: what tc's netem does, for kernels that have none, and for TCP itself,
// which a proxy would end on either side.
#ifndef CERTKV_TESTS_SUPPORT_PACKET_LINK_H_
#define CERTKV_TESTS_SUPPORT_PACKET_LINK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/shared_memory.h"

namespace certkv {

// Of each direction.
struct LinkShape {
  int64_t delay_us = 0;          // one way
  int64_t bytes_per_second = 0;  // 0: no limit
  int64_t queue_bytes = 0;       // what may wait for its turn, more is dropped; 0: no limit
  int32_t lost_per_million = 0;  // packets, drawn
};

// Packets have up to kPacketBytes; TUN devices take them from the kernel and give them to it.
// Threads: all methods are safe.
class PacketLink {
 public:
  static constexpr int32_t kPacketBytes = 9000;

  // Errors: FailedPrecondition, namespaces or TUN devices can't be made here; says which.
  static absl::StatusOr<std::unique_ptr<PacketLink>> Create(const LinkShape& shape, uint64_t seed);
  ~PacketLink();
  PacketLink(const PacketLink&) = delete;
  PacketLink& operator=(const PacketLink&) = delete;

  // Runs `call` with this thread in the namespace of end 0 or 1: sockets and threads that it makes
  // belong there for good.
  void At(int end, const std::function<void()>& call) const;
  static std::string address(int end) { return end == 0 ? "198.18.0.1" : "198.18.0.2"; }

  // For packets that come from now on.
  void SetShape(const LinkShape& shape) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of both directions: lost by chance, and dropped because too many waited.
  int64_t lost_count() const { return lost_; }
  int64_t dropped_count() const { return dropped_; }

 private:
  struct End {
    UniqueFd netns;
    UniqueFd device;
  };

  PacketLink() = default;
  static absl::Status MakeEnd(int end, End* made);
  void Carry(int from, uint64_t seed);

  End ends_[2];
  UniqueFd home_;  // the namespace of before
  absl::Mutex mutex_;
  LinkShape shape_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> lost_{0};
  std::atomic<int64_t> dropped_{0};
  std::atomic<bool> is_stopped_{false};
  std::thread threads_[2];
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_PACKET_LINK_H_
