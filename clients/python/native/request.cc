// Request: a request's account at gate.
#include <pybind11/pybind11.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "clients/python/native/objects.h"
#include "kernels/core/policy.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

ReadMode ReadModeOf(const std::string& name) {
  for (const ReadMode mode : {ReadMode::kEnforce, ReadMode::kObserve, ReadMode::kExact}) {
    if (name == ReadModeName(mode)) return mode;
  }
  Throw(MakeError(absl::StatusCode::kInvalidArgument, "READ_MODE_UNKNOWN",
                  absl::StrCat("read_mode is '", name, "', must be ENFORCE, OBSERVE or EXACT")));
}

std::unique_ptr<PyRequest> Open(const py::dict& options, const std::string& request_id,
                                const py::dict& terms) {
  const client::Options services = OptionsOf(options);
  client::RequestOptions request_options;
  request_options.label = py::cast<std::string>(terms["label"]);
  request_options.read_mode = ReadModeOf(py::cast<std::string>(terms["read_mode"]));
  request_options.tenant = py::cast<std::string>(terms["tenant"]);
  request_options.model = py::cast<std::string>(terms["model"]);
  request_options.traceparent = py::cast<std::string>(terms["traceparent"]);
  Tolerances tolerances;
  if (!terms["tolerances"].is_none()) {
    const py::dict given = terms["tolerances"];
    tolerances.tv_tolerance = py::cast<float>(given["tv_tolerance"]);
    tolerances.value_tolerance = py::cast<float>(given["value_tolerance"]);
    tolerances.output_tolerance = py::cast<float>(given["output_tolerance"]);
    tolerances.skip_tolerance = py::cast<float>(given["skip_tolerance"]);
    ThrowIfError(ValidateTolerances(tolerances));
    request_options.tolerances = &tolerances;
  }
  std::shared_ptr<client::Request> request;
  {
    const py::gil_scoped_release release;
    request = ValueOrThrow(client::Request::Open(services, request_id, request_options));
  }
  return std::make_unique<PyRequest>(std::move(request), "Request");
}

py::dict RiskDict(const client::RiskSummary& risk) {
  using py::arg;
  return py::dict(
      arg("request") = risk.request, arg("closed") = risk.closed,
      arg("read_count") = risk.read_count, arg("failed_read_count") = risk.failed_read_count,
      arg("risk_score") = risk.risk_score, arg("max_worst_case_tv") = risk.max_worst_case_tv,
      arg("sum_worst_case_tv") = risk.sum_worst_case_tv,
      arg("reads_certified_first") = risk.reads_certified_first,
      arg("reads_repaired_values") = risk.reads_repaired_values,
      arg("reads_repaired_keys") = risk.reads_repaired_keys,
      arg("reads_repaired_head") = risk.reads_repaired_head,
      arg("reads_repaired_layer") = risk.reads_repaired_layer,
      arg("reads_exact") = risk.reads_exact, arg("reads_observed") = risk.reads_observed,
      arg("repair_bytes") = risk.repair_bytes, arg("canary_checks") = risk.canary_checks,
      arg("canary_mismatches") = risk.canary_mismatches, arg("budget") = risk.budget,
      arg("budget_committed") = risk.budget_committed);
}

}  // namespace

void DefineRequest(py::module_& module) {
  module.def("open_request", &Open);
  module.def("ungoverned_request", [](const std::string& request_id) {
    return std::make_unique<PyRequest>(client::Request::Ungoverned(request_id), "Request");
  });
  py::class_<PyRequest>(module, "Request")
      .def("risk",
           [](const PyRequest& self) {
             return RiskDict(WithoutGil(
                 self, [](client::Request& request) { return ValueOrThrow(request.Risk()); }));
           })
      .def("flush",
           [](const PyRequest& self) {
             WithoutGil(self, [](client::Request& request) { ThrowIfError(request.Flush()); });
           })
      .def("finish",
           [](PyRequest& self) {
             const client::RiskSummary risk = WithoutGil(
                 self, [](client::Request& request) { return ValueOrThrow(request.Close()); });
             self.Close();
             return RiskDict(risk);
           })
      .def("close", &PyRequest::Close)
      .def_property_readonly("is_closed", &PyRequest::is_closed);
}

}  // namespace certkv::python
