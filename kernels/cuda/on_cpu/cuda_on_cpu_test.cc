// The language that kernels are executed in: what it does, and that kernels broken on purpose are
// found.
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device.h"

namespace certkv::cuda {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

#ifdef __SANITIZE_ADDRESS__
constexpr bool kHasAddressSanitizer = true;
#else
constexpr bool kHasAddressSanitizer = false;
#endif
#ifdef __SANITIZE_THREAD__
constexpr bool kHasThreadSanitizer = true;
#else
constexpr bool kHasThreadSanitizer = false;
#endif

constexpr uint64_t kSeeds[] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr unsigned kAll = ~0u;

class CudaOnCpuTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  void TearDown() override { cuda_on_cpu::SetScheduleSeed(0); }

  // The error of a launch that must fail.
  template <typename... Parameters, typename... Arguments>
  static std::string Failure(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                             const Arguments&... arguments) {
    const cudaError_t error = LaunchKernel(kernel, grid, block, 0, nullptr, arguments...);
    EXPECT_EQ(error, cudaErrorLaunchFailure);
    return cudaGetErrorString(error);
  }
};

__global__ void WriteIndices(uint32_t* out) {
  const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}

TEST_F(CudaOnCpuTest, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<uint32_t> out(24 * 105, 0);
  ASSERT_EQ(LaunchKernel(WriteIndices, dim3(2, 3, 4), dim3(5, 7, 3), 0, nullptr, out.data()),
            cudaSuccess);
  for (uint32_t n = 0; n < out.size(); ++n) EXPECT_EQ(out[n], n / 105 * 1000 + n % 105);
}

TEST_F(CudaOnCpuTest, RefusesLaunchesThatAGpuRefuses) {
  uint32_t out = 0;
  for (const dim3 block : {dim3(1025), dim3(0), dim3(32, 33)}) {
    EXPECT_NE(LaunchKernel(WriteIndices, dim3(1), block, 0, nullptr, &out), cudaSuccess);
  }
  EXPECT_NE(LaunchKernel(WriteIndices, dim3(0), dim3(1), 0, nullptr, &out), cudaSuccess);
  constexpr size_t kTooMuch = cuda_on_cpu::kSharedBytesDefaultMax + 16;
  EXPECT_EQ(LaunchKernel(WriteIndices, dim3(1), dim3(1), kTooMuch, nullptr, &out),
            cudaErrorInvalidConfiguration);
  EXPECT_EQ(out, 0u);
  ASSERT_EQ(
      cudaFuncSetAttribute(WriteIndices, cudaFuncAttributeMaxDynamicSharedMemorySize, kTooMuch),
      cudaSuccess);
  EXPECT_EQ(LaunchKernel(WriteIndices, dim3(1), dim3(1), kTooMuch, nullptr, &out), cudaSuccess);
  EXPECT_NE(cudaFuncSetAttribute(WriteIndices, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 cuda_on_cpu::kSharedBytesMax + 1),
            cudaSuccess);
}

__global__ void AddTo(int* sum, int amount) { *sum += amount; }

// A stream whose capture a test ends in any case.
class CapturingStream {
 public:
  CapturingStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  }
  ~CapturingStream() {
    if (!has_ended_) End();
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  CapturingStream(const CapturingStream&) = delete;
  CapturingStream& operator=(const CapturingStream&) = delete;

  cudaError_t End() {
    has_ended_ = true;
    return cudaStreamEndCapture(stream_, &graph_);
  }
  cudaStream_t get() const { return stream_; }
  cudaGraph_t graph() const { return graph_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  bool has_ended_ = false;
};

TEST_F(CudaOnCpuTest, CapturedLaunchesRunWhenTheirGraphDoes) {
  int sum = 0;
  CapturingStream stream;
  for (const int amount : {1, 10}) {
    EXPECT_EQ(LaunchKernel(AddTo, dim3(1), dim3(1), 0, stream.get(), &sum, amount), cudaSuccess);
  }
  ASSERT_EQ(stream.End(), cudaSuccess);
  EXPECT_EQ(sum, 0);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, stream.graph()), cudaSuccess);
  for (const int expected : {11, 22}) {
    EXPECT_EQ(cudaGraphLaunch(exec, stream.get()), cudaSuccess);
    EXPECT_EQ(sum, expected);
  }
  cudaGraphExecDestroy(exec);
}

