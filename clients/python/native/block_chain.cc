// BlockChain: leased blocks by key, copied whole, for engines that keep a cache of their own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/cpp/block_copy.h"
#include "clients/python/native/array.h"
#include "clients/python/native/objects.h"
#include "kernels/core/block_key.h"
#include "kernels/core/limits.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

[[noreturn]] void KeysInvalid(const std::string& message) {
  Throw(MakeError(absl::StatusCode::kInvalidArgument, "BLOCK_KEYS_INVALID", message));
}

// The shape of blocks: {block count, elements of one}.
std::vector<int64_t> BlocksShape(const CacheSpec& spec, int64_t block_count) {
  return {block_count, client::BlockElements(spec)};
}

constexpr char kBlocksAxes[] =
    "blocks, and the elements of one: layers, KV heads, (keys, values), tokens, channels";

Array BorrowBlocks(const CacheSpec& spec, const py::handle& object, int64_t block_count) {
  Array blocks(object, "blocks");
  blocks.CheckDtype({Dtype::kUint16});
  blocks.CheckShape(BlocksShape(spec, block_count), kBlocksAxes);
  return blocks;
}

void Append(const PyBlockChain& self, const std::vector<py::bytes>& keys,
            const py::object& blocks) {
  const std::vector<BlockKey> block_keys = KeysOf(keys);
  const CacheSpec& spec = self.Get()->worker->spec();
  const Array borrowed = BorrowBlocks(spec, blocks, static_cast<int64_t>(keys.size()));
  std::vector<const uint16_t*> originals;
  for (size_t i = 0; i < keys.size(); ++i) {
    originals.push_back(static_cast<const uint16_t*>(borrowed.data()) +
                        static_cast<int64_t>(i) * client::BlockElements(spec));
  }
  WithoutGil(self, [&](BlockChainState& state) {
    const absl::MutexLock lock(&state.mutex);
    ThrowIfError(state.worker->AppendBlocks(*state.sequence, block_keys, originals));
  });
}

void Copy(const PyBlockChain& self, int64_t first_block, const py::object& out, bool quantized) {
  const CacheSpec& spec = self.Get()->worker->spec();
  Array array(out, "out");
  array.CheckDtype({Dtype::kUint16});
  array.CheckShape(BlocksShape(spec, -1), kBlocksAxes);
  auto* destination = static_cast<uint16_t*>(array.MutableData());
  const auto source = quantized ? client::BlockSource::kQuantized : client::BlockSource::kOriginal;
  const int64_t block_count = array.shape()[0];
  WithoutGil(self, [&](BlockChainState& state) {
    const absl::MutexLock lock(&state.mutex);
    for (int64_t i = 0; i < block_count; ++i) {
      ThrowIfError(client::CopyBlock(*state.worker, *state.sequence, first_block + i, source,
                                     destination + i * client::BlockElements(spec)));
    }
  });
}

// A number of a chain, read under its lock.
template <typename Function>
auto Locked(const Function& f) {
  return [f](const PyBlockChain& self) {
    return WithoutGil(self, [&f](BlockChainState& state) {
      const absl::MutexLock lock(&state.mutex);
      return f(*state.sequence);
    });
  };
}

void AppendPaged(const PyBlockChain& self, const std::vector<py::bytes>& keys,
                 const client::PagedCache& cache, const py::object& pages) {
  const std::vector<BlockKey> block_keys = KeysOf(keys);
  const std::vector<int32_t> table = Pages(pages);
  WithoutGil(self, [&](BlockChainState& state) {
    const absl::MutexLock lock(&state.mutex);
    ThrowIfError(state.worker->AppendPaged(*state.sequence, block_keys, cache, table));
  });
}

