#include "kernels/nccl/library.h"

#include <dlfcn.h>

#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/nccl/abi.h"

namespace certkv::nccl {
namespace {

absl::Status Refused(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason, message);
}

absl::StatusOr<EntryPoints> Resolve(void* handle, const std::string& path) {
  EntryPoints entry{};
  const auto find = [&](const char* name, auto* function) -> absl::Status {
    void* const found = dlsym(handle, name);
    if (found == nullptr) {
      return Refused("NCCL_MISSING",
                     absl::StrCat("kvstore.nccl_library ", path, " has no ", name,
                                  ": it isn't NCCL, or one older than 2.14; install a newer one, "
                                  "or set nccl: off"));
    }
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(found);
    return absl::OkStatus();
  };
  CERTKV_RETURN_IF_ERROR(find("ncclGetVersion", &entry.ncclGetVersion));
  CERTKV_RETURN_IF_ERROR(find("ncclGetErrorString", &entry.ncclGetErrorString));
  CERTKV_RETURN_IF_ERROR(find("ncclGetUniqueId", &entry.ncclGetUniqueId));
  CERTKV_RETURN_IF_ERROR(find("ncclCommInitRankConfig", &entry.ncclCommInitRankConfig));
  CERTKV_RETURN_IF_ERROR(find("ncclCommGetAsyncError", &entry.ncclCommGetAsyncError));
  CERTKV_RETURN_IF_ERROR(find("ncclCommAbort", &entry.ncclCommAbort));
  CERTKV_RETURN_IF_ERROR(find("ncclSend", &entry.ncclSend));
  CERTKV_RETURN_IF_ERROR(find("ncclRecv", &entry.ncclRecv));
  return entry;
}

absl::Status StatusOf(const EntryPoints& entry, Result result, absl::string_view call) {
  if (result == kSuccess) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "NCCL_FAILED",
                   absl::StrCat(call, ": ", entry.ncclGetErrorString(result), " (NCCL error ",
                                result, "); look at NCCL_DEBUG=INFO, or set nccl: off"));
}

class Communicator final : public PairCommunicator {
 public:
  Communicator(const EntryPoints& entry, Comm comm, int32_t rank)
      : entry_(entry), comm_(comm), peer_(1 - rank) {}
  ~Communicator() override { Abort(); }

  absl::StatusOr<bool> IsReady() override {
    Result state = kSuccess;
    CERTKV_RETURN_IF_ERROR(
        StatusOf(entry_, entry_.ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError"));
    if (state == kInProgress) return false;
    CERTKV_RETURN_IF_ERROR(StatusOf(entry_, state, "the communicator"));
    return true;
  }

  absl::Status Send(const void* memory, int64_t size_bytes, CUstream_st* stream) override {
    return Begun(
        entry_.ncclSend(memory, static_cast<size_t>(size_bytes), kUint8, peer_, comm_, stream),
        "ncclSend");
  }
  absl::Status Receive(void* memory, int64_t size_bytes, CUstream_st* stream) override {
    return Begun(
        entry_.ncclRecv(memory, static_cast<size_t>(size_bytes), kUint8, peer_, comm_, stream),
        "ncclRecv");
  }

  void Abort() override {
    // ncclCommDestroy would wait for the other end.
    if (comm_ != nullptr) entry_.ncclCommAbort(std::exchange(comm_, nullptr));
  }

 private:
  // It may still be about to; IsReady() tells.
  absl::Status Begun(Result result, absl::string_view call) const {
    return StatusOf(entry_, result == kInProgress ? kSuccess : result, call);
  }

  const EntryPoints& entry_;
  Comm comm_;
  const int32_t peer_;
};

class Library final : public PairCommunicatorLibrary {
 public:
  Library(std::string path, const EntryPoints& entry, int32_t version)
      : path_(std::move(path)), entry_(entry), version_(version) {}

  int32_t version() const override { return version_; }
  const std::string& path() const override { return path_; }

  absl::StatusOr<CommunicatorId> MakeId() override {
    UniqueId id{};
    CERTKV_RETURN_IF_ERROR(StatusOf(entry_, entry_.ncclGetUniqueId(&id), "ncclGetUniqueId"));
    CommunicatorId bytes;
    static_assert(sizeof(id) == sizeof(bytes));
    std::memcpy(bytes.data(), &id, sizeof(id));
    return bytes;
  }

  absl::StatusOr<std::unique_ptr<PairCommunicator>> Join(const CommunicatorId& bytes,
                                                         int32_t rank) override {
    UniqueId id;
    std::memcpy(&id, bytes.data(), sizeof(id));
    Config config;
    Comm comm = nullptr;
    const Result result = entry_.ncclCommInitRankConfig(&comm, 2, id, rank, &config);
    if (result != kSuccess && result != kInProgress) {
      return StatusOf(entry_, result, "ncclCommInitRankConfig");
    }
    return std::make_unique<Communicator>(entry_, comm, rank);
  }

 private:
  const std::string path_;
  const EntryPoints entry_;
  const int32_t version_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PairCommunicatorLibrary>> OpenLibrary(const std::string& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return Refused("NCCL_MISSING",
                   absl::StrCat("kvstore.nccl_library ", path, " can't be opened: ", dlerror(),
                                "; install NCCL 2.14 or newer, say where it is, or set nccl: off"));
  }
  CERTKV_ASSIGN_OR_RETURN(const EntryPoints entry, Resolve(handle, path));
  int version = 0;
  CERTKV_RETURN_IF_ERROR(StatusOf(entry, entry.ncclGetVersion(&version), "ncclGetVersion"));
  if (version < kVersionMin) {
    return Refused(
        "NCCL_VERSION",
        absl::StrCat("kvstore.nccl_library ", path, " is NCCL ", CommunicatorVersionText(version),
                     ", at least ", CommunicatorVersionText(kVersionMin),
                     " is needed, which can give up a peer that doesn't come; install "
                     "a newer one, or set nccl: off"));
  }
  return std::make_unique<Library>(path, entry, version);
}

}  // namespace certkv::nccl
