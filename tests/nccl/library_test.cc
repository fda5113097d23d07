// Opening NCCL, and what it is asked: over the stub, over libraries that aren't NCCL, and the real
// one where it is installed.
#include "kernels/nccl/library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/core/status.h"
#include "kernels/cuda/device_runtime.h"
#include "kernels/nccl/abi.h"
#include "tests/nccl/stub.h"

namespace certkv::nccl {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = 100'003;

class NcclLibraryTest : public ::testing::Test {
 protected:
  struct End {
    std::unique_ptr<PairCommunicator> communicator;
    CUstream_st* stream = nullptr;
    uint8_t* memory = nullptr;
  };

  std::unique_ptr<PairCommunicatorLibrary> Open() {
    auto library = OpenLibrary(StubNccl());
    EXPECT_TRUE(library.ok()) << library.status();
    return *std::move(library);
  }
  End Join(PairCommunicatorLibrary* library, const CommunicatorId& id, int32_t rank) {
    End end;
    auto joined = library->Join(id, rank);
    EXPECT_TRUE(joined.ok()) << joined.status();
    end.communicator = *std::move(joined);
    end.stream = *runtime_.CreateStream(0);
    end.memory = static_cast<uint8_t*>(*runtime_.Allocate(0, kBytes));
    return end;
  }
  void Give(End* end) {
    end->communicator->Abort();
    EXPECT_TRUE(runtime_.Wait(end->stream).ok());
    runtime_.DestroyStream(end->stream);
    runtime_.Free(end->memory);
  }
  // At most two seconds.
  static absl::Status Until(const std::function<absl::StatusOr<bool>()>& is_so) {
    for (int i = 0; i < 2000; ++i) {
      const absl::StatusOr<bool> so = is_so();
      if (!so.ok()) return so.status();
      if (*so) return absl::OkStatus();
      poll(nullptr, 0, 1);
    }
    return absl::DeadlineExceededError("two seconds");
  }
  static absl::Status UntilReady(End* end) {
    return Until([end] { return end->communicator->IsReady(); });
  }
  absl::Status UntilDone(End* end) {
    return Until([this, end] { return runtime_.IsDone(end->stream); });
  }

  StubFailures failures_;
  cuda::CudaDeviceRuntime runtime_;
};

TEST_F(NcclLibraryTest, SaysVersionAsPeopleDo) {
  EXPECT_EQ(CommunicatorVersionText(22809), "2.28.9");
  EXPECT_EQ(CommunicatorVersionText(21400), "2.14.0");
  EXPECT_EQ(CommunicatorVersionText(2708), "2.7.8");
}

TEST_F(NcclLibraryTest, RefusesWhatIsNotThereOrNotNccl) {
  for (const char* path : {"/nowhere/libnccl.so.2", "libz.so.1", CERTKV_STUB_NCCL_TRUNCATED}) {
    SCOPED_TRACE(path);
    const auto library = OpenLibrary(path);
    EXPECT_TRUE(absl::IsFailedPrecondition(library.status())) << library.status();
    EXPECT_EQ(ReasonOf(library.status()), "NCCL_MISSING");
    EXPECT_THAT(library.status().message(), HasSubstr(path));
  }
  EXPECT_THAT(OpenLibrary(CERTKV_STUB_NCCL_TRUNCATED).status().message(),
              HasSubstr("has no ncclGetErrorString"));
}

TEST_F(NcclLibraryTest, RefusesAVersionThatCannotGiveUpAPeer) {
  failures_.Set("version=21399");
  const auto old = OpenLibrary(StubNccl());
  EXPECT_EQ(ReasonOf(old.status()), "NCCL_VERSION") << old.status();
  EXPECT_THAT(old.status().message(), HasSubstr("at least 2.14.0"));
  failures_.Set("version=21400");
  const auto least = OpenLibrary(StubNccl());
  ASSERT_TRUE(least.ok()) << least.status();
  EXPECT_EQ((*least)->version(), 21400);
  EXPECT_EQ((*least)->path(), StubNccl());
}

TEST_F(NcclLibraryTest, MovesBytesOnceTheStreamHasComeSoFar) {
  const auto library = Open();
  const CommunicatorId id = *library->MakeId();
  End first = Join(library.get(), id, 0);
  End second = Join(library.get(), id, 1);
  ASSERT_TRUE(UntilReady(&first).ok());
  ASSERT_TRUE(UntilReady(&second).ok());
  std::vector<uint8_t> bytes(kBytes);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 5 + 3);
  ASSERT_TRUE(runtime_.CopyToDevice(second.memory, bytes.data(), kBytes, second.stream).ok());
  ASSERT_TRUE(second.communicator->Send(second.memory, kBytes, second.stream).ok());
  ASSERT_TRUE(first.communicator->Receive(first.memory, kBytes, first.stream).ok());
  ASSERT_TRUE(UntilReady(&first).ok());
  ASSERT_TRUE(UntilReady(&second).ok());
  EXPECT_FALSE(*runtime_.IsDone(first.stream)) << "nobody has asked the sender's stream";
  ASSERT_TRUE(UntilDone(&second).ok());
  ASSERT_TRUE(UntilDone(&first).ok());
  EXPECT_EQ(std::memcmp(first.memory, bytes.data(), kBytes), 0);
  EXPECT_EQ(TakeStubPeakBytes(), 2 * kBytes);
  Give(&first);
  Give(&second);
}

