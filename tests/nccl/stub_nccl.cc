// A library with NCCL's entry points that moves bytes between processes of this machine over Unix
// sockets, on streams of kernels/cuda/on_cpu/sharing. As with NCCL nothing has moved before the
// stream says so, a communicator has to be asked before each call whether it is ready, and what is
// under way when the other end dies ends when the communicator is aborted and not before.
//
// It fails as the file named by CERTKV_STUB_NCCL says when a call is made: "ncclSend=3@2" is every
// ncclSend from the second on with error 3. Beside the entry points there are
//   version=N   what ncclGetVersion says
//   async=N     what ncclCommGetAsyncError says of a communicator that is ready
//   alone=1     nobody finds the other end
//   stall=1     what is sent doesn't go out
//   cut=1       half of what is sent goes out, then the sender's end is lost
//   flip=1      one bit of what is sent arrives otherwise
//   die=1       the process that sends is killed
//   delay=MS    what is sent takes so long
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/nccl/abi.h"

// Of the program that opened this library, where it has the shared runtime.
extern "C" __attribute__((weak)) void certkv_sharing_queue(void* stream, int (*poll)(void*),
                                                           void (*release)(void*), void* argument);

namespace certkv::nccl {
namespace {

constexpr Result kUnhandledCudaError = 1;
constexpr Result kSystemError = 2;
constexpr Result kInvalidArgument = 4;
constexpr int kDone = 0;        // cudaSuccess
constexpr int kNotReady = 600;  // cudaErrorNotReady

// What the file says of `name` now; 0: nothing.
int InjectedOf(const std::string& name) {
  static auto* const mutex = new std::mutex;
  static auto* const counts = new std::map<std::string, int>;
  static auto* const last = new std::string;
  const char* const path = std::getenv("CERTKV_STUB_NCCL");
  if (path == nullptr) return 0;
  const std::lock_guard lock(*mutex);
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  if (text.str() != *last) counts->clear();
  *last = text.str();
  std::istringstream words(*last);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || word.substr(0, equals) != name) continue;
    const size_t at = word.find('@');
    const int from = at == std::string::npos ? 1 : std::atoi(word.c_str() + at + 1);
    if (++(*counts)[word] >= from) return std::atoi(word.c_str() + equals + 1);
  }
  return 0;
}

// Bytes that are under way in this process, and the most there were.
std::atomic<int64_t> bytes_now{0};
std::atomic<int64_t> bytes_peak{0};

struct Movement {
  bool is_send = false;
  uint8_t* memory = nullptr;
  uint64_t size_bytes = 0;
  CUstream_st* stream = nullptr;
  std::atomic<bool> is_over{false};
  bool is_started = false;  // the stream has come so far

  ~Movement() { bytes_now.fetch_sub(static_cast<int64_t>(size_bytes)); }
};

sockaddr_un AddressOf(const char* name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path + 1, name, sizeof(address.sun_path) - 2);  // an abstract one
  return address;
}

std::mutex listeners_mutex;
std::map<std::string, int> listeners;  // of GetUniqueId, until rank 0 joins

class Link : public std::enable_shared_from_this<Link> {
 public:
  void Begin(const std::string& name, int rank) {
    thread_ = std::thread([this, name, rank] { Run(name, rank); });
  }

  Result State() {
    std::shared_ptr<Movement> movement;
    {
      const std::lock_guard lock(mutex_);
      if (error_ != kSuccess) return error_;
      if (!is_connected_) return kInProgress;
      movement = std::move(taken_);
    }
    if (movement == nullptr) return kSuccess;
    // Once after each call it isn't through yet, and only now is anything on the stream.
    Launch(std::move(movement));
    return kInProgress;
  }

  Result Queue(const std::shared_ptr<Movement>& movement) {
    if (certkv_sharing_queue == nullptr) return kUnhandledCudaError;
    const std::lock_guard lock(mutex_);
    if (error_ != kSuccess) return error_;
    if (!is_connected_ || taken_ != nullptr) return kInvalidUsage;
    taken_ = movement;
    all_.push_back(movement);
    return kInProgress;
  }

  void Abort() {
    {
      const std::lock_guard lock(mutex_);
      is_aborted_ = true;
      if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
      changed_.notify_all();
    }
    thread_.join();
    if (fd_ >= 0) close(fd_);
    for (const auto& weak : all_) {
      if (const auto movement = weak.lock()) movement->is_over = true;
    }
  }

