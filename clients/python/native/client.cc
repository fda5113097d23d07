// Client and Sequence: what a Worker does, over borrowed arrays.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/python/native/array.h"
#include "clients/python/native/numpy_array.h"
#include "clients/python/native/objects.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

// Borrowed keys and values of all layers, and the pointers that a Worker takes.
struct Layers {
  std::vector<Array> arrays;
  std::vector<client::LayerKv> pointers;
};

// `layers` is a sequence of (keys, values). `leading` is the token axis: {token_count}, or {} for
// one token.
Layers BorrowLayers(const CacheSpec& spec, const py::sequence& layers,
                    const std::vector<int64_t>& leading) {
  const bool is_f16 = spec.original_dtype == OriginalDtype::kF16;
  const std::vector<Dtype> dtypes = {is_f16 ? Dtype::kFloat16 : Dtype::kBfloat16, Dtype::kUint16};
  Layers out;
  const auto borrow = [&](const py::handle& array, const char* what, int32_t channels) {
    Array borrowed(array, absl::StrCat(what, " of layer ", out.pointers.size()));
    borrowed.CheckDtype(dtypes);
    std::vector<int64_t> shape = leading;
    shape.insert(shape.end(), {spec.kv_head_count, channels});
    borrowed.CheckShape(
        shape, leading.empty() ? "KV heads, channels; of one token" : "tokens, KV heads, channels");
    out.arrays.push_back(std::move(borrowed));
    return static_cast<const uint16_t*>(out.arrays.back().data());
  };
  for (const py::handle layer : layers) {
    const bool is_pair = (py::isinstance<py::tuple>(layer) || py::isinstance<py::list>(layer)) &&
                         py::len(layer) == 2;
    if (!is_pair) {
      Throw(MakeError(
          absl::StatusCode::kInvalidArgument, "ARRAY_INVALID",
          absl::StrCat("layers[", out.pointers.size(), "] must be a pair (keys, values)")));
    }
    const auto pair = py::reinterpret_borrow<py::sequence>(layer);
    const uint16_t* keys = borrow(pair[0], "keys", spec.head_dim);
    const uint16_t* values = borrow(pair[1], "values", spec.value_dim);
    out.pointers.push_back({keys, values});
  }
  return out;
}

std::unique_ptr<PyWorker> Attach(const py::object& spec, const py::dict& options) {
  const CacheSpec cache = SpecOf(spec);
  const client::Options services = OptionsOf(options);
  std::shared_ptr<client::Worker> worker;
  {
    const py::gil_scoped_release release;
    worker = ValueOrThrow(client::Worker::Attach(services, cache));
  }
  return std::make_unique<PyWorker>(std::move(worker), "Client");
}

// Takes over a sequence of a worker.
std::unique_ptr<PySequence> WrapSequence(const PyWorker& worker,
                                         std::unique_ptr<client::Sequence> sequence,
                                         std::vector<int32_t> token_ids) {
  auto state = std::make_shared<SequenceState>();
  state->worker = worker.Get();
  token_ids.resize(sequence->token_count());
  state->sequence = std::move(sequence);
  state->token_ids = std::move(token_ids);
  return std::make_unique<PySequence>(std::move(state), "Sequence");
}

std::unique_ptr<PySequence> PutSequence(const PyWorker& self, const py::object& token_ids,
                                        const py::sequence& layers) {
  std::vector<int32_t> ids = TokenIds(token_ids);
  const CacheSpec& spec = self.Get()->spec();
  const Layers borrowed = BorrowLayers(spec, layers, {static_cast<int64_t>(ids.size())});
  auto sequence = WithoutGil(self, [&](client::Worker& worker) {
    return ValueOrThrow(
        worker.PutSequence(ids, borrowed.pointers, client::DefaultKeyContext(worker.spec())));
  });
  return WrapSequence(self, std::move(sequence), std::move(ids));
}