void AppendStaged(const PyBlockChain& self, const std::vector<py::bytes>& keys, PyStaged* staged) {
  const std::vector<BlockKey> block_keys = KeysOf(keys);
  self.Get();  // refuses while the blocks are the caller's
  const std::shared_ptr<StagedState> blocks = staged->Get();
  staged->Close();
  WithoutGil(self, [&](BlockChainState& state) {
    const absl::MutexLock lock(&state.mutex);
    ThrowIfError(
        state.worker->AppendStaged(*state.sequence, block_keys, std::move(blocks->blocks)));
  });
}

}  // namespace

std::vector<BlockKey> KeysOf(const std::vector<py::bytes>& keys) {
  std::vector<BlockKey> out;
  out.reserve(keys.size());
  for (const py::bytes& key : keys) {
    out.push_back(ValueOrThrow(BlockKeyFromBytes(std::string(key))));
  }
  return out;
}

std::vector<py::bytes> BlockKeys(const PyWorker& self, const py::object& token_ids,
                                 const std::vector<py::bytes>& extra_keys, const py::bytes& parent,
                                 int32_t rank) {
  const std::vector<int32_t> ids = TokenIds(token_ids);
  const std::shared_ptr<client::Worker> worker = self.Get();
  const int32_t block_tokens = worker->spec().block_tokens;
  const size_t block_count = ids.size() / block_tokens;
  if (!extra_keys.empty() && extra_keys.size() != block_count) {
    KeysInvalid(absl::StrCat("extra_keys has ", extra_keys.size(), " entries for ", block_count,
                             " whole blocks of ", block_tokens, " tokens; one for each, or none"));
  }
  if (rank < 0) KeysInvalid(absl::StrCat("rank is ", rank, ", must be >= 0"));
  const BlockKeyContext context = worker->KeyContext(rank);
  const std::string parent_bytes = parent;
  BlockKey key;
  if (!parent_bytes.empty()) key = ValueOrThrow(BlockKeyFromBytes(parent_bytes));
  std::vector<py::bytes> keys;
  for (size_t i = 0; i < block_count; ++i) {
    const std::string extra = extra_keys.empty() ? "" : std::string(extra_keys[i]);
    if (extra.size() > static_cast<size_t>(kExtraKeyBytesMax)) {
      KeysInvalid(absl::StrCat("extra_keys[", i, "] has ", extra.size(), " bytes, at most ",
                               kExtraKeyBytesMax, "; pass a digest of it"));
    }
    key = ComputeBlockKey(context, key,
                          absl::MakeConstSpan(ids).subspan(i * block_tokens, block_tokens), extra);
    keys.emplace_back(key.view().data(), key.view().size());
  }
  return keys;
}

std::unique_ptr<PyBlockChain> LookupBlocks(const PyWorker& self,
                                           const std::vector<py::bytes>& keys) {
  const std::vector<BlockKey> block_keys = KeysOf(keys);
  auto state = std::make_shared<BlockChainState>();
  state->worker = self.Get();
  state->sequence = WithoutGil(
      self, [&](client::Worker& worker) { return ValueOrThrow(worker.LookupBlocks(block_keys)); });
  return std::make_unique<PyBlockChain>(std::move(state), "BlockChain");
}

void DefineBlockChain(py::module_& module) {
  py::class_<PyBlockChain>(module, "BlockChain")
      .def("append", &Append)
      .def("append_paged", &AppendPaged)
      .def("append_staged", &AppendStaged)
      .def("copy", &Copy)
      .def("block_count",
           Locked([](const client::Sequence& sequence) { return sequence.blocks().size(); }))
      .def("shared_block_count",
           Locked([](const client::Sequence& sequence) { return sequence.shared_block_count(); }))
      .def("check_lease",
           Locked([](const client::Sequence& sequence) { ThrowIfError(sequence.CheckLease()); }))
      .def("close", &PyBlockChain::Close)
      .def_property_readonly("is_closed", &PyBlockChain::is_closed);
  module.def("block_elements",
             [](const py::object& spec) { return client::BlockElements(SpecOf(spec)); });
}

}  // namespace certkv::python