 private:
  void Launch(std::shared_ptr<Movement> movement) {
    struct Argument {
      std::weak_ptr<Link> link;
      std::shared_ptr<Movement> movement;
    };
    CUstream_st* const stream = movement->stream;
    certkv_sharing_queue(
        stream,
        [](void* pointer) {
          auto* const argument = static_cast<Argument*>(pointer);
          Movement& moved = *argument->movement;
          if (moved.is_over) return kDone;
          const std::shared_ptr<Link> link = argument->link.lock();
          if (link != nullptr && !std::exchange(moved.is_started, true)) {
            const std::lock_guard lock(link->mutex_);
            link->started_.push_back(argument->movement);
            link->changed_.notify_all();
          }
          return kNotReady;
        },
        [](void* pointer) { delete static_cast<Argument*>(pointer); },
        new Argument{weak_from_this(), std::move(movement)});
  }

  bool IsAborted() {
    const std::lock_guard lock(mutex_);
    return is_aborted_;
  }

  // -1: aborted before.
  int Connect(const std::string& name, int rank) {
    int listener = -1;
    if (rank == 0) {
      const std::lock_guard lock(listeners_mutex);
      listener = std::exchange(listeners[name], -1);
    }
    int fd = -1;
    while (fd < 0 && !IsAborted()) {
      if (InjectedOf("alone") != 0) {
        poll(nullptr, 0, 2);
      } else if (rank == 0) {
        pollfd waiting{listener, POLLIN, 0};
        if (poll(&waiting, 1, 2) > 0) fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
      } else {
        const sockaddr_un address = AddressOf(name.c_str());
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
          close(std::exchange(fd, -1));
          poll(nullptr, 0, 2);
        }
      }
    }
    if (listener >= 0) close(listener);
    return fd;
  }

  void Run(const std::string& name, int rank) {
    const int fd = Connect(name, rank);
    std::unique_lock lock(mutex_);
    fd_ = fd;
    is_connected_ = fd >= 0;
    while (!is_aborted_) {
      if (started_.empty() || error_ != kSuccess) {
        changed_.wait(lock);
        continue;
      }
      const std::shared_ptr<Movement> movement = started_.front();
      started_.pop_front();
      lock.unlock();
      const Result result = movement->is_send ? Send(*movement) : Receive(*movement);
      lock.lock();
      if (result == kSuccess) {
        movement->is_over = true;
      } else {
        error_ = result;  // and the stream waits for ever
      }
    }
  }

  Result Send(const Movement& movement) {
    if (InjectedOf("die") != 0) kill(getpid(), SIGKILL);
    if (const int delay_ms = InjectedOf("delay")) poll(nullptr, 0, delay_ms);
    if (InjectedOf("stall") != 0) {
      while (!IsAborted()) poll(nullptr, 0, 1);
      return kSystemError;
    }
    std::vector<uint8_t> bytes(movement.memory, movement.memory + movement.size_bytes);
    if (InjectedOf("flip") != 0) bytes[bytes.size() / 2] ^= 0x10;
    if (!Write(&movement.size_bytes, sizeof(movement.size_bytes))) return kRemoteError;
    if (InjectedOf("cut") != 0) {
      Write(bytes.data(), bytes.size() / 2);
      shutdown(fd_, SHUT_RDWR);
      return kSystemError;
    }
    return Write(bytes.data(), bytes.size()) ? kSuccess : kRemoteError;
  }

  Result Receive(const Movement& movement) {
    uint64_t size_bytes = 0;
    if (!Read(&size_bytes, sizeof(size_bytes))) return kRemoteError;
    if (size_bytes != movement.size_bytes) return kInvalidUsage;
    return Read(movement.memory, size_bytes) ? kSuccess : kRemoteError;
  }

  bool Write(const void* bytes, size_t size) {
    const auto* at = static_cast<const uint8_t*>(bytes);
    while (size > 0) {
      const ssize_t done = send(fd_, at, size, MSG_NOSIGNAL);
      if (done <= 0) return false;
      at += done;
      size -= static_cast<size_t>(done);
    }
    return true;
  }
  bool Read(void* bytes, size_t size) {
    auto* at = static_cast<uint8_t*>(bytes);
    while (size > 0) {
      const ssize_t done = recv(fd_, at, size, 0);
      if (done <= 0) return false;
      at += done;
      size -= static_cast<size_t>(done);
    }
    return true;
  }

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Movement>> started_;
  std::vector<std::weak_ptr<Movement>> all_;
  int fd_ = -1;
  Result error_ = kSuccess;
  bool is_connected_ = false;
  std::shared_ptr<Movement> taken_;  // and not on its stream yet
  bool is_aborted_ = false;
};