TEST_F(CudaOnCpuTest, CaptureEndsWithWhatAGraphCannotHold) {
  int sum = 0;
  void* const memory = std::malloc(8);
  const std::vector<std::pair<const char*, std::function<cudaError_t()>>> calls = {
      {"cudaMalloc",
       [] {
         void* address = nullptr;
         return cudaMalloc(&address, 8);
       }},
      {"cudaFree", [&] { return cudaFree(memory); }},
      {"cudaStreamSynchronize", [] { return cudaStreamSynchronize(nullptr); }},
      {"cudaMemcpyAsync on the default stream",
       [&] { return cudaMemcpyAsync(&sum, &sum, 4, cudaMemcpyHostToDevice, nullptr); }},
      {"a launch on the default stream",
       [&] { return LaunchKernel(AddTo, dim3(1), dim3(1), 0, nullptr, &sum, 1); }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    CapturingStream stream;
    EXPECT_THAT(call(),
                testing::AnyOf(cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureImplicit));
    EXPECT_EQ(LaunchKernel(AddTo, dim3(1), dim3(1), 0, stream.get(), &sum, 1),
              cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(stream.End(), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(stream.graph(), nullptr);
  }
  EXPECT_EQ(sum, 0);
}

TEST_F(CudaOnCpuTest, InjectedFailureIsThatOfTheCallAskedFor) {
  int sum = 0;
  const auto launch = [&] { return LaunchKernel(AddTo, dim3(1), dim3(1), 0, nullptr, &sum, 1); };
  cuda_on_cpu::InjectFailure(cuda_on_cpu::RuntimeCall::kLaunch, 1, cudaErrorLaunchFailure);
  EXPECT_EQ(launch(), cudaSuccess);
  EXPECT_EQ(launch(), cudaErrorLaunchFailure);
  EXPECT_EQ(launch(), cudaSuccess);
  EXPECT_EQ(sum, 2);
}

// Which of the barriers of Reverse is left out.
enum Missing { kNone, kFirst, kSecond };

// Reverses the block's numbers twice, through both kinds of shared memory.
template <Missing missing>
__global__ void Reverse(const int* in, int* out) {
  CERTKV_DYNAMIC_SHARED(bytes);
  CERTKV_SHARED(int[96], second);
  int* const first = reinterpret_cast<int*>(bytes);
  const uint32_t last = blockDim.x - 1;
  const uint32_t base = blockIdx.x * blockDim.x;
  first[threadIdx.x] = in[base + threadIdx.x];
  if (missing != kFirst) __syncthreads();
  second[last - threadIdx.x] = first[threadIdx.x / 2 * 2 + (threadIdx.x + 1) % 2];
  if (missing != kSecond) __syncthreads();
  out[base + threadIdx.x] = second[last - (threadIdx.x + 48) % 96];
}

template <Missing missing>
std::vector<int> RunReverse(uint64_t seed) {
  cuda_on_cpu::SetScheduleSeed(seed);
  std::vector<int> in(96 * 5);
  std::iota(in.begin(), in.end(), 0);
  std::vector<int> out(in.size(), -1);
  EXPECT_EQ(LaunchKernel(Reverse<missing>, dim3(5), dim3(96), 96 * sizeof(int), nullptr, in.data(),
                         out.data()),
            cudaSuccess);
  return out;
}

TEST_F(CudaOnCpuTest, BarriersOrderSharedMemoryUnderEverySchedule) {
  for (const uint64_t seed : kSeeds) {
    const std::vector<int> out = RunReverse<kNone>(seed);
    for (int n = 0; n < static_cast<int>(out.size()); ++n) {
      const int from = (n % 96 + 48) % 96;
      ASSERT_EQ(out[n], n / 96 * 96 + (from ^ 1)) << "seed " << seed;
    }
  }
}

TEST_F(CudaOnCpuTest, MissingBarrierShowsUnderSomeSchedule) {
  if (kHasThreadSanitizer) GTEST_SKIP() << "needs a build where a race doesn't end the program";
  int wrong_first = 0;
  int wrong_second = 0;
  for (const uint64_t seed : kSeeds) {
    const std::vector<int> right = RunReverse<kNone>(seed);
    wrong_first += RunReverse<kFirst>(seed) != right ? 1 : 0;
    wrong_second += RunReverse<kSecond>(seed) != right ? 1 : 0;
  }
  EXPECT_GT(wrong_first, 0);
  EXPECT_GT(wrong_second, 0);
}

// The report sets the exit code when the program ends.
constexpr int kRaceExitCode = 66;

TEST_F(CudaOnCpuTest, ThreadSanitizerReportsAMissingBarrier) {
  if (!kHasThreadSanitizer) GTEST_SKIP() << "needs the preset tsan";
  EXPECT_EXIT((RunReverse<kFirst>(0), std::exit(0)), testing::ExitedWithCode(kRaceExitCode),
              "data race");
  EXPECT_EXIT((RunReverse<kSecond>(0), std::exit(0)), testing::ExitedWithCode(kRaceExitCode),
              "data race");
}

template <bool kIsOrdered>
__global__ void PassThroughSharedInAWarp(int* out) {
  CERTKV_SHARED(int[32], cell);
  cell[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kIsOrdered) __syncwarp();
  // A shuffle brings lanes together, and orders no memory.
  const int other = __shfl_xor_sync(kAll, static_cast<int>(threadIdx.x), 1);
  out[threadIdx.x] = cell[other];
}

template <bool kIsOrdered>
std::vector<int> RunPassThrough() {
  std::vector<int> out(32);
  EXPECT_EQ(
      LaunchKernel(PassThroughSharedInAWarp<kIsOrdered>, dim3(1), dim3(32), 0, nullptr, out.data()),
      cudaSuccess);
  return out;
}

TEST_F(CudaOnCpuTest, SyncWarpOrdersSharedMemory) {
  const std::vector<int> out = RunPassThrough<true>();
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[lane], lane ^ 1);
}

TEST_F(CudaOnCpuTest, ThreadSanitizerReportsAMissingSyncWarp) {
  if (!kHasThreadSanitizer) GTEST_SKIP() << "needs the preset tsan";
  EXPECT_EXIT((RunPassThrough<false>(), std::exit(0)), testing::ExitedWithCode(kRaceExitCode),
              "data race");
}

template <bool kIsAtomic>
__global__ void CountThreads(int* count) {
  if (kIsAtomic) {
    atomicAdd(count, 1);
  } else if (threadIdx.x == 0) {
    *count += 1;
  }
}

void RunCountWithoutAtomic() {
  int count = 0;
  LaunchKernel(CountThreads<false>, dim3(2), dim3(32), 0, nullptr, &count);
}

TEST_F(CudaOnCpuTest, ThreadSanitizerReportsARaceBetweenBlocks) {
  if (!kHasThreadSanitizer) GTEST_SKIP() << "needs the preset tsan";
  EXPECT_EXIT((RunCountWithoutAtomic(), std::exit(0)), testing::ExitedWithCode(kRaceExitCode),
              "data race");
}

TEST_F(CudaOnCpuTest, AtomicsCountEveryThreadOfEveryBlock) {
  int count = 0;
  ASSERT_EQ(LaunchKernel(CountThreads<true>, dim3(9), dim3(70), 0, nullptr, &count), cudaSuccess);
  EXPECT_EQ(count, 630);
}

__global__ void ChangeAtomically(int* cells) {
  const int own = static_cast<int>(threadIdx.x);
  atomicMax(&cells[0], own);
  atomicMin(&cells[1], own);
  if (own == 40) atomicExch(&cells[2], 77);
  atomicCAS(&cells[3], -1, 5);
  atomicCAS(&cells[3], -1, 6);
  atomicAdd(reinterpret_cast<float*>(&cells[4]), 0.5f);
}

TEST_F(CudaOnCpuTest, AtomicsChangeTheirWord) {
  std::vector<int> cells = {-5, 100, 0, -1, 0};
  ASSERT_EQ(LaunchKernel(ChangeAtomically, dim3(1), dim3(64), 0, nullptr, cells.data()),
            cudaSuccess);
  EXPECT_THAT(cells, testing::ElementsAre(63, 0, 77, 5, std::bit_cast<int>(32.0f)));
}

__global__ void ShuffleAll(int* out) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int* const row = out + threadIdx.x * 5;
  row[0] = __shfl_sync(kAll, lane, 7);
  row[1] = __shfl_xor_sync(kAll, lane, 5);
  row[2] = __shfl_down_sync(kAll, lane, 3, 16);
  row[3] = __shfl_up_sync(kAll, lane, 3, 8);
  row[4] = __shfl_sync(kAll, lane, 2, 8);
}

TEST_F(CudaOnCpuTest, ShufflesTakeTheirLanesValue) {
  for (const uint64_t seed : kSeeds) {
    cuda_on_cpu::SetScheduleSeed(seed);
    std::vector<int> out(64 * 5, -1);
    ASSERT_EQ(LaunchKernel(ShuffleAll, dim3(1), dim3(64), 0, nullptr, out.data()), cudaSuccess);
    for (int n = 0; n < 64; ++n) {
      const int lane = n % 32;
      const std::vector<int> row(&out[5 * n], &out[5 * n] + 5);
      EXPECT_THAT(row, testing::ElementsAre(7, lane ^ 5, lane % 16 < 13 ? lane + 3 : lane,
                                            lane % 8 >= 3 ? lane - 3 : lane, lane / 8 * 8 + 2));
    }
  }
}

// Halves of a warp that part and meet among themselves; and a last warp that isn't full.
__global__ void MeetInHalves(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
  unsigned value = threadIdx.x;
  if (lane < 16) {
    value += __shfl_xor_sync(mask, value, 8, 16);
    __syncwarp(mask);
  } else {
    value = __ballot_sync(mask, lane % 3 == 0);
  }
  __syncwarp();
  out[threadIdx.x] = value + (__all_sync(kAll, lane < 40) ? 1000u : 0u) +
                     (__any_sync(kAll, lane == 31) ? 2000u : 0u);
}

TEST_F(CudaOnCpuTest, VotesAndDisjointMasksMeetTheirOwnLanes) {
  std::vector<unsigned> out(52);
  ASSERT_EQ(LaunchKernel(MeetInHalves, dim3(1), dim3(52), 0, nullptr, out.data()), cudaSuccess);
  constexpr unsigned kThirds = 0x49240000u;  // lanes 18, 21, 24, 27 and 30
  EXPECT_EQ(out[3], 3u + 11u + 3000u);
  EXPECT_EQ(out[20], kThirds + 3000u);
  EXPECT_EQ(out[32 + 3], 35u + 43u + 1000u);  // the last warp has no lane 31
  EXPECT_EQ(out[32 + 17], (kThirds & 0xfffffu) + 1000u);
}

__global__ void ReadUnwritten(float* out) {
  CERTKV_SHARED(float[32], fixed);
  CERTKV_DYNAMIC_SHARED(bytes);
  out[32 * blockIdx.x + threadIdx.x] =
      fixed[threadIdx.x] + reinterpret_cast<float*>(bytes)[threadIdx.x];
  fixed[threadIdx.x] = 0;
  reinterpret_cast<float*>(bytes)[threadIdx.x] = 0;
}

TEST_F(CudaOnCpuTest, SharedMemoryBeginsAsNanInEveryBlock) {
  for (int launch = 0; launch < 3; ++launch) {
    std::vector<float> out(4 * 32, 0.0f);
    ASSERT_EQ(LaunchKernel(ReadUnwritten, dim3(4), dim3(32), 128, nullptr, out.data()),
              cudaSuccess);
    EXPECT_THAT(out, Each(testing::IsNan()));
  }
}

__global__ void WriteBesideDynamicShared() {
  CERTKV_DYNAMIC_SHARED(bytes);
  bytes[threadIdx.x + 1] = 1;
}

__global__ void WriteBesideStaticShared(int index) {
  CERTKV_SHARED(int[8], cells);
  if (threadIdx.x == 0) cells[index] = 1;
}

__global__ void WriteBesideGlobal(int* out) { out[threadIdx.x + 1] = 1; }

void LaunchWriteBesideGlobal() {
  void* cells = nullptr;
  EXPECT_EQ(cudaMalloc(&cells, 32 * sizeof(int)), cudaSuccess);
  LaunchKernel(WriteBesideGlobal, dim3(1), dim3(32), 0, nullptr, static_cast<int*>(cells));
  cudaFree(cells);
}

TEST_F(CudaOnCpuTest, AddressSanitizerStopsWritesBesideMemory) {
  if (!kHasAddressSanitizer) GTEST_SKIP() << "needs the preset asan";
  EXPECT_DEATH(LaunchKernel(WriteBesideDynamicShared, dim3(1), dim3(64), 64, nullptr),
               "heap-buffer-overflow");
  EXPECT_DEATH(LaunchKernel(WriteBesideStaticShared, dim3(1), dim3(64), 0, nullptr, 8),
               "heap-buffer-overflow|out of bounds");
  EXPECT_DEATH(LaunchWriteBesideGlobal(), "heap-buffer-overflow");
}

__global__ void WaitForBothWarps(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else if (threadIdx.x < 40) {
    out[threadIdx.x] = __shfl_sync(0x1ffu, 1, 0);
  }
}

__global__ void WaitAtDifferentPlaces(int* out) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    out[threadIdx.x] = __shfl_sync(kAll, 1, 0);
  }
}

