#include "kernels/core/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBytes = 3 * 4096;

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) != -1; }

int OpenFdCount() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                        std::filesystem::directory_iterator{}));
}

UniqueFd NewMemfd() {
  absl::StatusOr<UniqueFd> fd = CreateMemfd("certkv-test", kBytes);
  EXPECT_TRUE(fd.ok()) << fd.status();
  return fd.ok() ? *std::move(fd) : UniqueFd();
}

std::pair<UniqueFd, UniqueFd> NewSocketPair() {
  int ends[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

TEST(UniqueFdTest, ClosesOnceAndMoves) {
  const int raw = open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd a(raw);
    UniqueFd b(std::move(a));
    EXPECT_FALSE(a.valid());  // NOLINT(bugprone-use-after-move): the moved-from state is promised
    UniqueFd c;
    c = std::move(b);
    EXPECT_EQ(c.get(), raw);
    EXPECT_TRUE(IsOpen(raw));
  }
  EXPECT_FALSE(IsOpen(raw));
  UniqueFd released(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int kept = released.release();
  released.reset();
  EXPECT_TRUE(IsOpen(kept));
  close(kept);
}

TEST(SharedMemoryTest, WriterAndReaderSeeTheSameBytes) {
  const UniqueFd fd = NewMemfd();
  auto writer = Mapping::Map(fd.get(), Mapping::Access::kReadWrite);
  auto reader = Mapping::Map(fd.get(), Mapping::Access::kReadOnly);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(writer->size_bytes(), kBytes);
  EXPECT_EQ(reader->data()[kBytes - 1], 0) << "new pages are zero";
  writer->data()[kBytes - 1] = 42;
  EXPECT_EQ(reader->data()[kBytes - 1], 42);
}

TEST(SharedMemoryTest, MappingOutlivesItsDescriptorAndMoves) {
  Mapping kept;
  {
    const UniqueFd fd = NewMemfd();
    auto mapping = Mapping::Map(fd.get(), Mapping::Access::kReadWrite);
    ASSERT_TRUE(mapping.ok());
    mapping->data()[0] = 7;
    kept = *std::move(mapping);
  }
  EXPECT_EQ(kept.data()[0], 7);
  Mapping moved(std::move(kept));
  EXPECT_EQ(kept.data(), nullptr);  // NOLINT(bugprone-use-after-move): as above
  EXPECT_EQ(moved.data()[0], 7);
  moved.reset();
  EXPECT_EQ(moved.data(), nullptr);
}

TEST(SharedMemoryTest, MemfdKeepsItsSize) {
  const UniqueFd fd = NewMemfd();
  EXPECT_NE(ftruncate(fd.get(), 4096), 0) << "a shrunk slab would kill its readers";
  EXPECT_NE(ftruncate(fd.get(), kBytes + 4096), 0);
  struct stat info = {};
  ASSERT_EQ(fstat(fd.get(), &info), 0);
  EXPECT_EQ(info.st_size, kBytes);
  EXPECT_NE(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SharedMemoryTest, ImpossibleSizeIsAnError) {
  const absl::Status status = CreateMemfd("certkv-test", -1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "MEMFD_FAILED");
}

TEST(SharedMemoryTest, SealedMemfdIsWrittenByItsOldMappingOnly) {
  const UniqueFd fd = NewMemfd();
  auto owner = Mapping::Map(fd.get(), Mapping::Access::kReadWrite);
  ASSERT_TRUE(owner.ok());
  ASSERT_TRUE(SealAgainstWrites(fd.get()).ok());
  const absl::Status refused = Mapping::Map(fd.get(), Mapping::Access::kReadWrite).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused), "MAP_FAILED");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("read-write"));
  EXPECT_LT(pwrite(fd.get(), "x", 1, 0), 0);
  owner->data()[1] = 9;
  auto reader = Mapping::Map(fd.get(), Mapping::Access::kReadOnly);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->data()[1], 9);
  EXPECT_NE(mprotect(reader->data(), kBytes, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(ReasonOf(SealAgainstWrites(fd.get())), "MEMFD_SEAL_FAILED") << "sealed for good";
}

TEST(SharedMemoryDeathTest, WritingAReadOnlyMappingDies) {
  const UniqueFd fd = NewMemfd();
  auto reader = Mapping::Map(fd.get(), Mapping::Access::kReadOnly);
  ASSERT_TRUE(reader.ok());
  EXPECT_DEATH(reader->data()[0] = 1, "");
}

TEST(SharedMemoryTest, ReadOnlyCopyCannotBeWrittenBeforeSealingEither) {
  const UniqueFd fd = NewMemfd();
  auto copy = ReopenReadOnly(fd.get());
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_FALSE(Mapping::Map(copy->get(), Mapping::Access::kReadWrite).ok());
  EXPECT_TRUE(Mapping::Map(copy->get(), Mapping::Access::kReadOnly).ok());
  EXPECT_EQ(ReasonOf(ReopenReadOnly(-1).status()), "MEMFD_REOPEN_FAILED");
}

TEST(SharedMemoryTest, DescriptorsThatAreNoFilesAreNotMapped) {
  const auto [a, b] = NewSocketPair();
  EXPECT_EQ(ReasonOf(Mapping::Map(a.get(), Mapping::Access::kReadOnly).status()), "MAP_FAILED");
  EXPECT_EQ(ReasonOf(Mapping::Map(-1, Mapping::Access::kReadOnly).status()), "MAP_FAILED");
}

TEST(SocketTest, BytesAndDescriptorsArriveTogether) {
  const auto [a, b] = NewSocketPair();
  const UniqueFd first = NewMemfd();
  const UniqueFd second = NewMemfd();
  ASSERT_EQ(pwrite(second.get(), "second", 6, 0), 6);
  ASSERT_TRUE(SendWithFds(a.get(), "hello", {first.get(), second.get()}).ok());
  auto received = ReceiveWithFds(b.get(), 5, 1000);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->bytes, "hello");
  ASSERT_EQ(received->fds.size(), 2u);
  char text[6];
  ASSERT_EQ(pread(received->fds[1].get(), text, 6, 0), 6);
  EXPECT_EQ(std::string(text, 6), "second");
  EXPECT_NE(fcntl(received->fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SocketTest, MessageInPiecesIsPutTogether) {
  const auto [a, b] = NewSocketPair();
  ASSERT_TRUE(SendWithFds(a.get(), "abc", {}).ok());
  ASSERT_TRUE(SendWithFds(a.get(), "defXYZ", {}).ok());
  auto received = ReceiveWithFds(b.get(), 6, 1000);
  ASSERT_TRUE(received.ok());
  EXPECT_EQ(received->bytes, "abcdef");
  EXPECT_EQ(ReceiveWithFds(b.get(), 3, 1000)->bytes, "XYZ") << "the next message stays";
}

TEST(SocketTest, ClosedPeerIsAnErrorAndClosesWhatCame) {
  auto [a, b] = NewSocketPair();
  const UniqueFd memfd = NewMemfd();
  ASSERT_TRUE(SendWithFds(a.get(), "abc", {memfd.get()}).ok());
  a.reset();
  const int before = OpenFdCount();
  const absl::Status status = ReceiveWithFds(b.get(), 5, 1000).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), "SOCKET_CLOSED");
  EXPECT_EQ(OpenFdCount(), before);
  EXPECT_EQ(ReasonOf(SendWithFds(b.get(), "abc", {})), "SOCKET_CLOSED") << "and no SIGPIPE";
}

