// The part of NCCL's binary interface that CertKV uses, declared here, so that nothing needs
// nccl.h. Where it is found, abi_check.cc compares.
#ifndef CERTKV_KERNELS_NCCL_ABI_H_
#define CERTKV_KERNELS_NCCL_ABI_H_

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace certkv::nccl {

// NCCL's numbers. An enumeration in C, passed like this.
using Result = int;
inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidUsage = 5;
inline constexpr Result kRemoteError = 6;
inline constexpr Result kInProgress = 7;

using DataType = int;
inline constexpr DataType kUint8 = 1;

struct UniqueId {
  char bytes[128];
};

using Comm = struct NcclComm*;

// ncclConfig_t as of 2.14, where it came in: later versions read as many bytes as `size` says, and
// take their defaults for fields that are younger than `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

// The least version: the first with communicators that are made without blocking, so that a peer
// that doesn't come can be given up.
inline constexpr int32_t kVersionMin = 21400;

// By their names in the library.
struct EntryPoints {
  Result (*ncclGetVersion)(int* version);
  const char* (*ncclGetErrorString)(Result result);
  Result (*ncclGetUniqueId)(UniqueId* id);
  Result (*ncclCommInitRankConfig)(Comm* comm, int rank_count, UniqueId id, int rank,
                                   Config* config);
  Result (*ncclCommGetAsyncError)(Comm comm, Result* error);
  Result (*ncclCommAbort)(Comm comm);
  Result (*ncclSend)(const void* memory, size_t count, DataType type, int peer, Comm comm,
                     CUstream_st* stream);
  Result (*ncclRecv)(void* memory, size_t count, DataType type, int peer, Comm comm,
                     CUstream_st* stream);
};

}  // namespace certkv::nccl

#endif  // CERTKV_KERNELS_NCCL_ABI_H_
