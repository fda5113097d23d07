// Streams and events: lazy, so that nothing is done before
// somebody waits for it.
#include <atomic>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cuda/on_cpu/sharing/foreign_work.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/cuda/on_cpu/sharing/shared_object.h"

namespace certkv::cuda_sharing {

struct Stream {
  std::mutex mutex;
  // Each is called until it says something else than cudaErrorNotReady.
  std::list<std::function<cudaError_t()>> queue;

  void Add(std::function<cudaError_t()> work) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
  }
  // The first error; what comes after it is not done, as on a device that is lost.
  cudaError_t Run() {
    // Locked to the end: another thread that waits has waited only when all is done.
    const std::lock_guard lock(mutex);
    while (true) {
      const cudaError_t error = DoWhatIsReady();
      if (error != cudaErrorNotReady) return error;
      std::this_thread::yield();
    }
  }
  cudaError_t Poll() {
    const std::unique_lock lock(mutex, std::try_to_lock);
    return lock.owns_lock() ? DoWhatIsReady() : cudaErrorNotReady;
  }

 private:
  cudaError_t DoWhatIsReady() {
    while (!queue.empty()) {
      const cudaError_t error = queue.front()();
      if (error == cudaErrorNotReady) return error;
      queue.pop_front();
      if (error == cudaSuccess) continue;
      queue.clear();
      return error;
    }
    return cudaSuccess;
  }
};

struct Event {
  // Counts, in memory that processes share.
  struct Counts {
    std::atomic<uint64_t> recorded;
    std::atomic<uint64_t> done;
  };
  SharedObject object;
  std::atomic<cudaStream_t> recorder{nullptr};  // where this process recorded it last

  Counts& counts() const { return *static_cast<Counts*>(object.address); }
  bool HasHappened(uint64_t count) const {
    return counts().done.load(std::memory_order_acquire) >= count;
  }
  // Does what this process has queued before it, or waits a while for the process that has.
  cudaError_t WaitUntil(uint64_t count) const {
    constexpr int kYieldsMax = 2'000'000;  // a second or more
    cudaStream_t const stream = recorder.load();
    if (!HasHappened(count) && stream != nullptr) {
      const cudaError_t error = stream->Run();
      if (error != cudaSuccess) return error;
    }
    for (int i = 0; i < kYieldsMax && !HasHappened(count); ++i) std::this_thread::yield();
    return HasHappened(count) ? cudaSuccess : cudaErrorTimeout;
  }
};

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (const auto injected = InjectedFailureOf("cudaMemcpyAsync")) return injected;
  const auto copy = [to, from, size_bytes] {
    if (size_bytes > 0) std::memcpy(to, from, size_bytes);
    return cudaSuccess;
  };
  if (stream == nullptr) return copy();
  stream->Add(copy);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int byte, size_t size_bytes, cudaStream_t stream) {
  if (const auto injected = InjectedFailureOf("cudaMemsetAsync")) return injected;
  const auto set = [address, byte, size_bytes] {
    std::memset(address, byte, size_bytes);
    return cudaSuccess;
  };
  if (stream == nullptr) return set();
  stream->Add(set);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  if (const auto injected = InjectedFailureOf("cudaStreamCreateWithFlags")) return injected;
  *stream = new Stream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = stream->Run();
  delete stream;
  return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto injected = InjectedFailureOf("cudaStreamSynchronize")) {
    if (stream != nullptr) {
      const std::lock_guard lock(stream->mutex);
      stream->queue.clear();
    }
    return injected;
  }
  return stream == nullptr ? cudaSuccess : stream->Run();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const auto injected = InjectedFailureOf("cudaStreamQuery")) return injected;
  return stream->Poll();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  if (const auto injected = InjectedFailureOf("cudaStreamWaitEvent")) return injected;
  const uint64_t count = event->counts().recorded.load(std::memory_order_acquire);
  const auto wait = [event, count] { return event->WaitUntil(count); };
  if (stream == nullptr) return wait();
  stream->Add(wait);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  if (const auto injected = InjectedFailureOf("cudaEventCreateWithFlags")) return injected;
  const SharedObject object = SharedObject::Create(4096);
  if (object.address == nullptr) return cudaErrorMemoryAllocation;
  *event = new Event;
  (*event)->object = object;
  new (object.address) Event::Counts{};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  event->object.Destroy();
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const auto injected = InjectedFailureOf("cudaEventRecord")) return injected;
  const uint64_t count = event->counts().recorded.fetch_add(1) + 1;
  const auto happen = [event, count] {
    event->counts().done.store(count, std::memory_order_release);
    return cudaSuccess;
  };
  event->recorder = stream;
  if (stream == nullptr) return happen();
  stream->Add(happen);
  return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  if (const auto injected = InjectedFailureOf("cudaIpcGetEventHandle")) return injected;
  event->object.WriteHandle(handle->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  if (const auto injected = InjectedFailureOf("cudaIpcOpenEventHandle")) return injected;
  SharedObject object;
  const cudaError_t error = SharedObject::Open(handle.reserved, &object);
  if (error != cudaSuccess) return error;
  *event = new Event;
  (*event)->object = object;
  return cudaSuccess;
}

}  // namespace certkv::cuda_sharing

void certkv_sharing_queue(void* stream, int (*poll)(void*), void (*release)(void*),
                          void* argument) {
  const std::shared_ptr<void> kept(argument, release);
  static_cast<certkv::cuda_sharing::Stream*>(stream)->Add(
      [poll, kept] { return static_cast<certkv::cuda_sharing::cudaError_t>(poll(kept.get())); });
}