Link* Of(Comm comm) { return reinterpret_cast<std::shared_ptr<Link>*>(comm)->get(); }

Result Move(bool is_send, void* memory, size_t count, DataType type, int peer, Comm comm,
            CUstream_st* stream) {
  if (const int injected = InjectedOf(is_send ? "ncclSend" : "ncclRecv")) return injected;
  if (type != kUint8 || (peer != 0 && peer != 1)) return kInvalidArgument;
  const auto movement = std::make_shared<Movement>();
  movement->is_send = is_send;
  movement->memory = static_cast<uint8_t*>(memory);
  movement->size_bytes = count;
  movement->stream = stream;
  const int64_t now =
      bytes_now.fetch_add(static_cast<int64_t>(count)) + static_cast<int64_t>(count);
  int64_t peak = bytes_peak.load();
  while (now > peak && !bytes_peak.compare_exchange_weak(peak, now)) {
  }
  return Of(comm)->Queue(movement);
}

}  // namespace
}  // namespace certkv::nccl

using namespace certkv::nccl;  // NOLINT: what follows is C

extern "C" {

Result ncclGetVersion(int* version) {
  if (const int injected = InjectedOf("ncclGetVersion")) return injected;
  const int said = InjectedOf("version");
  *version = said != 0 ? said : 22809;
  return kSuccess;
}

#if !defined(CERTKV_STUB_LACKS_ERROR_STRING)
const char* ncclGetErrorString(Result result) {
  return result == kRemoteError ? "remote process exited or there was a network error"
                                : "an error of the stub";
}
#endif

Result ncclGetUniqueId(UniqueId* id) {
  if (const int injected = InjectedOf("ncclGetUniqueId")) return injected;
  std::random_device random;
  std::ostringstream name;
  name << "certkv-stub-nccl-" << getpid() << "-" << random() << "-" << random();
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_un address = AddressOf(name.str().c_str());
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd, 1) != 0) {
    close(fd);
    return kSystemError;
  }
  const std::lock_guard lock(listeners_mutex);
  listeners[name.str()] = fd;
  std::memset(id, 0, sizeof(*id));
  std::strncpy(id->bytes, name.str().c_str(), sizeof(id->bytes) - 1);
  return kSuccess;
}

Result ncclCommInitRankConfig(Comm* comm, int rank_count, UniqueId id, int rank, Config* config) {
  if (const int injected = InjectedOf("ncclCommInitRankConfig")) return injected;
  const bool is_nonblocking = config != nullptr && config->magic == 0xcafebeef &&
                              config->size >= sizeof(Config) && config->blocking == 0;
  if (rank_count != 2 || !is_nonblocking) return kInvalidArgument;
  auto* const link = new std::shared_ptr<Link>(std::make_shared<Link>());
  (*link)->Begin(id.bytes, rank);
  *comm = reinterpret_cast<Comm>(link);
  return kInProgress;
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  if (const int injected = InjectedOf("ncclCommGetAsyncError")) return injected;
  *error = Of(comm)->State();
  if (*error == kSuccess) *error = InjectedOf("async");
  return kSuccess;
}

Result ncclCommAbort(Comm comm) {
  Of(comm)->Abort();
  delete reinterpret_cast<std::shared_ptr<Link>*>(comm);
  return kSuccess;
}

Result ncclSend(const void* memory, size_t count, DataType type, int peer, Comm comm,
                CUstream_st* stream) {
  return Move(true, const_cast<void*>(memory), count, type, peer, comm, stream);
}

Result ncclRecv(void* memory, size_t count, DataType type, int peer, Comm comm,
                CUstream_st* stream) {
  return Move(false, memory, count, type, peer, comm, stream);
}

// The most bytes that were under way in this process; begins anew.
int64_t stub_nccl_take_peak_bytes() { return bytes_peak.exchange(0); }

}  // extern "C"
