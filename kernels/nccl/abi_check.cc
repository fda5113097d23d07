// abi.h against nccl.h: compiled where that is found, and into nothing.
#include <nccl.h>

#include <type_traits>

#include "kernels/nccl/abi.h"

namespace certkv::nccl {
namespace {

static_assert(kSuccess == ncclSuccess && kInvalidUsage == ncclInvalidUsage);
static_assert(kRemoteError == ncclRemoteError && kInProgress == ncclInProgress);
static_assert(kUint8 == ncclUint8);
static_assert(sizeof(Result) == sizeof(ncclResult_t) && sizeof(DataType) == sizeof(ncclDataType_t));

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == 1 &&
              alignof(ncclUniqueId) == 1);

static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
static_assert(sizeof(Config::blocking) == sizeof(ncclConfig_t::blocking));

constexpr ncclConfig_t kInitial = NCCL_CONFIG_INITIALIZER;
static_assert(Config{}.magic == kInitial.magic && kVersionMin <= NCCL_VERSION_CODE);

static_assert(std::is_same_v<cudaStream_t, CUstream_st*>);
static_assert(std::is_same_v<decltype(&ncclGetVersion), ncclResult_t (*)(int*)>);
static_assert(std::is_same_v<decltype(&ncclGetErrorString), const char* (*)(ncclResult_t)>);
static_assert(std::is_same_v<decltype(&ncclGetUniqueId), ncclResult_t (*)(ncclUniqueId*)>);
static_assert(std::is_same_v<decltype(&ncclCommInitRankConfig),
                             ncclResult_t (*)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*)>);
static_assert(
    std::is_same_v<decltype(&ncclCommGetAsyncError), ncclResult_t (*)(ncclComm_t, ncclResult_t*)>);
static_assert(std::is_same_v<decltype(&ncclCommAbort), ncclResult_t (*)(ncclComm_t)>);
static_assert(
    std::is_same_v<decltype(&ncclSend), ncclResult_t (*)(const void*, size_t, ncclDataType_t, int,
                                                         ncclComm_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&ncclRecv), ncclResult_t (*)(void*, size_t, ncclDataType_t,
                                                                   int, ncclComm_t, cudaStream_t)>);

}  // namespace
}  // namespace certkv::nccl
