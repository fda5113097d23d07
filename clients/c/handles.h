// What the handles of certkv.h hold.
//
// A handle holds what it needs of others by shared pointers, so that callers may close them in any
// order. Lock order: a sequence's mutex, nothing else.
#ifndef CERTKV_CLIENTS_C_HANDLES_H_
#define CERTKV_CLIENTS_C_HANDLES_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "clients/c/boundary.h"
#include "clients/c/certkv.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "kernels/core/status.h"

namespace certkv::capi {

struct SequenceState {
  std::shared_ptr<client::Worker> worker;
  // One call at a time: appending changes what a read looks at.
  absl::Mutex mutex;
  std::unique_ptr<client::Sequence> sequence ABSL_GUARDED_BY(mutex);
  std::vector<int32_t> token_ids ABSL_GUARDED_BY(mutex);
};

struct AttentionState {
  std::shared_ptr<SequenceState> sequence;
  std::shared_ptr<client::Request> request;
  std::unique_ptr<client::Attention> attention;  // under sequence->mutex
};

template <typename T>
struct Handle {
  std::shared_ptr<T> value;
  // Threads and connections stay in the process that made it; ending its session in a child would
  // end the parent's.
  pid_t owner = getpid();
};

}  // namespace certkv::capi

struct certkv_worker : certkv::capi::Handle<certkv::client::Worker> {};
struct certkv_sequence : certkv::capi::Handle<certkv::capi::SequenceState> {};
struct certkv_request : certkv::capi::Handle<certkv::client::Request> {};
struct certkv_attention : certkv::capi::Handle<certkv::capi::AttentionState> {};

namespace certkv::capi {

// Errors: InvalidArgument [ARGUMENT_MISSING]; FailedPrecondition [PROCESS_FORKED].
template <typename H>
absl::Status CheckHandle(const H* handle, absl::string_view name) {
  CERTKV_RETURN_IF_ERROR(RequirePointer(handle, name));
  if (getpid() == handle->owner) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "PROCESS_FORKED",
                   absl::StrCat("the ", name, " was made by process ", handle->owner,
                                " and used by its child ", getpid(), "; make it after the fork"));
}

// Gives the caller a handle on `value`.
template <typename H, typename T>
void MakeHandle(std::shared_ptr<T> value, H** handle) {
  auto made = std::make_unique<H>();
  made->value = std::move(value);
  *handle = made.release();
}

// Calls nothing in a forked child, where the handle stays for ever.
template <typename H>
void CloseHandle(H* handle) noexcept {
  if (handle != nullptr && getpid() == handle->owner) delete handle;
}

}  // namespace certkv::capi

#endif  // CERTKV_CLIENTS_C_HANDLES_H_