TEST_F(NcclLibraryTest, SaysWhatTheLibrarySays) {
  const auto library = Open();
  const CommunicatorId id = *library->MakeId();
  failures_.Set("ncclGetUniqueId=2");
  EXPECT_EQ(ReasonOf(library->MakeId().status()), "NCCL_FAILED");
  failures_.Set("ncclCommInitRankConfig=5");
  EXPECT_EQ(ReasonOf(library->Join(id, 0).status()), "NCCL_FAILED");
  failures_.Set("ncclGetVersion=3");
  EXPECT_EQ(ReasonOf(OpenLibrary(StubNccl()).status()), "NCCL_FAILED");
  failures_.Set("");
  End first = Join(library.get(), id, 0);
  End second = Join(library.get(), id, 1);
  ASSERT_TRUE(UntilReady(&first).ok());
  ASSERT_TRUE(UntilReady(&second).ok());
  failures_.Set("ncclSend=3 ncclRecv=4");
  const absl::Status sent = first.communicator->Send(first.memory, 1, first.stream);
  EXPECT_TRUE(absl::IsUnavailable(sent)) << sent;
  EXPECT_EQ(ReasonOf(sent), "NCCL_FAILED");
  EXPECT_THAT(sent.message(), HasSubstr("ncclSend: an error of the stub (NCCL error 3)"));
  EXPECT_FALSE(first.communicator->Receive(first.memory, 1, first.stream).ok());
  failures_.Set("async=6");
  EXPECT_EQ(ReasonOf(first.communicator->IsReady().status()), "NCCL_FAILED");
  failures_.Set("ncclCommGetAsyncError=2");
  EXPECT_EQ(ReasonOf(first.communicator->IsReady().status()), "NCCL_FAILED");
  Give(&first);
  Give(&second);
}

TEST_F(NcclLibraryTest, CommunicatorWhosePeerNeverComesIsNotReadyAndIsAborted) {
  const auto library = Open();
  End end = Join(library.get(), *library->MakeId(), 0);
  EXPECT_FALSE(*end.communicator->IsReady());
  poll(nullptr, 0, 20);
  EXPECT_FALSE(*end.communicator->IsReady());
  Give(&end);
}

TEST_F(NcclLibraryTest, AbortEndsWhatAPeerThatDiedWouldHaveSent) {
  const auto library = Open();
  const CommunicatorId id = *library->MakeId();
  const pid_t child = fork();
  if (child == 0) {
    const auto joined = library->Join(id, 1);
    _exit(joined.ok() && Until([&joined] { return (*joined)->IsReady(); }).ok() ? 0 : 1);
  }
  End end = Join(library.get(), id, 0);
  ASSERT_TRUE(UntilReady(&end).ok());
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ASSERT_TRUE(end.communicator->Receive(end.memory, kBytes, end.stream).ok());
  EXPECT_FALSE(*end.communicator->IsReady()) << "it has just been asked";
  EXPECT_FALSE(*runtime_.IsDone(end.stream));
  absl::Status error;
  for (int i = 0; i < 2000 && error.ok(); ++i) {
    error = end.communicator->IsReady().status();
    poll(nullptr, 0, 1);
  }
  EXPECT_EQ(ReasonOf(error), "NCCL_FAILED");
  EXPECT_FALSE(*runtime_.IsDone(end.stream)) << "a kernel spins until it is aborted";
  Give(&end);
}

// What of the real library works without a GPU: loading, its version, an id. Making a communicator
// ends with an error, and not with a hang.
TEST_F(NcclLibraryTest, RealLibraryIsOpenedAndSaysItsVersion) {
  const std::string path = CERTKV_REAL_NCCL;
  if (path.empty()) GTEST_SKIP() << "needs libnccl, which CMake didn't find";
  const auto library = OpenLibrary(path);
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_GE((*library)->version(), kVersionMin);
  EXPECT_LT((*library)->version(), 100'000) << CommunicatorVersionText((*library)->version());
  const auto id = (*library)->MakeId();
  if (!id.ok()) GTEST_SKIP() << "needs a network interface that NCCL uses: " << id.status();
  EXPECT_NE(*id, CommunicatorId{});
}

TEST_F(NcclLibraryTest, RealLibraryWithoutAGpuSaysSoAtOnce) {
  const std::string path = CERTKV_REAL_NCCL;
  if (path.empty()) GTEST_SKIP() << "needs libnccl, which CMake didn't find";
  if (access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "needs a machine without a GPU";
  const auto library = OpenLibrary(path);
  ASSERT_TRUE(library.ok()) << library.status();
  const auto joined = (*library)->Join(CommunicatorId{}, 0);
  EXPECT_EQ(ReasonOf(joined.status()), "NCCL_FAILED") << joined.status();
}

}  // namespace
}  // namespace certkv::nccl
