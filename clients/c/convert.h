// Structs of certkv.h as the C++ client has them, and back.
#ifndef CERTKV_CLIENTS_C_CONVERT_H_
#define CERTKV_CLIENTS_C_CONVERT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/c/certkv.h"
#include "clients/cpp/options.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/policy.h"

namespace certkv::capi {

// Errors of all: InvalidArgument [ARGUMENT_MISSING | STRUCT_SIZE_INVALID], and those named.

std::string TextOf(const char* text);  // NULL = ""

absl::StatusOr<client::Options> OptionsOf(const certkv_options* options);
// InvalidArgument [CACHE_SPEC_INVALID].
absl::StatusOr<CacheSpec> SpecOf(const certkv_cache_spec* spec);
// Pointers of all layers. InvalidArgument [SEQUENCE_INVALID], not as many as the spec has.
absl::StatusOr<std::vector<client::LayerKv>> LayersOf(const certkv_layer_kv* layers,
                                                      int32_t layer_count, const CacheSpec& spec);

// A request's terms, and the tolerances that they may point at.
struct RequestTerms {
  client::RequestOptions options;
  Tolerances tolerances;
  bool has_tolerances = false;
};
// NULL = defaults. InvalidArgument [TOLERANCE_INVALID | READ_MODE_UNKNOWN].
absl::StatusOr<RequestTerms> TermsOf(const certkv_request_terms* terms);

certkv_certificate CertificateOf(const ReadCertificate& certificate);
certkv_risk RiskOf(const client::RiskSummary& risk);

}  // namespace certkv::capi

#endif  // CERTKV_CLIENTS_C_CONVERT_H_
