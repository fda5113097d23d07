// What the device's operations do with arguments that no kernel can serve, and when the device
// fails: a status that says so, and results that nobody could take for a read.
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "kernels/cuda/check_read.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "tests/conformance/progressive_tally.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

using cuda_on_cpu::InjectFailure;
using cuda_on_cpu::RuntimeCall;

constexpr uint64_t kSeed = 71;

struct CheckedRead {
  AttendArgs args;
  TileLayout layout;
  cuda::QueryRows queries;
  std::vector<AttendTile> tiles;
  bool needs_originals = false;
};

struct BadRead {
  const char* name;
  void (*change)(CheckedRead* read);
  const char* reason;
  const char* message;
};

constexpr BadRead kBadReads[] = {
    {"no layout", [](CheckedRead* r) { r->args.layout = nullptr; }, "ATTEND_ARGS_INVALID",
     "layout is null"},
    {"odd dimension", [](CheckedRead* r) { r->layout.head_dim = 72; }, "ATTEND_ARGS_INVALID",
     "head_dim is 72"},
    {"large dimension", [](CheckedRead* r) { r->layout.value_dim = 272; }, "ATTEND_ARGS_INVALID",
     "value_dim is 272"},
    {"dither", [](CheckedRead* r) { r->layout.key_format = KeyFormat::kK8D; },
     "DEVICE_LACKS_OPERATION", "K8D"},
    {"large group", [](CheckedRead* r) { r->args.group_size = 17; }, "ATTEND_ARGS_INVALID",
     "group_size is 17"},
    {"no token", [](CheckedRead* r) { r->args.token_begin = r->args.token_end; },
     "ATTEND_ARGS_INVALID", "token_begin"},
    {"end beyond the sequence", [](CheckedRead* r) { r->args.token_end += 1; },
     "ATTEND_ARGS_INVALID", "token_end"},
    {"scale NaN", [](CheckedRead* r) { r->args.logit_scale = std::nanf(""); },
     "ATTEND_ARGS_INVALID", "logit_scale"},
    {"cap negative", [](CheckedRead* r) { r->args.soft_cap = -1; }, "ATTEND_ARGS_INVALID",
     "soft_cap"},
    {"no queries", [](CheckedRead* r) { r->args.queries = nullptr; }, "ATTEND_ARGS_INVALID",
     "queries is at 0x0"},
    {"queries misaligned",
     [](CheckedRead* r) {
       r->queries.bits =
           reinterpret_cast<const uint16_t*>(reinterpret_cast<const uint8_t*>(r->args.queries) + 1);
     },
     "ATTEND_ARGS_INVALID", "QueryRows.bits"},
    {"tail narrow", [](CheckedRead* r) { r->args.tail_key_stride = 8; }, "ATTEND_ARGS_INVALID",
     "tail_key_stride is 8"},
    {"no tail", [](CheckedRead* r) { r->args.tail_values = nullptr; }, "ATTEND_ARGS_INVALID",
     "tail_values"},
    {"scan misaligned", [](CheckedRead* r) { r->tiles[1].scan += 32; }, "ATTEND_ARGS_INVALID",
     "tile 1's scan record"},
    {"detail null", [](CheckedRead* r) { r->tiles[0].detail = nullptr; }, "ATTEND_ARGS_INVALID",
     "tile 0's detail record"},
    {"originals missing",
     [](CheckedRead* r) {
       r->needs_originals = true;
       r->tiles[1].original_keys = nullptr;
     },
     "ORIGINAL_MISSING", "tile 1's originals"},
    {"tiles left out", [](CheckedRead* r) { r->tiles.pop_back(); }, "ATTEND_ARGS_INVALID",
     "1 tiles were given"},
};

CheckedRead GoodRead(const SequenceCase& sequence) {
  CheckedRead read;
  read.args = sequence.args();
  read.layout = sequence.layout();
  read.tiles.assign(read.args.tiles, read.args.tiles + read.args.tile_count);
  return read;
}

absl::Status Check(CheckedRead* read) {
  if (read->args.layout != nullptr) read->args.layout = &read->layout;
  return cuda::CheckDeviceRead(read->args, read->queries, read->tiles, read->needs_originals);
}

TEST(CudaFaultsTest, ReadsThatNoKernelCanServeAreRefused) {
  const SequenceCase sequence(SequenceShape{}, kSeed, Backend::kReference);
  CheckedRead good = GoodRead(sequence);
  EXPECT_TRUE(Check(&good).ok());
  good.needs_originals = true;
  EXPECT_TRUE(Check(&good).ok());
  for (const BadRead& bad : kBadReads) {
    SCOPED_TRACE(bad.name);
    CheckedRead read = GoodRead(sequence);
    bad.change(&read);
    const absl::Status status = Check(&read);
    EXPECT_EQ(ReasonOf(status), bad.reason) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(bad.message));
  }
}