std::unique_ptr<PySequence> Lookup(const PyWorker& self, const py::object& token_ids) {
  std::vector<int32_t> ids = TokenIds(token_ids);
  auto sequence = WithoutGil(self, [&](client::Worker& worker) {
    return ValueOrThrow(worker.Lookup(ids, client::DefaultKeyContext(worker.spec())));
  });
  return WrapSequence(self, std::move(sequence), std::move(ids));
}

// `order` is a number of client::PullOrder; certkv/_client.py has its names.
std::unique_ptr<PySequence> Pull(const PyWorker& self, const std::string& peer,
                                 const py::object& token_ids, uint8_t order) {
  std::vector<int32_t> ids = TokenIds(token_ids);
  auto sequence = WithoutGil(self, [&](client::Worker& worker) {
    return ValueOrThrow(worker.Pull(peer, ids, client::DefaultKeyContext(worker.spec()),
                                    static_cast<client::PullOrder>(order)));
  });
  return WrapSequence(self, std::move(sequence), std::move(ids));
}

std::unique_ptr<PySequence> PutPaged(const PyWorker& self, const py::object& token_ids,
                                     const client::PagedCache& cache, const py::object& pages) {
  std::vector<int32_t> ids = TokenIds(token_ids);
  const std::vector<int32_t> table = Pages(pages);
  auto sequence = WithoutGil(self, [&](client::Worker& worker) {
    return ValueOrThrow(
        worker.PutPaged(ids, cache, table, client::DefaultKeyContext(worker.spec())));
  });
  return WrapSequence(self, std::move(sequence), std::move(ids));
}

void AppendToken(const PySequence& self, int32_t token_id, const py::sequence& layers) {
  const Layers borrowed = BorrowLayers(self.Get()->worker->spec(), layers, {});
  WithoutGil(self, [&](SequenceState& state) {
    const absl::MutexLock lock(&state.mutex);
    client::Worker& worker = *state.worker;
    state.token_ids.push_back(token_id);
    const absl::Status status =
        worker.AppendToken(*state.sequence, state.token_ids, borrowed.pointers,
                           client::DefaultKeyContext(worker.spec()));
    // After a failure the sequence has fewer tokens than were asked for.
    state.token_ids.resize(state.sequence->token_count());
    ThrowIfError(status);
  });
}

void BeginToken(const PySequence& self, int32_t token_id) {
  WithoutGil(self, [&](SequenceState& state) {
    const absl::MutexLock lock(&state.mutex);
    ThrowIfError(state.worker->BeginToken(*state.sequence));
    state.token_ids.push_back(token_id);
  });
}

void WriteLayer(const PySequence& self, int32_t layer, const py::object& keys,
                const py::object& values) {
  const CacheSpec& spec = self.Get()->worker->spec();
  const Layers borrowed = BorrowLayers(spec, py::make_tuple(py::make_tuple(keys, values)), {});
  WithoutGil(self, [&](SequenceState& state) {
    const absl::MutexLock lock(&state.mutex);
    ThrowIfError(state.worker->WriteLayer(*state.sequence, layer, borrowed.pointers[0]));
  });
}

void FinishToken(const PySequence& self) {
  WithoutGil(self, [&](SequenceState& state) {
    const absl::MutexLock lock(&state.mutex);
    const absl::Status status = state.worker->FinishToken(
        *state.sequence, state.token_ids, client::DefaultKeyContext(state.worker->spec()));
    state.token_ids.resize(state.sequence->token_count());
    ThrowIfError(status);
  });
}

// A read-only array over mapped memory, which keeps lease and map while it lives.
py::object MappedArray(const std::shared_ptr<SequenceState>& state, const uint8_t* data,
                       std::vector<int64_t> shape, int64_t head_stride) {
  const bool is_f16 = state->worker->spec().original_dtype == OriginalDtype::kF16;
  const int64_t row_bytes = 2 * shape[2];
  return ReadOnlyArrayOver(data,
                           {.dtype = py::str(is_f16 ? "float16" : "uint16"),
                            .shape = std::move(shape),
                            .strides_bytes = {head_stride, row_bytes, 2}},
                           std::make_shared<PySequence>(state, "Sequence"));
}

