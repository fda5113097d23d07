#include "clients/c/boundary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "clients/c/handles.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"

namespace {

// How many allocations of this thread succeed before one fails; < 0 = all.
thread_local int allocations_left = -1;

}  // namespace

// Of the whole test program, so that memory can run out where a test says. Not inlined: GCC takes a
// free that it sees beside a new for a mistake.
[[gnu::noinline]] void* operator new(size_t size) {
  void* memory = nullptr;
  if (allocations_left != 0) memory = std::malloc(size == 0 ? 1 : size);
  if (allocations_left > 0) --allocations_left;
  if (memory == nullptr) std::__throw_bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t /*size*/) noexcept {
  std::free(memory);
}

namespace certkv::capi {
namespace {

using ::testing::HasSubstr;

TEST(BoundaryTest, AnErrorKeepsCodeReasonMessageAndDelay) {
  const certkv_status status = RunGuarded([] {
    return WithRetryDelay(
        MakeError(absl::StatusCode::kResourceExhausted, "STORE_FULL", "no room; wait"), 250);
  });
  EXPECT_EQ(status, CERTKV_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(certkv_error_reason(), "STORE_FULL");
  EXPECT_STREQ(certkv_error_message(), "no room; wait");
  EXPECT_EQ(certkv_error_retry_delay_ms(), 250);
}

TEST(BoundaryTest, ASuccessClearsTheLastError) {
  RunGuarded([] { return MakeError(absl::StatusCode::kInternal, "READ_FAILED", "broken"); });
  EXPECT_EQ(RunGuarded([] { return absl::OkStatus(); }), CERTKV_OK);
  EXPECT_STREQ(certkv_error_reason(), "");
  EXPECT_STREQ(certkv_error_message(), "");
}

TEST(BoundaryTest, EachThreadHasItsOwnLastError) {
  RunGuarded([] { return MakeError(absl::StatusCode::kInternal, "READ_FAILED", "here"); });
  std::string there = "not run";
  std::thread([&] { there = certkv_error_message(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_STREQ(certkv_error_message(), "here");
}

TEST(BoundaryTest, NoExceptionGoesOut) {
  EXPECT_EQ(RunGuarded([]() -> absl::Status {
              std::vector<int>().at(3) = 1;
              return absl::OkStatus();
            }),
            CERTKV_INTERNAL);
  EXPECT_STREQ(certkv_error_reason(), "UNEXPECTED_EXCEPTION");
  EXPECT_THAT(certkv_error_message(), HasSubstr("vector"));
}

TEST(BoundaryTest, MemoryThatRunsOutAtAnyAllocationIsAnError) {
  const certkv_layer_spec layer = {.struct_size = sizeof(layer), .key_format = 99};
  const certkv_cache_spec spec = {.struct_size = sizeof(spec),
                                  .model = "a-model-with-a-name-that-needs-an-allocation",
                                  .layers = &layer,
                                  .layer_count = 1,
                                  .kv_head_count = 2,
                                  .group_size = 3,
                                  .head_dim = 64,
                                  .rotary_dim = 64};
  const certkv_options options = {.struct_size = sizeof(options),
                                  .kvstore_target = "unix:/nonexistent/a/long/path/of/a/socket"};
  certkv_worker* worker = nullptr;
  int failed = 0;
  for (int allowed = 0; allowed < 1000; ++allowed) {
    allocations_left = allowed;
    const certkv_status status = certkv_worker_attach(&options, &spec, &worker);
    allocations_left = -1;
    EXPECT_EQ(worker, nullptr);
    if (status != CERTKV_RESOURCE_EXHAUSTED) {
      EXPECT_EQ(status, CERTKV_INVALID_ARGUMENT);
      EXPECT_STREQ(certkv_error_reason(), "CACHE_SPEC_INVALID");
      break;
    }
    EXPECT_STREQ(certkv_error_reason(), "OUT_OF_MEMORY");
    ++failed;
  }
  EXPECT_GT(failed, 4) << "texts of options and spec, layers and the message were allocated";
}

TEST(BoundaryTest, LongTextsAreCutAndEnd) {
  RunGuarded(
      [] { return MakeError(absl::StatusCode::kInternal, "READ_FAILED", std::string(5000, 'x')); });
  const std::string message = certkv_error_message();
  EXPECT_EQ(message, std::string(1023, 'x'));
}

TEST(BoundaryTest, StatusNamesAreThoseOfTheCodes) {
  for (int code = 0; code <= 16; ++code) {
    EXPECT_EQ(certkv_status_name(static_cast<certkv_status>(code)),
              absl::StatusCodeToString(static_cast<absl::StatusCode>(code)));
  }
  EXPECT_STREQ(certkv_status_name(static_cast<certkv_status>(17)), "?");
}

TEST(BoundaryTest, AShorterStructThanAnyVersionIsRefused) {
  certkv_read read = {};
  read.struct_size = sizeof(read) - 1;
  const absl::Status status = ReadStruct(&read, "read").status();
  EXPECT_EQ(ReasonOf(status), "STRUCT_SIZE_INVALID");
  EXPECT_THAT(std::string(status.message()), HasSubstr("read has struct_size 39"));
  read.struct_size = 0;
  EXPECT_EQ(ReasonOf(ReadStruct(&read, "read").status()), "STRUCT_SIZE_INVALID");
  read.struct_size = std::numeric_limits<size_t>::max();
  EXPECT_EQ(ReasonOf(ReadStruct(&read, "read").status()), "STRUCT_SIZE_INVALID");
}

// A struct of a later version: the fields of this one, and one more.
struct LaterRead {
  certkv_read read;
  int64_t added;
};

TEST(BoundaryTest, ALaterStructIsTakenWhileWhatIsNewIsZero) {
  LaterRead later = {};
  later.read.struct_size = sizeof(later);
  later.read.layer = 7;
  const auto taken = ReadStruct(&later.read, "read");
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(taken->layer, 7);
  later.added = int64_t{1} << 40;
  EXPECT_EQ(ReasonOf(ReadStruct(&later.read, "read").status()), "STRUCT_SIZE_INVALID");
}

TEST(BoundaryTest, WritingKeepsTheCallersSizeAndWhatIsBeyondIt) {
  LaterRead later = {};
  later.read.struct_size = sizeof(later);
  later.added = 5;
  WriteStruct({.struct_size = 1, .layer = 3}, &later.read);
  EXPECT_EQ(later.read.struct_size, sizeof(later));
  EXPECT_EQ(later.read.layer, 3);
  EXPECT_EQ(later.added, 5);
}

TEST(BoundaryTest, AHandleOfTheParentIsRefusedInTheChildAndStays) {
  certkv_request* request = nullptr;
  ASSERT_EQ(certkv_request_open_ungoverned("r", &request), CERTKV_OK);
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = certkv_request_flush(request) == CERTKV_FAILED_PRECONDITION &&
                         std::string(certkv_error_reason()) == "PROCESS_FORKED";
    certkv_request_close(request);  // does nothing
    _exit(refused && request->value != nullptr ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  certkv_request_close(request);
}

}  // namespace
}  // namespace certkv::capi
