// Attentions of certkv.h.
#include "clients/cpp/attention.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "clients/c/boundary.h"
#include "clients/c/certkv.h"
#include "clients/c/convert.h"
#include "clients/c/handles.h"
#include "kernels/core/status.h"

namespace certkv::capi {
namespace {

constexpr int32_t kReadsPerCallMax = 4096;

// Outputs of one read, of all query heads.
size_t OutputCount(const CacheSpec& spec) {
  return static_cast<size_t>(spec.query_head_count()) * spec.value_dim;
}

absl::StatusOr<client::ReadRequest> ReadOf(const certkv_read* read, size_t stride,
                                           absl::string_view name) {
  CERTKV_ASSIGN_OR_RETURN(const certkv_read in, ReadStruct(read, name));
  if (in.struct_size != stride) {
    return MakeError(absl::StatusCode::kInvalidArgument, "STRUCT_SIZE_INVALID",
                     absl::StrCat(name, " has struct_size ", in.struct_size, ", that of the first ",
                                  "is ", stride, "; all of an array have the same"));
  }
  CERTKV_RETURN_IF_ERROR(RequirePointer(in.queries, absl::StrCat(name, ".queries")));
  client::ReadRequest out;
  out.layer = in.layer;
  out.query_position = in.query_position;
  out.queries = in.queries;
  out.sink_logits = in.sink_logits;
  return out;
}

absl::Status CheckResult(const certkv_read_result* result, size_t stride, absl::string_view name) {
  CERTKV_ASSIGN_OR_RETURN(const certkv_read_result in, ReadStruct(result, name));
  CERTKV_RETURN_IF_ERROR(RequirePointer(in.outputs, absl::StrCat(name, ".outputs")));
  const bool fits =
      in.certificates == nullptr || in.certificate_size >= kFirstBytes<certkv_certificate>;
  if (in.struct_size == stride && fits) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "STRUCT_SIZE_INVALID",
                   absl::StrCat(name, " has struct_size ", in.struct_size, " and certificate_size ",
                                in.certificate_size, ", must be ", stride,
                                ", as the first of the array, and sizeof(certkv_certificate)"));
}

// The certificates of all heads, into the caller's array.
void WriteCertificates(const std::vector<ReadCertificate>& certificates,
                       const certkv_read_result& to) {
  for (size_t head = 0; head < certificates.size(); ++head) {
    const certkv_certificate record = CertificateOf(certificates[head]);
    std::memcpy(ElementAt(to.certificates, to.certificate_size, static_cast<int32_t>(head)),
                &record, std::min(to.certificate_size, sizeof(record)));
  }
}

void WriteResult(const CacheSpec& spec, const client::ReadResult& from, certkv_read_result* to) {
  certkv_read_result out{};
  std::memcpy(&out, to, std::min(to->struct_size, sizeof(out)));
  out.read_time_ns = from.read_time_ns;
  out.status = static_cast<int32_t>(from.status.code());
  out.is_in_process = from.in_process ? 1 : 0;
  out.is_canary = from.canary ? 1 : 0;
  CopyText(ReasonOf(from.status), out.reason, sizeof(out.reason));
  CopyText(from.status.message(), out.message, sizeof(out.message));
  if (from.status.ok()) {
    std::copy(from.outputs.begin(), from.outputs.end(), out.outputs);
    if (out.certificates != nullptr) WriteCertificates(from.certificates, out);
  } else {
    std::fill_n(out.outputs, OutputCount(spec), std::numeric_limits<float>::quiet_NaN());
  }
  WriteStruct(out, to);
}

// What the canary looks at of a read: that it succeeded, and its bounds.
absl::StatusOr<client::ReadResult> UsedResultOf(const certkv_read_result* result,
                                                int32_t head_count) {
  CERTKV_ASSIGN_OR_RETURN(const certkv_read_result in, ReadStruct(result, "result"));
  CERTKV_RETURN_IF_ERROR(RequirePointer(in.certificates, "result.certificates"));
  CERTKV_RETURN_IF_ERROR(CheckResult(result, in.struct_size, "result"));
  client::ReadResult out;
  if (in.status != CERTKV_OK) {
    out.status = MakeError(absl::StatusCode::kUnknown, "READ_FAILED", "the read failed");
  }
  for (int32_t head = 0; head < head_count; ++head) {
    ReadCertificate certificate;
    certificate.output_error_bound =
        ElementAt(in.certificates, in.certificate_size, head)->output_error_bound;
    out.certificates.push_back(certificate);
  }
  return out;
}

// function(AttentionState&) under its sequence's lock.
template <typename Function>
certkv_status RunLocked(certkv_attention* attention, const Function& function) {
  return RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(CheckHandle(attention, "attention"));
    AttentionState& state = *attention->value;
    const absl::MutexLock lock(&state.sequence->mutex);
    return function(state);
  });
}