py::tuple Originals(const PySequence& self, int32_t layer, int64_t block) {
  const std::shared_ptr<SequenceState> state = self.Get();
  const client::Worker& worker = *state->worker;
  const CacheSpec& spec = worker.spec();
  BlockHandle handle;
  WithoutGil(self, [&](SequenceState& locked) {
    const absl::MutexLock lock(&locked.mutex);
    ThrowIfError(locked.sequence->CheckLease());
    const auto blocks = static_cast<int64_t>(locked.sequence->blocks().size());
    if (!(layer >= 0 && layer < spec.layer_count() && block >= 0 && block < blocks)) {
      Throw(MakeError(
          absl::StatusCode::kInvalidArgument, "READ_INVALID",
          absl::StrCat("originals of layer ", layer, " and block ", block, ", must be in [0, ",
                       spec.layer_count(), ") and [0, ", blocks, "); the tail has no block yet")));
    }
    handle = locked.sequence->blocks()[block];
  });
  if (!handle.backing.present()) {
    Throw(MakeError(absl::StatusCode::kFailedPrecondition, "ORIGINAL_MISSING",
                    absl::StrCat("the originals of block ", block,
                                 " are not in memory; look the sequence up again")));
  }
  const SlabLayout& layout = worker.backing_layout();
  const int32_t slot = handle.backing.slot;
  const int32_t other_head = spec.kv_head_count > 1 ? 1 : 0;
  const auto view = [&](int64_t offset, int64_t other_offset, int32_t channels) {
    return MappedArray(state, worker.backing_base() + offset,
                       {spec.kv_head_count, spec.block_tokens, channels}, other_offset - offset);
  };
  return py::make_tuple(view(layout.key_offset(slot, layer, 0),
                             layout.key_offset(slot, layer, other_head), spec.head_dim),
                        view(layout.value_offset(slot, layer, 0),
                             layout.value_offset(slot, layer, other_head), spec.value_dim));
}

// A number of a sequence, read under its lock.
template <typename Function>
auto Locked(const Function& f) {
  return [f](const PySequence& self) {
    return WithoutGil(self, [&f](SequenceState& state) {
      const absl::MutexLock lock(&state.mutex);
      return f(state);
    });
  };
}

}  // namespace

void DefineClient(py::module_& module) {
  module.def("attach", &Attach);
  py::class_<PyWorker>(module, "Worker")
      .def("put_sequence", &PutSequence)
      .def("put_paged", &PutPaged)
      .def("stage_blocks", &StageBlocks)
      .def("lookup", &Lookup)
      .def("pull", &Pull)
      .def("block_keys", &BlockKeys)
      .def("lookup_blocks", &LookupBlocks)
      .def("close", &PyWorker::Close)
      .def_property_readonly("is_closed", &PyWorker::is_closed);
  py::class_<PySequence>(module, "Sequence")
      .def("append", &AppendToken)
      .def("begin_token", &BeginToken)
      .def("write_layer", &WriteLayer)
      .def("finish_token", &FinishToken)
      .def("originals", &Originals)
      .def("pin",
           [](const PySequence& self, bool pinned, int64_t ttl_ms) {
             WithoutGil(self, [&](SequenceState& state) {
               const absl::MutexLock lock(&state.mutex);
               ThrowIfError(state.worker->PinSequence(*state.sequence, pinned, ttl_ms));
             });
           })
      .def("check_lease", Locked([](SequenceState& s) { ThrowIfError(s.sequence->CheckLease()); }))
      .def("token_ids", Locked([](SequenceState& s) { return s.token_ids; }))
      .def("token_count", Locked([](SequenceState& s) { return s.sequence->token_count(); }))
      .def("tail_count", Locked([](SequenceState& s) { return s.sequence->tail().token_count; }))
      .def("block_count", Locked([](SequenceState& s) { return s.sequence->blocks().size(); }))
      .def("shared_block_count",
           Locked([](SequenceState& s) { return s.sequence->shared_block_count(); }))
      .def("close", &PySequence::Close)
      .def_property_readonly("is_closed", &PySequence::is_closed);
}

}  // namespace certkv::python