__global__ void MeetInDifferentFunctions(int* out) {
  out[threadIdx.x] = threadIdx.x % 2 == 0 ? __shfl_sync(kAll, 1, 0) : __any_sync(kAll, 1);
}

__global__ void CallWithoutOwnLane(int* out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1, 0); }

TEST_F(CudaOnCpuTest, WhatAGpuWouldHangOnIsNamed) {
  std::vector<int> out(64);
  for (const uint64_t seed : kSeeds) {
    cuda_on_cpu::SetScheduleSeed(seed);
    EXPECT_THAT(Failure(WaitForBothWarps, dim3(1), dim3(64), out.data()),
                AllOf(HasSubstr("block 0"), HasSubstr("exit")));
    EXPECT_THAT(Failure(WaitAtDifferentPlaces, dim3(1), dim3(64), out.data()),
                AllOf(HasSubstr("deadlock: 32 threads wait at __syncthreads, 32 in warp functions"),
                      HasSubstr("waits for lanes 0x55555555")));
    EXPECT_THAT(Failure(MeetInDifferentFunctions, dim3(1), dim3(32), out.data()),
                HasSubstr("another warp function"));
    EXPECT_THAT(Failure(CallWithoutOwnLane, dim3(1), dim3(32), out.data()),
                HasSubstr("doesn't have its lane"));
  }
}