TEST(CudaFaultsTest, ReadsOfDifferentShapesAreNotLaunchedTogether) {
  std::vector<cuda::AttendRead> reads(2);
  for (cuda::AttendRead& read : reads) {
    read.args.group_size = 4;
    read.layout.head_dim = read.layout.value_dim = 128;
  }
  EXPECT_TRUE(cuda::CheckLaunch(reads).ok());
  EXPECT_EQ(ReasonOf(cuda::CheckLaunch({})), "ATTEND_ARGS_INVALID");
  reads[1].layout.value_dim = 64;
  EXPECT_EQ(ReasonOf(cuda::CheckLaunch(reads)), "ATTEND_ARGS_INVALID");
  reads[1].layout.value_dim = 128;
  reads[1].args.group_size = 1;
  EXPECT_EQ(ReasonOf(cuda::CheckLaunch(reads)), "ATTEND_ARGS_INVALID");
}

struct Fault {
  RuntimeCall call;
  cudaError_t error;
  const char* reason;
};
constexpr Fault kFaults[] = {
    {RuntimeCall::kLaunch, cudaErrorLaunchFailure, "DEVICE_FAILED"},
    {RuntimeCall::kAllocate, cudaErrorMemoryAllocation, "DEVICE_MEMORY_FULL"},
    {RuntimeCall::kCopy, cudaErrorMisalignedAddress, "DEVICE_FAILED"},
    {RuntimeCall::kSynchronize, cudaErrorLaunchFailure, "DEVICE_FAILED"},
};

// Runs the operation with its n-th call of each kind failing, for every n, until none does.
template <typename Operation, typename Untouched>
void FailEveryCall(Operation operation, Untouched untouched) {
  for (const Fault& fault : kFaults) {
    SCOPED_TRACE(testing::Message() << "calls of kind " << static_cast<int>(fault.call));
    int failed = 0;
    for (;; ++failed) {
      ASSERT_LT(failed, 200);
      InjectFailure(fault.call, failed, fault.error);
      const absl::Status status = operation();
      if (status.ok()) break;
      EXPECT_EQ(ReasonOf(status), fault.reason) << status;
      // What failed before anything came back left the results as they were.
      if (fault.call == RuntimeCall::kLaunch || fault.call == RuntimeCall::kAllocate) untouched();
    }
    InjectFailure(fault.call, -1, cudaSuccess);
    EXPECT_GE(failed, 1);
  }
}

TEST(CudaFaultsTest, ReadSaysWhichOfItsCallsFailed) {
  RegisterDevice(&cuda::HostMemoryOps());
  const SequenceCase sequence(SequenceShape{}, kSeed, Backend::kReference);
  const AttendArgs& args = sequence.args();
  const AlignedBytes workspace = AllocateAligned(AttendWorkspaceBytes(args));
  auto result = std::make_unique<ReadResult>(args);
  FailEveryCall(
      [&] {
        result = std::make_unique<ReadResult>(args);
        return Attend(Backend::kCuda, args, result->view(), workspace.get());
      },
      [&] {
        EXPECT_TRUE(std::isnan(result->view().lse_nat[0]));
        EXPECT_TRUE(std::isnan(result->output(0)[0]));
      });
}

TEST(CudaFaultsTest, ProgressiveReadSaysWhichOfItsCallsFailed) {
  RegisterDevice(&cuda::HostMemoryOps());
  const SequenceCase sequence(SequenceShape{}, kSeed, Backend::kReference);
  auto read = std::make_unique<ProgressiveRead>(sequence.args(), 0.1f);
  FailEveryCall(
      [&] {
        read = std::make_unique<ProgressiveRead>(sequence.args(), 0.1f);
        return read->TryRun(Backend::kCuda);
      },
      [&] {
        EXPECT_TRUE(std::isnan(read->view().lse_nat[0]));
        EXPECT_TRUE(std::isnan(read->output(0)[0]));
      });
}

TEST(CudaFaultsTest, CertificateIsUnchangedWhateverFails) {
  RegisterDevice(&cuda::HostMemoryOps());
  const std::array<float, 2> lse = {1, 2};
  const std::array<float, 2> width = {0.1f, 0.2f};
  FinishArgs args{};
  args.atom_count = 2;
  args.block_lse = args.block_max_logit = lse.data();
  args.logit_half_width = width.data();
  args.sink_index = -1;
  FinishWorkspace workspace;
  Certificate certificate;
  const auto finish = [&] {
    certificate.worst_case_tv = 0.625f;
    const absl::Status status = FinishCertificate(Backend::kCuda, args, &workspace, &certificate);
    EXPECT_EQ(status.ok(), certificate.worst_case_tv != 0.625f);
    return status;
  };
  FailEveryCall(finish, [] {});
}

}  // namespace
}  // namespace certkv::conformance
