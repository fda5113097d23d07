// Device memory across processes, streams and events, and every failure that CUDA has for them: the
// source that runs on GPUs, over on_cpu's CUDA.
#include "kernels/cuda/device_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/sharing/foreign_work.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/device.h"

namespace certkv::cuda {
namespace {

using cuda_sharing::InjectFailures;

constexpr int64_t kBytes = 3 * 4096;

class DeviceRuntimeTest : public ::testing::Test {
 protected:
  ~DeviceRuntimeTest() override {
    InjectFailures("");
    RegisterDeviceRuntime(nullptr);
    RegisterDevice(nullptr);
  }

  // Exit status of a child that runs `body`: 0 when it says so.
  static int RunInChild(const std::function<bool()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(body() ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  CudaDeviceRuntime runtime_;
};

std::vector<uint8_t> Pattern() {
  std::vector<uint8_t> bytes(kBytes);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7 + 1);
  return bytes;
}

TEST_F(DeviceRuntimeTest, CopiesThereAndBackWhenWaitedFor) {
  auto* const memory = static_cast<uint8_t*>(*runtime_.Allocate(0, kBytes));
  CUstream_st* const stream = *runtime_.CreateStream(0);
  const std::vector<uint8_t> bytes = Pattern();
  ASSERT_TRUE(runtime_.CopyToDevice(memory, bytes.data(), kBytes, stream).ok());
  EXPECT_NE(std::memcmp(memory, bytes.data(), kBytes), 0) << "a copy is queued, not done";
  ASSERT_TRUE(runtime_.Wait(stream).ok());
  std::vector<uint8_t> back(kBytes);
  ASSERT_TRUE(runtime_.CopyToHost(back.data(), memory, kBytes, stream).ok());
  ASSERT_TRUE(runtime_.Wait(stream).ok());
  EXPECT_EQ(back, bytes);
  runtime_.DestroyStream(stream);
  runtime_.Free(memory);
}

TEST_F(DeviceRuntimeTest, StreamIsDoneWhenWhatOthersQueuedIsDone) {
  struct Work {
    bool is_done = false;
    bool is_released = false;
  } work;
  CUstream_st* const stream = *runtime_.CreateStream(0);
  EXPECT_TRUE(*runtime_.IsDone(stream));
  certkv_sharing_queue(
      stream,
      [](void* argument) -> int {
        return static_cast<Work*>(argument)->is_done ? cuda_sharing::cudaSuccess
                                                     : cuda_sharing::cudaErrorNotReady;
      },
      [](void* argument) { static_cast<Work*>(argument)->is_released = true; }, &work);
  const uint8_t byte = 7;
  uint8_t copied = 0;
  ASSERT_TRUE(runtime_.CopyToHost(&copied, &byte, 1, stream).ok());
  EXPECT_FALSE(*runtime_.IsDone(stream));
  EXPECT_EQ(copied, 0) << "it comes after what isn't done";
  work.is_done = true;
  EXPECT_TRUE(*runtime_.IsDone(stream));
  EXPECT_EQ(copied, 7);
  EXPECT_TRUE(work.is_released);
  runtime_.DestroyStream(stream);
}

TEST_F(DeviceRuntimeTest, StreamGoesOnAfterTheEventOfAnother) {
  auto* const memory = static_cast<uint8_t*>(*runtime_.Allocate(0, kBytes));
  CUstream_st* const first = *runtime_.CreateStream(0);
  CUstream_st* const second = *runtime_.CreateStream(0);
  CUevent_st* const event = *runtime_.CreateEvent(0);
  const std::vector<uint8_t> bytes = Pattern();
  std::vector<uint8_t> back(kBytes);
  ASSERT_TRUE(runtime_.CopyToDevice(memory, bytes.data(), kBytes, first).ok());
  ASSERT_TRUE(runtime_.RecordEvent(event, first).ok());
  ASSERT_TRUE(runtime_.QueueWait(second, event).ok());
  ASSERT_TRUE(runtime_.CopyToHost(back.data(), memory, kBytes, second).ok());
  ASSERT_TRUE(runtime_.Wait(second).ok());
  EXPECT_EQ(back, bytes);
  runtime_.DestroyEvent(event);
  runtime_.DestroyStream(first);
  runtime_.DestroyStream(second);
  runtime_.Free(memory);
}

TEST_F(DeviceRuntimeTest, OtherProcessReadsWhatWasExported) {
  void* const memory = *runtime_.Allocate(0, kBytes);
  std::memcpy(memory, Pattern().data(), kBytes);
  const DeviceHandle handle = *runtime_.ExportMemory(memory);
  EXPECT_EQ(RunInChild([&handle] {
              CudaDeviceRuntime runtime;
              const auto opened = runtime.ImportMemory(0, handle);
              if (!opened.ok()) return false;
              const bool same = std::memcmp(*opened, Pattern().data(), kBytes) == 0;
              runtime.ReleaseMemory(*opened);
              return same;
            }),
            0);
  runtime_.Free(memory);
}

TEST_F(DeviceRuntimeTest, OtherProcessWaitsForAnExportedEvent) {
  CUevent_st* const event = *runtime_.CreateEvent(0);
  CUstream_st* const stream = *runtime_.CreateStream(0);
  const DeviceHandle handle = *runtime_.ExportEvent(event);
  const auto waits = [&handle](bool expected) {
    return RunInChild([&handle, expected] {
      CudaDeviceRuntime runtime;
      const auto opened = runtime.ImportEvent(0, handle);
      if (!opened.ok()) return false;
      CUstream_st* const own = *runtime.CreateStream(0);
      const bool waited = runtime.QueueWait(own, *opened).ok() && runtime.Wait(own).ok();
      runtime.DestroyEvent(*opened);
      return waited == expected;
    });
  };
  ASSERT_TRUE(runtime_.RecordEvent(event, stream).ok());
  EXPECT_EQ(waits(false), 0) << "nobody has done what the event stands for";
  ASSERT_TRUE(runtime_.Wait(stream).ok());
  EXPECT_EQ(waits(true), 0);
  runtime_.DestroyEvent(event);
  runtime_.DestroyStream(stream);
}

TEST_F(DeviceRuntimeTest, HandleOfAProcessThatEndedIsRefused) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  EXPECT_EQ(RunInChild([&pipe_fds] {
              CudaDeviceRuntime runtime;
              const DeviceHandle handle = *runtime.ExportMemory(*runtime.Allocate(0, kBytes));
              return write(pipe_fds[1], handle.data(), handle.size()) ==
                     static_cast<ssize_t>(handle.size());
            }),
            0);
  DeviceHandle handle{};
  ASSERT_EQ(read(pipe_fds[0], handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
  const auto opened = runtime_.ImportMemory(0, handle);
  EXPECT_TRUE(absl::IsFailedPrecondition(opened.status())) << opened.status();
  EXPECT_EQ(ReasonOf(opened.status()), "DEVICE_IMPORT_REFUSED");
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

TEST_F(DeviceRuntimeTest, OwnMemoryLivesUntilItsLastImportIsReleased) {
  auto* const memory = static_cast<uint8_t*>(*runtime_.Allocate(0, kBytes));
  const DeviceHandle handle = *runtime_.ExportMemory(memory);
  const auto imported = runtime_.ImportMemory(0, handle);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(*imported, memory);
  runtime_.Free(memory);
  memory[0] = 7;  // still mapped
  EXPECT_FALSE(runtime_.ImportMemory(0, handle).ok()) << "freed: nobody else is to have it";
  runtime_.ReleaseMemory(memory);
  EXPECT_DEATH(memory[0] = 8, "");
}

TEST_F(DeviceRuntimeTest, MemoryAfterAnExportableAllocationIsNotMapped) {
  auto* const memory = static_cast<volatile uint8_t*>(*runtime_.Allocate(0, kBytes));
  EXPECT_DEATH(memory[kBytes] = 1, "");
  runtime_.Free(const_cast<uint8_t*>(memory));
}

TEST_F(DeviceRuntimeTest, SaysWhatFailed) {
  struct Case {
    const char* failures;
    const char* reason;
    std::function<absl::Status()> call;
  };
  void* const memory = *runtime_.Allocate(0, kBytes);
  CUevent_st* const event = *runtime_.CreateEvent(0);
  CUstream_st* const stream = *runtime_.CreateStream(0);
  uint8_t byte = 0;
  const Case cases[] = {
      {"cudaGetDeviceCount=100", "DEVICE_MISSING", [&] { return runtime_.Devices().status(); }},
      {"cudaMalloc=2", "DEVICE_MEMORY_FULL", [&] { return runtime_.Allocate(0, 64).status(); }},
      {"*=214", "DEVICE_FAILED", [&] { return runtime_.Allocate(0, 64).status(); }},
      {"cudaIpcGetMemHandle=801", "DEVICE_IMPORT_REFUSED",
       [&] { return runtime_.ExportMemory(memory).status(); }},
      {"cudaIpcOpenMemHandle=205", "DEVICE_IMPORT_REFUSED",
       [&] { return runtime_.ImportMemory(0, {1}).status(); }},
      {"cudaIpcGetEventHandle=400", "DEVICE_IMPORT_REFUSED",
       [&] { return runtime_.ExportEvent(event).status(); }},
      {"cudaIpcOpenEventHandle=400", "DEVICE_IMPORT_REFUSED",
       [&] { return runtime_.ImportEvent(0, {1}).status(); }},
      {"cudaEventRecord=46", "DEVICE_FAILED", [&] { return runtime_.RecordEvent(event, stream); }},
      {"cudaStreamWaitEvent=46", "DEVICE_FAILED",
       [&] { return runtime_.QueueWait(stream, event); }},
      {"cudaMemcpyAsync=719", "DEVICE_FAILED",
       [&] { return runtime_.CopyToDevice(memory, &byte, 1, stream); }},
      {"cudaStreamSynchronize=719", "DEVICE_FAILED", [&] { return runtime_.Wait(stream); }},
      {"cudaStreamQuery=719", "DEVICE_FAILED", [&] { return runtime_.IsDone(stream).status(); }},
      {"cudaHostRegister=2", "DEVICE_MEMORY_FULL",
       [&] { return runtime_.PinHost(&byte, 1, DeviceRuntime::HostAccess::kReadOnly); }},
      {"cudaHostRegister=712", "DEVICE_FAILED",
       [&] { return runtime_.PinHost(&byte, 1, DeviceRuntime::HostAccess::kReadWrite); }},
      {"cudaDevAttrHostRegisterReadOnlySupported=1", "DEVICE_PIN_REFUSED",
       [&] { return runtime_.PinHost(&byte, 1, DeviceRuntime::HostAccess::kReadOnly); }},
      {"", "DEVICE_FAILED", [&] { return runtime_.AddressOfPinned(&byte).status(); }},
      {"cudaStreamCreateWithFlags=46", "DEVICE_FAILED",
       [&] { return runtime_.CreateStream(0).status(); }},
  };
  for (const Case& one : cases) {
    InjectFailures(one.failures);
    const absl::Status status = one.call();
    EXPECT_EQ(ReasonOf(status), one.reason) << one.failures << ": " << status;
    InjectFailures("");
  }
  EXPECT_EQ(ReasonOf(runtime_.Allocate(3, 64).status()), "DEVICE_FAILED") << "no such device";
  runtime_.DestroyEvent(event);
  runtime_.DestroyStream(stream);
  runtime_.Free(memory);
}

// As CUDA has it: a mapping that can't be written to is registered as read-only or not at all.
TEST_F(DeviceRuntimeTest, PinsMappingsThatItMayOnlyReadForReadingAlone) {
  const UniqueFd fd = *CreateMemfd("pinned", kBytes);
  const Mapping writer = *Mapping::Map(fd.get(), Mapping::Access::kReadWrite);
  const Mapping reader = *Mapping::Map(fd.get(), Mapping::Access::kReadOnly);
  EXPECT_FALSE(runtime_.PinHost(reader.data(), kBytes, DeviceRuntime::HostAccess::kReadWrite).ok());
  ASSERT_TRUE(runtime_.PinHost(reader.data(), kBytes, DeviceRuntime::HostAccess::kReadOnly).ok());
  EXPECT_FALSE(
      runtime_.PinHost(reader.data() + 4096, 4096, DeviceRuntime::HostAccess::kReadOnly).ok())
      << "pinned already";
  ASSERT_TRUE(runtime_.PinHost(writer.data(), kBytes, DeviceRuntime::HostAccess::kReadWrite).ok());
  writer.data()[5000] = 7;
  const auto* const on_device =
      static_cast<const volatile uint8_t*>(*runtime_.AddressOfPinned(reader.data() + 5000));
  EXPECT_NE(on_device, reader.data() + 5000);
  EXPECT_EQ(*on_device, 7) << "the same pages";
  runtime_.UnpinHost(reader.data());
  EXPECT_FALSE(runtime_.AddressOfPinned(reader.data() + 5000).ok());
  EXPECT_DEATH(EXPECT_EQ(*on_device, 7), "");
  runtime_.UnpinHost(writer.data());
}

TEST_F(DeviceRuntimeTest, DevicesAreAsManyAsTheEnvironmentSays) {
  ASSERT_EQ(runtime_.Devices()->size(), 1u);
  setenv(cuda_sharing::kDeviceCount, "2", 1);
  const auto devices = runtime_.Devices();
  EXPECT_TRUE(runtime_.Use(1).ok());
  unsetenv(cuda_sharing::kDeviceCount);
  ASSERT_EQ(devices->size(), 2u);
  EXPECT_EQ(devices->back().device, 1);
  EXPECT_NE(devices->front().uuid, devices->back().uuid);
  EXPECT_FALSE(runtime_.Use(1).ok());
  EXPECT_TRUE(runtime_.Use(0).ok());
}

TEST_F(DeviceRuntimeTest, FailureIsOverWhenItIsTakenBack) {
  InjectFailures("cudaMalloc=2@2");
  void* const first = *runtime_.Allocate(0, kBytes);
  EXPECT_FALSE(runtime_.Allocate(0, kBytes).ok()) << "from the second call on";
  InjectFailures("");
  void* const second = *runtime_.Allocate(0, kBytes);
  runtime_.Free(first);
  runtime_.Free(second);
}

TEST_F(DeviceRuntimeTest, NothingIsRegisteredWithoutADevice) {
  InjectFailures("cudaGetDeviceCount=100");
  EXPECT_EQ(ReasonOf(UseDevice()), "DEVICE_MISSING");
  EXPECT_EQ(RegisteredDeviceRuntime(), nullptr);
  EXPECT_FALSE(RegisteredDevice().ok());
  InjectFailures("");
  ASSERT_TRUE(UseDevice().ok());
  EXPECT_NE(RegisteredDeviceRuntime(), nullptr);
  EXPECT_TRUE(RegisteredDevice().ok());
}

}  // namespace
}  // namespace certkv::cuda
