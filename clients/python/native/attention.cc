// Attention: certified reads, their outputs and records as arrays over the result's own memory.
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/python/native/array.h"
#include "clients/python/native/numpy_array.h"
#include "clients/python/native/objects.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

// A ReadCertificate as a row of a NumPy structured array; names and units are the same.
struct CertificateRow {
  int64_t query_position;
  int64_t repair_bytes;
  int64_t read_tokens;
  int64_t skipped_tokens;
  int64_t read_bytes;
  int32_t layer;
  int32_t query_head;
  float worst_case_tv;
  float value_term;
  float output_error_bound;
  float value_radius;
  float first_worst_case_tv;
  float failure_probability;
  float skipped_share;
  uint8_t rung;
  uint8_t outcome;
  uint8_t key_format;
  uint8_t value_format;
};

using ResultPointer = std::shared_ptr<client::ReadResult>;

CertificateRow RowOf(const ReadCertificate& c) {
  return {.query_position = c.query_position,
          .repair_bytes = c.repair_bytes,
          .read_tokens = c.read_tokens,
          .skipped_tokens = c.skipped_tokens,
          .read_bytes = c.read_bytes,
          .layer = c.layer,
          .query_head = c.query_head,
          .worst_case_tv = c.worst_case_tv,
          .value_term = c.value_term,
          .output_error_bound = c.output_error_bound,
          .value_radius = c.value_radius,
          .first_worst_case_tv = c.first_worst_case_tv,
          .failure_probability = c.failure_probability,
          .skipped_share = c.skipped_share,
          .rung = static_cast<uint8_t>(c.rung),
          .outcome = static_cast<uint8_t>(c.outcome),
          .key_format = c.key_format,
          .value_format = c.value_format};
}

// One read as Python holds it.
struct PyRead {
  ResultPointer result;
  int32_t query_head_count;
  int32_t value_dim;
};

// The outputs in place. Throws the read's own error: without OK there are none.
py::object OutputsOf(const PyRead& read) {
  ThrowIfError(read.result->status);
  return ArrayOver(read.result->outputs.data(),
                   {.dtype = py::str("float32"),
                    .shape = {read.query_head_count, read.value_dim},
                    .strides_bytes = {}},
                   read.result);
}

// numpy.dtype of CertificateRow.
py::object CertificateDtype() {
  struct Field {
    const char* name;
    const char* format;
    size_t offset;
  };
  static constexpr Field kFields[] = {
      {"query_position", "i8", offsetof(CertificateRow, query_position)},
      {"repair_bytes", "i8", offsetof(CertificateRow, repair_bytes)},
      {"read_tokens", "i8", offsetof(CertificateRow, read_tokens)},
      {"skipped_tokens", "i8", offsetof(CertificateRow, skipped_tokens)},
      {"read_bytes", "i8", offsetof(CertificateRow, read_bytes)},
      {"layer", "i4", offsetof(CertificateRow, layer)},
      {"query_head", "i4", offsetof(CertificateRow, query_head)},
      {"worst_case_tv", "f4", offsetof(CertificateRow, worst_case_tv)},
      {"value_term", "f4", offsetof(CertificateRow, value_term)},
      {"output_error_bound", "f4", offsetof(CertificateRow, output_error_bound)},
      {"value_radius", "f4", offsetof(CertificateRow, value_radius)},
      {"first_worst_case_tv", "f4", offsetof(CertificateRow, first_worst_case_tv)},
      {"failure_probability", "f4", offsetof(CertificateRow, failure_probability)},
      {"skipped_share", "f4", offsetof(CertificateRow, skipped_share)},
      {"rung", "u1", offsetof(CertificateRow, rung)},
      {"outcome", "u1", offsetof(CertificateRow, outcome)},
      {"key_format", "u1", offsetof(CertificateRow, key_format)},
      {"value_format", "u1", offsetof(CertificateRow, value_format)},
  };
  py::list names;
  py::list formats;
  py::list offsets;
  for (const Field& field : kFields) {
    names.append(field.name);
    formats.append(field.format);
    offsets.append(field.offset);
  }
  py::dict fields;
  fields["names"] = names;
  fields["formats"] = formats;
  fields["offsets"] = offsets;
  fields["itemsize"] = sizeof(CertificateRow);
  return py::module_::import("numpy").attr("dtype")(fields);
}

py::object CertificatesOf(const PyRead& read) {
  ThrowIfError(read.result->status);
  auto rows = std::make_shared<std::vector<CertificateRow>>();
  rows->reserve(read.result->certificates.size());
  for (const ReadCertificate& certificate : read.result->certificates) {
    rows->push_back(RowOf(certificate));
  }
  return ArrayOver(rows->data(),
                   {.dtype = py::module_::import("certkv._native").attr("CERTIFICATE_DTYPE"),
                    .shape = {static_cast<int64_t>(rows->size())},
                    .strides_bytes = {}},
                   rows);
}

// Borrowed queries of some reads, and the requests that point at them.
struct Reads {
  std::vector<Array> arrays;
  std::vector<client::ReadRequest> requests;
};

