// Runs CUDA kernels on CPU threads: every CUDA thread is a fiber, a block runs on one OS thread.
//
// What a kernel sees of it is cuda_language.h. Here are the parts that don't depend on the kernel:
// the fibers of a block and where they wait for each other.
//
// Threads of one block take turns, in an order that the seed varies; nobody runs until what he
// waits for has happened, so a kernel that waits for what can't happen is found at once and named.
// Under ThreadSanitizer every CUDA thread is a thread of its own, ordered with others by what
// orders them on a GPU: __syncthreads, __syncwarp, the begin and the end of the launch. A missing
// barrier is therefore reported as a data race, whatever the order. Blocks with an even and an odd
// number run on two OS threads, which nothing orders, so that neighbours that touch the same memory
// are a race as well.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_BLOCK_RUNNER_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_BLOCK_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace certkv::cuda_on_cpu {

inline constexpr uint32_t kWarpLanes = 32;
inline constexpr uint32_t kBlockThreadsMax = 1024;

struct Size3 {
  uint32_t x = 1;
  uint32_t y = 1;
  uint32_t z = 1;

  uint64_t count() const { return uint64_t{x} * y * z; }
};

// One launch: `run(argument)` is the kernel, called once by every thread.
struct GridLaunch {
  Size3 grid;
  Size3 block;              // at most kBlockThreadsMax threads
  size_t shared_bytes = 0;  // dynamic shared memory; every block's begins as bytes of 0xff (NaN)
  void (*run)(void*) = nullptr;
  void* argument = nullptr;
};

// Runs all blocks; one launch of the process at a time, others wait. Empty, or what a block did
// wrong; then later blocks were left out and the others' results say nothing.
std::string RunGrid(const GridLaunch& launch);

// Order in which threads take turns, from the next launch on. 0: by number.
void SetScheduleSeed(uint64_t seed);

// ---- Called by the threads of a running block.

// Where lanes of a warp meet.
enum class Collective : uint8_t { kSyncWarp, kShuffle, kVote };

// What the lanes of a warp brought, valid until LeaveWarp.
struct WarpValues {
  uint64_t value[kWarpLanes];
  uint32_t arrived;  // bit per lane
};

void SyncThreads();
// Waits until every lane of `mask` has arrived with the same mask and collective.
const WarpValues& ArriveInWarp(Collective collective, uint32_t mask, uint64_t value);
void LeaveWarp();
uint32_t LaneIndex();
uint8_t* DynamicSharedMemory();
// The block's memory for one variable, bytes of 0xff when its first thread asks. `tag` is unique to
// the variable.
void* StaticSharedMemory(const void* tag, size_t size_bytes);

}  // namespace certkv::cuda_on_cpu

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_BLOCK_RUNNER_H_