TEST_F(CudaOnCpuTest, ExitedThreadsDoNotHoldABarrier) {
  struct Kernel {
    static __global__ void Run(int* out) {
      if (threadIdx.x >= 40) return;
      __syncthreads();
      out[threadIdx.x] = 1;
    }
  };
  std::vector<int> out(64, 0);
  ASSERT_EQ(LaunchKernel(Kernel::Run, dim3(1), dim3(64), 0, nullptr, out.data()), cudaSuccess);
  EXPECT_EQ(std::count(out.begin(), out.end(), 1), 40);
}

TEST_F(CudaOnCpuTest, LaunchesAfterAFailedOneAreWhole) {
  std::vector<int> cells(64);
  for (int n = 0; n < 3; ++n) {
    Failure(WaitAtDifferentPlaces, dim3(1), dim3(64), cells.data());
    std::vector<uint32_t> out(6 * 96, 0);
    ASSERT_EQ(LaunchKernel(WriteIndices, dim3(6), dim3(96), 0, nullptr, out.data()), cudaSuccess);
    for (uint32_t k = 0; k < out.size(); ++k) ASSERT_EQ(out[k], k / 96 * 1000 + k % 96);
  }
}

__global__ void FailInSecondBlock(int* out) {
  if (blockIdx.x == 1 && threadIdx.x == 3) return;
  out[threadIdx.x + 32 * blockIdx.x] = __shfl_sync(kAll, 1, 0);
}

TEST_F(CudaOnCpuTest, FailureOfAnyBlockFailsTheLaunch) {
  std::vector<int> out(5 * 32);
  EXPECT_THAT(Failure(FailInSecondBlock, dim3(5), dim3(32), out.data()),
              AllOf(HasSubstr("block 1"), HasSubstr("thread 3 exits")));
}

}  // namespace
}  // namespace certkv::cuda
