// Requests of certkv.h.
#include "clients/cpp/request.h"

#include <memory>
#include <utility>

#include "clients/c/boundary.h"
#include "clients/c/certkv.h"
#include "clients/c/convert.h"
#include "clients/c/handles.h"
#include "kernels/core/status.h"

namespace capi = certkv::capi;

certkv_status certkv_request_open(const certkv_options* options, const char* request_id,
                                  const certkv_request_terms* terms, certkv_request** request) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(request_id, "request_id"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(request, "request"));
    CERTKV_ASSIGN_OR_RETURN(const certkv::client::Options services, capi::OptionsOf(options));
    CERTKV_ASSIGN_OR_RETURN(capi::RequestTerms asked, capi::TermsOf(terms));
    if (asked.has_tolerances) asked.options.tolerances = &asked.tolerances;
    CERTKV_ASSIGN_OR_RETURN(auto opened,
                            certkv::client::Request::Open(services, request_id, asked.options));
    capi::MakeHandle(std::shared_ptr<certkv::client::Request>(std::move(opened)), request);
    return absl::OkStatus();
  });
}

certkv_status certkv_request_open_ungoverned(const char* request_id, certkv_request** request) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(request_id, "request_id"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(request, "request"));
    capi::MakeHandle(
        std::shared_ptr<certkv::client::Request>(certkv::client::Request::Ungoverned(request_id)),
        request);
    return absl::OkStatus();
  });
}

certkv_status certkv_request_flush(certkv_request* request) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(request, "request"));
    return request->value->Flush();
  });
}

certkv_status certkv_request_get_risk(certkv_request* request, certkv_risk* risk) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(request, "request"));
    CERTKV_RETURN_IF_ERROR(capi::ReadStruct(risk, "risk").status());
    CERTKV_ASSIGN_OR_RETURN(const auto summary, request->value->Risk());
    capi::WriteStruct(capi::RiskOf(summary), risk);
    return absl::OkStatus();
  });
}

certkv_status certkv_request_finish(certkv_request* request, certkv_risk* risk) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(request, "request"));
    if (risk != nullptr) CERTKV_RETURN_IF_ERROR(capi::ReadStruct(risk, "risk").status());
    CERTKV_ASSIGN_OR_RETURN(const auto summary, request->value->Close());
    if (risk != nullptr) capi::WriteStruct(capi::RiskOf(summary), risk);
    return absl::OkStatus();
  });
}

void certkv_request_close(certkv_request* request) { capi::CloseHandle(request); }