// `reads` is a sequence of (layer, query_position, queries, sink_logits or None).
Reads BorrowReads(const CacheSpec& spec, const py::sequence& reads) {
  Reads out;
  out.arrays.reserve(2 * py::len(reads));
  const auto borrow = [&](const py::handle& array, const char* what,
                          const std::vector<int64_t>& shape, const char* axes) {
    Array borrowed(array, absl::StrCat(what, " of read ", out.requests.size()));
    borrowed.CheckDtype({Dtype::kFloat32});
    borrowed.CheckShape(shape, axes);
    out.arrays.push_back(std::move(borrowed));
    return static_cast<const float*>(out.arrays.back().data());
  };
  for (const py::handle item : reads) {
    const auto read = py::reinterpret_borrow<py::tuple>(item);
    client::ReadRequest request;
    request.layer = py::cast<int32_t>(read[0]);
    request.query_position = py::cast<int64_t>(read[1]);
    request.queries = borrow(read[2], "queries", {spec.query_head_count(), spec.head_dim},
                             "query heads, channels");
    if (!read[3].is_none()) {
      request.sink_logits =
          borrow(read[3], "sink_logits", {spec.query_head_count()}, "query heads");
    }
    out.requests.push_back(request);
  }
  return out;
}

py::list WrapResults(const CacheSpec& spec, std::vector<client::ReadResult> results) {
  py::list out;
  for (client::ReadResult& result : results) {
    out.append(PyRead{std::make_shared<client::ReadResult>(std::move(result)),
                      spec.query_head_count(), spec.value_dim});
  }
  return out;
}

std::unique_ptr<PyAttention> Open(const PySequence& sequence, const PyRequest& request) {
  auto state = std::make_shared<AttentionState>();
  state->sequence = sequence.Get();
  state->request = request.Get();
  {
    const py::gil_scoped_release release;
    const absl::MutexLock lock(&state->sequence->mutex);
    state->attention = ValueOrThrow(client::Attention::Open(
        *state->sequence->worker, *state->sequence->sequence, *state->request));
  }
  return std::make_unique<PyAttention>(std::move(state), "Attention");
}

py::list Attend(const PyAttention& self, const py::sequence& reads) {
  const std::shared_ptr<client::Worker> worker = self.Get()->sequence->worker;
  const Reads borrowed = BorrowReads(worker->spec(), reads);
  auto results = WithoutGil(self, [&](AttentionState& state) {
    const absl::MutexLock lock(&state.sequence->mutex);
    return ValueOrThrow(state.attention->Attend(borrowed.requests));
  });
  return WrapResults(worker->spec(), std::move(results));
}

py::list AttendExact(const PySequence& self, const py::sequence& reads) {
  const std::shared_ptr<client::Worker> worker = self.Get()->worker;
  const Reads borrowed = BorrowReads(worker->spec(), reads);
  auto results = WithoutGil(self, [&](SequenceState& state) {
    const absl::MutexLock lock(&state.mutex);
    std::vector<client::ReadResult> read;
    for (const client::ReadRequest& request : borrowed.requests) {
      read.push_back(
          ValueOrThrow(client::AttendExactInProcess(*state.worker, *state.sequence, request)));
    }
    return read;
  });
  return WrapResults(worker->spec(), std::move(results));
}

void CheckUsed(const PyAttention& self, const py::sequence& reads, const PyRead& read,
               const py::object& used) {
  const std::shared_ptr<client::Worker> worker = self.Get()->sequence->worker;
  const Reads borrowed = BorrowReads(worker->spec(), reads);
  const Array outputs(used, "used");
  outputs.CheckDtype({Dtype::kFloat32});
  outputs.CheckShape({read.query_head_count, read.value_dim}, "query heads, channels");
  WithoutGil(self, [&](AttentionState& state) {
    const absl::MutexLock lock(&state.sequence->mutex);
    const absl::Span<const float> numbers(
        static_cast<const float*>(outputs.data()),
        static_cast<size_t>(read.query_head_count) * read.value_dim);
    ThrowIfError(state.attention->CheckUsed(borrowed.requests[0], *read.result, numbers));
  });
}

py::object ErrorOf(const PyRead& read) {
  return read.result->status.ok() ? py::none() : ExceptionOf(read.result->status);
}

}  // namespace

void DefineAttention(py::module_& module) {
  module.attr("CERTIFICATE_DTYPE") = CertificateDtype();
  module.def("open_attention", &Open);
  module.def("attend_exact", &AttendExact);
  py::class_<PyRead>(module, "Read")
      .def("outputs", &OutputsOf)
      .def("certificates", &CertificatesOf)
      .def("error", &ErrorOf)
      .def_property_readonly("in_process", [](const PyRead& r) { return r.result->in_process; })
      .def_property_readonly("canary", [](const PyRead& r) { return r.result->canary; })
      .def_property_readonly("read_time_ns",
                             [](const PyRead& r) { return r.result->read_time_ns; });
  py::class_<PyAttention>(module, "Attention")
      .def("attend", &Attend)
      .def("check_used", &CheckUsed)
      .def("refresh",
           [](const PyAttention& self) {
             WithoutGil(self, [](AttentionState& state) {
               const absl::MutexLock lock(&state.sequence->mutex);
               ThrowIfError(state.attention->Refresh());
             });
           })
      .def("close", &PyAttention::Close)
      .def_property_readonly("is_closed", &PyAttention::is_closed);
}

}  // namespace certkv::python