absl::Status Attend(AttentionState& state, const certkv_read* reads, int32_t read_count,
                    certkv_read_result* results) {
  CERTKV_RETURN_IF_ERROR(RequirePointer(reads, "reads"));
  CERTKV_RETURN_IF_ERROR(RequirePointer(results, "results"));
  if (!(read_count >= 1 && read_count <= kReadsPerCallMax)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "READ_INVALID",
        absl::StrCat("read_count is ", read_count, ", must be in [1, ", kReadsPerCallMax, "]"));
  }
  const size_t read_stride = reads->struct_size;
  const size_t result_stride = results->struct_size;
  std::vector<client::ReadRequest> requests;
  for (int32_t i = 0; i < read_count; ++i) {
    CERTKV_ASSIGN_OR_RETURN(
        const client::ReadRequest request,
        ReadOf(ElementAt(reads, read_stride, i), read_stride, absl::StrCat("reads[", i, "]")));
    requests.push_back(request);
    CERTKV_RETURN_IF_ERROR(CheckResult(ElementAt(results, result_stride, i), result_stride,
                                       absl::StrCat("results[", i, "]")));
  }
  CERTKV_ASSIGN_OR_RETURN(const auto answered, state.attention->Attend(requests));
  absl::Status first_error;
  for (int32_t i = 0; i < read_count; ++i) {
    WriteResult(state.sequence->worker->spec(), answered[i], ElementAt(results, result_stride, i));
    first_error.Update(answered[i].status);
  }
  return first_error;
}

}  // namespace
}  // namespace certkv::capi

namespace capi = certkv::capi;

certkv_status certkv_attention_open(certkv_sequence* sequence, certkv_request* request,
                                    certkv_attention** attention) {
  return capi::RunGuarded([&]() -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(sequence, "sequence"));
    CERTKV_RETURN_IF_ERROR(capi::CheckHandle(request, "request"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(attention, "attention"));
    auto state = std::make_shared<capi::AttentionState>();
    state->sequence = sequence->value;
    state->request = request->value;
    {
      const absl::MutexLock lock(&state->sequence->mutex);
      CERTKV_ASSIGN_OR_RETURN(state->attention, certkv::client::Attention::Open(
                                                    *state->sequence->worker,
                                                    *state->sequence->sequence, *state->request));
    }
    capi::MakeHandle(std::move(state), attention);
    return absl::OkStatus();
  });
}

void certkv_attention_close(certkv_attention* attention) { capi::CloseHandle(attention); }

certkv_status certkv_attention_refresh(certkv_attention* attention) {
  return capi::RunLocked(attention,
                         [](capi::AttentionState& state) { return state.attention->Refresh(); });
}

certkv_status certkv_attention_attend(certkv_attention* attention, const certkv_read* reads,
                                      int32_t read_count, certkv_read_result* results) {
  return capi::RunLocked(attention, [&](capi::AttentionState& state) {
    return capi::Attend(state, reads, read_count, results);
  });
}

certkv_status certkv_attention_check_used(certkv_attention* attention, const certkv_read* read,
                                          const certkv_read_result* result, const float* used) {
  return capi::RunLocked(attention, [&](capi::AttentionState& state) -> absl::Status {
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(read, "read"));
    CERTKV_RETURN_IF_ERROR(capi::RequirePointer(used, "used"));
    const certkv::CacheSpec& spec = state.sequence->worker->spec();
    CERTKV_ASSIGN_OR_RETURN(const certkv::client::ReadRequest request,
                            capi::ReadOf(read, read->struct_size, "read"));
    CERTKV_ASSIGN_OR_RETURN(const certkv::client::ReadResult looked_at,
                            capi::UsedResultOf(result, spec.query_head_count()));
    return state.attention->CheckUsed(request, looked_at,
                                      absl::MakeConstSpan(used, capi::OutputCount(spec)));
  });
}
