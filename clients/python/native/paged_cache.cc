// PagedCache and StagedBlocks: blocks sealed straight from an engine's pages.
#include "clients/cpp/paged_cache.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/python/native/array.h"
#include "clients/python/native/objects.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

std::vector<Dtype> DtypesOf(PagedDtype dtype) {
  switch (dtype) {
    case PagedDtype::kF16:
      return {Dtype::kFloat16, Dtype::kUint16};
    case PagedDtype::kBf16:
      return {Dtype::kBfloat16, Dtype::kUint16};
    case PagedDtype::kFp8E4m3:
      return {Dtype::kUint8};
  }
  return {};
}

PagedDtype DtypeOf(const std::string& name) {
  if (name == "float16") return PagedDtype::kF16;
  if (name == "bfloat16") return PagedDtype::kBf16;
  if (name == "float8_e4m3") return PagedDtype::kFp8E4m3;
  Throw(MakeError(absl::StatusCode::kInvalidArgument, "PAGED_CACHE_INVALID",
                  absl::StrCat("dtype is '", name,
                               "', must be float16, bfloat16 or float8_e4m3; pass the cache's")));
}

// The array's memory is its own from the first to the last element.
PagedTensor TensorOf(const Array& array, PagedDtype dtype) {
  const int64_t element_bytes = PagedElementBytes(dtype);
  PagedTensor tensor;
  tensor.data = array.data();
  tensor.shape = array.shape();
  for (const int64_t stride : array.strides_bytes()) {
    if (stride % element_bytes != 0) {
      Throw(MakeError(
          absl::StatusCode::kInvalidArgument, "PAGED_CACHE_INVALID",
          absl::StrCat("a tensor has a stride of ", stride, " bytes, which is no multiple of its ",
                       element_bytes, " byte elements; pass the engine's own tensor")));
    }
    tensor.strides.push_back(stride / element_bytes);
  }
  return tensor;
}

PageOrder OrderOf(const py::object& order, const char* what) {
  if (order.is_none()) return {};
  const auto pair = py::cast<std::pair<py::object, py::object>>(order);
  const auto places = [what](const py::object& object) {
    const Array array(object, absl::StrCat("the order of ", what));
    array.CheckDtype({Dtype::kInt32});
    array.CheckShape({-1}, "places of a page's numbers");
    const auto* const numbers = static_cast<const int32_t*>(array.data());
    return std::vector<int32_t>(numbers, numbers + array.shape()[0]);
  };
  return {places(pair.first), places(pair.second)};
}

PyPagedCache MakePagedCache(const py::object& spec, const std::string& axes,
                            const std::string& dtype, const std::vector<py::object>& tensors,
                            const std::vector<float>& key_scales,
                            const std::vector<float>& value_scales, const py::object& key_order,
                            const py::object& value_order) {
  const CacheSpec cache_spec = SpecOf(spec);
  client::PagedCacheOptions options;
  options.axes = axes;
  options.dtype = DtypeOf(dtype);
  options.key_scales = key_scales;
  options.value_scales = value_scales;
  options.key_order = OrderOf(key_order, "keys");
  options.value_order = OrderOf(value_order, "values");
  // The caller keeps the arrays; what a view borrowed here is given back when this returns.
  std::vector<Array> borrowed;
  for (size_t i = 0; i < tensors.size(); ++i) {
    borrowed.emplace_back(tensors[i], absl::StrCat("tensor ", i), Array::Strides::kAny);
    borrowed.back().CheckDtype(DtypesOf(options.dtype));
    options.tensors.push_back(TensorOf(borrowed.back(), options.dtype));
  }
  const py::gil_scoped_release release;
  return ValueOrThrow(client::PagedCache::Create(cache_spec, options));
}

void DropFirst(PyStaged* self, int32_t count) {
  WithoutGil(*self, [count](StagedState& state) { state.blocks.DropFirst(count); });
}

}  // namespace

std::vector<int32_t> Pages(const py::object& object) {
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    return py::cast<std::vector<int32_t>>(object);
  }
  const Array array(object, "pages");
  array.CheckDtype({Dtype::kInt32});
  array.CheckShape({-1}, "one page for each page_tokens tokens");
  const auto* const pages = static_cast<const int32_t*>(array.data());
  return std::vector<int32_t>(pages, pages + array.shape()[0]);
}

std::unique_ptr<PyStaged> StageBlocks(const PyWorker& self, const client::PagedCache& cache,
                                      const py::object& pages, int64_t first_token,
                                      int32_t block_count) {
  const std::vector<int32_t> table = Pages(pages);
  std::shared_ptr<client::Worker> worker = self.Get();
  auto blocks = WithoutGil(self, [&](client::Worker& held) {
    return ValueOrThrow(held.StageBlocks(cache, table, first_token, block_count));
  });
  auto state = std::make_shared<StagedState>(StagedState{std::move(worker), std::move(blocks)});
  return std::make_unique<PyStaged>(std::move(state), "StagedBlocks");
}

void DefinePagedCache(py::module_& module) {
  py::class_<client::PagedCache, PyPagedCache>(module, "PagedCache")
      .def("page_tokens", &client::PagedCache::page_tokens)
      .def("page_count", &client::PagedCache::page_count);
  module.def("paged_cache", &MakePagedCache);
  py::class_<PyStaged>(module, "StagedBlocks")
      .def("block_count", [](const PyStaged& self) { return self.Get()->blocks.block_count(); })
      .def("drop_first", &DropFirst)
      .def("close", &PyStaged::Close)
      .def_property_readonly("is_closed", &PyStaged::is_closed);
}

}  // namespace certkv::python