TEST(SocketTest, SilentPeerTimesOut) {
  const auto [a, b] = NewSocketPair();
  ASSERT_TRUE(SendWithFds(a.get(), "ab", {}).ok());
  const absl::Status status = ReceiveWithFds(b.get(), 3, 20).status();
  EXPECT_EQ(ReasonOf(status), "SOCKET_CLOSED");
  EXPECT_THAT(std::string(status.message()), HasSubstr("no answer in 20 ms"));
}

TEST(SocketTest, TimeoutCountsTheWholeMessageOfADrippingPeer) {
  const auto [a, b] = NewSocketPair();
  std::atomic<bool> stop = false;
  std::thread dripper([&stop, fd = a.get()] {
    while (!stop && SendWithFds(fd, "x", {}).ok()) poll(nullptr, 0, 5);
  });
  const absl::Status status = ReceiveWithFds(b.get(), 400, 50).status();  // 2 s of drops
  stop = true;
  dripper.join();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no answer in 50 ms"));
}

TEST(SocketTest, DescriptorFloodIsRefusedAndClosed) {
  const auto [a, b] = NewSocketPair();
  const UniqueFd memfd = NewMemfd();
  const std::vector<int> eight(8, memfd.get());
  ASSERT_TRUE(SendWithFds(a.get(), "a", eight).ok());
  ASSERT_TRUE(SendWithFds(a.get(), "b", eight).ok());
  const int before = OpenFdCount();
  const absl::Status status = ReceiveWithFds(b.get(), 2, 1000).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("more than 8 descriptors"));
  EXPECT_EQ(OpenFdCount(), before);
}

TEST(SocketTest, ConnectNamesThePath) {
  const absl::Status absent = ConnectUnixSocket("/no/such/socket").status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(absent), "SOCKET_CONNECT_FAILED");
  EXPECT_THAT(std::string(absent.message()), HasSubstr("/no/such/socket"));
  for (const size_t size : {size_t{0}, size_t{108}}) {
    const absl::Status status = ConnectUnixSocket(std::string(size, 'p')).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "SOCKET_PATH_TOO_LONG");
  }
}

}  // namespace
}  // namespace certkv
