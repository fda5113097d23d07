// What the extension's classes hold, and how they end.
//
// Calls copy the shared pointer that they need, release the GIL, then lock; so an object that is
// closed by one thread while another reads ends when that read has ended. Lock order: a sequence's
// mutex, nothing else. No lock is taken with the GIL held.
#ifndef CERTKV_CLIENTS_PYTHON_NATIVE_OBJECTS_H_
#define CERTKV_CLIENTS_PYTHON_NATIVE_OBJECTS_H_

#include <pybind11/pybind11.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/paged_cache.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "clients/python/native/status_error.h"
#include "kernels/core/status.h"

namespace certkv::python {

// A C++ object that a Python object owns until it is closed.
//
// Invariants:
//  1. It is destroyed without the GIL, because its destructor calls servers.
//  2. In a forked child it is neither used nor destroyed: threads and connections stayed in the
//     parent, and ending its session there would be this process's doing.
template <typename T>
class Owned {
 public:
  Owned(std::shared_ptr<T> value, const char* kind)
      : value_(std::move(value)), kind_(kind), owner_(getpid()) {}
  ~Owned() { Close(); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  // Throws FailedPrecondition [OBJECT_CLOSED | PROCESS_FORKED]. Needs the GIL.
  std::shared_ptr<T> Get() const {
    if (value_ == nullptr) {
      Throw(MakeError(absl::StatusCode::kFailedPrecondition, "OBJECT_CLOSED",
                      absl::StrCat("this ", kind_, " was closed; make another")));
    }
    if (getpid() != owner_) {
      Throw(MakeError(
          absl::StatusCode::kFailedPrecondition, "PROCESS_FORKED",
          absl::StrCat("this ", kind_, " was made by process ", owner_, " and used by its child ",
                       getpid(), "; make it after the fork, or start processes by spawn")));
    }
    return value_;
  }

  // Idempotent. Needs the GIL.
  void Close() {
    std::shared_ptr<T> value = std::exchange(value_, nullptr);
    if (value == nullptr) return;
    if (getpid() != owner_) {
      new std::shared_ptr<T>(std::move(value));  // kept for ever, see invariant 2
      return;
    }
    const pybind11::gil_scoped_release release;
    value.reset();
  }

  bool is_closed() const { return value_ == nullptr; }

 private:
  std::shared_ptr<T> value_;
  const char* const kind_;
  const pid_t owner_;
};

// f(object) without the GIL. The reference is dropped before the GIL is taken again, so that an
// object that was closed meanwhile ends without it. What `f` returns is no Python object.
template <typename T, typename Function>
auto WithoutGil(const Owned<T>& owned, const Function& f) {
  std::shared_ptr<T> value = owned.Get();
  const pybind11::gil_scoped_release release;
  const std::shared_ptr<T> held = std::move(value);
  return f(*held);
}

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

// Leased blocks by key, without token ids: no reads are made of them.
struct BlockChainState {
  std::shared_ptr<client::Worker> worker;
  absl::Mutex mutex;  // one call at a time
  std::unique_ptr<client::Sequence> sequence ABSL_GUARDED_BY(mutex);
};

// Blocks in staging slots; they end before the worker does.
struct StagedState {
  std::shared_ptr<client::Worker> worker;
  client::StagedBlocks blocks;  // one call at a time, which the GIL orders
};

using PyWorker = Owned<client::Worker>;
using PySequence = Owned<SequenceState>;
using PyBlockChain = Owned<BlockChainState>;
using PyStaged = Owned<StagedState>;
using PyPagedCache = std::shared_ptr<client::PagedCache>;
using PyRequest = Owned<client::Request>;
using PyAttention = Owned<AttentionState>;

void DefineSpec(pybind11::module_& module);
void DefineClient(pybind11::module_& module);
void DefineBlockChain(pybind11::module_& module);
void DefinePagedCache(pybind11::module_& module);
void DefineRequest(pybind11::module_& module);
void DefineAttention(pybind11::module_& module);

// Functions of Worker in block_chain.cc.
std::vector<pybind11::bytes> BlockKeys(const PyWorker& self, const pybind11::object& token_ids,
                                       const std::vector<pybind11::bytes>& extra_keys,
                                       const pybind11::bytes& parent, int32_t rank);
std::unique_ptr<PyBlockChain> LookupBlocks(const PyWorker& self,
                                           const std::vector<pybind11::bytes>& keys);

// Functions of Worker in paged_cache.cc.
std::unique_ptr<PyStaged> StageBlocks(const PyWorker& self, const client::PagedCache& cache,
                                      const pybind11::object& pages, int64_t first_token,
                                      int32_t block_count);
// A block table: a sequence of Python integers, or an int32 array.
std::vector<int32_t> Pages(const pybind11::object& object);

// Of block_chain.cc. Throws InvalidArgument [DIGEST_SIZE].
std::vector<BlockKey> KeysOf(const std::vector<pybind11::bytes>& keys);

// Throws InvalidArgument [CACHE_SPEC_INVALID]. `spec` is a certkv.CacheSpec.
CacheSpec SpecOf(const pybind11::object& spec);
// `options` is the dict that certkv.Client makes.
client::Options OptionsOf(const pybind11::dict& options);

}  // namespace certkv::python

#endif  // CERTKV_CLIENTS_PYTHON_NATIVE_OBJECTS_H_
