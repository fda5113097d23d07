#include "clients/cli/commands.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "clients/cli/calibrate_report.h"
#include "clients/cli/progress.h"
#include "clients/cli/spec_file.h"
#include "clients/cli/table.h"
#include "clients/cli/trace.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/request.h"
#include "clients/cpp/store_client.h"
#include "clients/cpp/worker.h"
#include "kernels/core/policy.h"
#include "kernels/core/status.h"
#include "services/common/random_id.h"

namespace certkv::cli {
namespace {

using client::Attention;
using client::ReadRequest;
using client::ReadResult;
using client::Request;
using client::Sequence;
using client::StoreClient;
using client::Worker;
using nlohmann::json;

// A trace in the store: the worker that put it and its sequence.
struct PutTrace {
  std::unique_ptr<Trace> trace;
  std::unique_ptr<Worker> worker;
  std::unique_ptr<Sequence> sequence;
};

template <typename Options>  // PutOptions, AttendOptions
absl::StatusOr<PutTrace> PutTraceFile(const client::Options& services, const Options& asked,
                                      const std::string& worker) {
  PutTrace put;
  CERTKV_ASSIGN_OR_RETURN(put.trace, Trace::Open(asked.trace_path));
  CERTKV_ASSIGN_OR_RETURN(const CacheSpec spec, SpecOf(*put.trace, asked.format, asked.spec_path));
  client::Options options = services;
  options.worker_name = worker;
  CERTKV_ASSIGN_OR_RETURN(put.worker, Worker::Attach(options, spec));
  CERTKV_ASSIGN_OR_RETURN(put.sequence,
                          put.worker->PutSequence(put.trace->token_ids(), put.trace->Layers(),
                                                  client::DefaultKeyContext(spec)));
  return put;
}

absl::Status Put(const GlobalOptions& global, const PutOptions& options) {
  const absl::Time start = absl::Now();
  CERTKV_ASSIGN_OR_RETURN(const PutTrace put, PutTraceFile(global.services, options, "certkv-put"));
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const auto blocks = static_cast<int64_t>(put.sequence->blocks().size());
  const int64_t original = blocks * put.worker->backing_layout().slot_bytes();
  const int64_t device = blocks * put.worker->device_layout().slot_bytes();
  const double capacity =
      static_cast<double>(original) / static_cast<double>(std::max<int64_t>(device, 1));
  const json data = {{"spec_digest", ToHex(put.worker->spec_digest().view())},
                     {"tokens", put.sequence->token_count()},
                     {"blocks", blocks},
                     {"blocks_shared", put.sequence->shared_block_count()},
                     {"original_bytes", original},
                     {"device_bytes", device},
                     {"capacity", capacity},
                     {"seconds", seconds}};
  Print(global, data,
        absl::StrCat(DescribeCacheSpec(put.worker->spec()), "\n",
                     FormatCount(put.sequence->token_count()), " tokens in ", blocks,
                     " whole blocks, ", put.sequence->shared_block_count(),
                     " of them already in the store; a tail of ", put.sequence->tail().token_count,
                     " tokens was dropped again\n", FormatBytes(device), " quantized, ",
                     FormatBytes(original), " original: ", FormatBound(capacity), "x, in ",
                     FormatNanoseconds(seconds * 1e9), "\n"));
  return absl::OkStatus();
}

absl::StatusOr<ReadMode> ParseMode(const std::string& name) {
  if (name == "enforce") return ReadMode::kEnforce;
  if (name == "observe") return ReadMode::kObserve;
  if (name == "exact") return ReadMode::kExact;
  return MakeError(absl::StatusCode::kInvalidArgument, "READ_MODE_UNKNOWN",
                   absl::StrCat("mode is '", name, "', must be enforce, observe or exact"));
}

absl::StatusOr<int32_t> FindQuery(const Trace& trace, int64_t position) {
  if (position < 0) return trace.query_count() - 1;
  const auto& positions = trace.query_positions();
  const auto found = std::find(positions.begin(), positions.end(), position);
  if (found != positions.end()) return static_cast<int32_t>(found - positions.begin());
  return MakeError(absl::StatusCode::kInvalidArgument, "POSITION_UNKNOWN",
                   absl::StrCat("the trace has no query at position ", position, ", only at ",
                                positions.front(), " to ", positions.back()));
}

json ToJson(const ReadCertificate& certificate) {
  return {{"layer", certificate.layer},
          {"query_head", certificate.query_head},
          {"query_position", certificate.query_position},
          {"worst_case_tv", certificate.worst_case_tv},
          {"first_worst_case_tv", certificate.first_worst_case_tv},
          {"value_term", certificate.value_term},
          {"output_error_bound", certificate.output_error_bound},
          {"rung", RungName(certificate.rung)},
          {"outcome", OutcomeName(certificate.outcome)},
          {"repair_bytes", certificate.repair_bytes},
          {"read_tokens", certificate.read_tokens},
          {"skipped_tokens", certificate.skipped_tokens},
          {"read_bytes", certificate.read_bytes},
          {"skipped_share", certificate.skipped_share}};
}

absl::Status AttendTrace(const GlobalOptions& global, const AttendOptions& options) {
  CERTKV_ASSIGN_OR_RETURN(const ReadMode mode, ParseMode(options.mode));
  CERTKV_ASSIGN_OR_RETURN(const PutTrace put,
                          PutTraceFile(global.services, options, "certkv-attend"));
  CERTKV_ASSIGN_OR_RETURN(const int32_t query, FindQuery(*put.trace, options.position));
  if (options.layer >= put.trace->layer_count()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "LAYER_UNKNOWN",
                     absl::StrCat("layer is ", options.layer, ", the trace has layers 0 to ",
                                  put.trace->layer_count() - 1));
  }
  Tolerances tolerances;
  // What isn't asked for is as loose as it can be: the policy's holds then.
  tolerances.tv_tolerance = options.tv_tolerance >= 0 ? options.tv_tolerance : 1.0f;
  tolerances.skip_tolerance = options.skip_tolerance >= 0 ? options.skip_tolerance : 0.99f;
  client::RequestOptions request_options;
  request_options.label = absl::StrCat("certkv attend ", options.trace_path);
  request_options.read_mode = mode;
  request_options.model = ModelLabel(put.trace->model());
  if (options.tv_tolerance >= 0 || options.skip_tolerance >= 0)
    request_options.tolerances = &tolerances;
  const std::string id =
      options.request_id.empty() ? absl::StrCat("cli-", RandomId() % 1000000) : options.request_id;
  CERTKV_ASSIGN_OR_RETURN(const std::unique_ptr<Request> request,
                          Request::Open(global.services, id, request_options));
  CERTKV_ASSIGN_OR_RETURN(const std::unique_ptr<Attention> attention,
                          Attention::Open(*put.worker, *put.sequence, *request));
  Table table;
  for (const char* title : {"layer", "head", "worst-case TV", "first read", "value term",
                            "output bound", "rung", "outcome", "re-read", "skipped"}) {
    table.AddColumn(title);
  }
  json data = {{"request", absl::StrCat("requests/", id)}, {"certificates", json::array()}};
  for (int32_t layer = 0; layer < put.trace->layer_count(); ++layer) {
    if (options.layer >= 0 && layer != options.layer) continue;
    const std::vector<float> queries = put.trace->Queries(layer, query);
    ReadRequest read;
    read.layer = layer;
    read.query_position = put.trace->query_positions()[query];
    read.queries = queries.data();
    CERTKV_ASSIGN_OR_RETURN(const std::vector<ReadResult> results, attention->Attend({read}));
    CERTKV_RETURN_IF_ERROR(results[0].status);
    for (const ReadCertificate& certificate : results[0].certificates) {
      data["certificates"].push_back(ToJson(certificate));
      table.AddRow(
          {absl::StrCat(certificate.layer), absl::StrCat(certificate.query_head),
           FormatBound(certificate.worst_case_tv), FormatBound(certificate.first_worst_case_tv),
           FormatBound(certificate.value_term), FormatBound(certificate.output_error_bound),
           RungName(certificate.rung), OutcomeName(certificate.outcome),
           FormatBytes(certificate.repair_bytes), FormatCount(certificate.skipped_tokens)});
    }
  }
  CERTKV_ASSIGN_OR_RETURN(const client::RiskSummary risk, request->Close());
  data["risk_score"] = risk.risk_score;
  Print(global, data,
        absl::StrCat(table.Render(), "requests/", id, ": ", risk.read_count,
                     " reads in gate's ledger, risk score ", FormatBound(risk.risk_score), "\n"));
  return absl::OkStatus();
}

// What each tenant has of a cache, as rows of `table` and as JSON.
json TenantsOf(const certkv::kvstore::v1::CacheStats& cache, Table* table) {
  json list = json::array();
  for (const auto& tenant : cache.tenants()) {
    std::vector<std::string> row = {absl::StrCat(cache.cache_id()),
                                    tenant.tenant().empty() ? "-" : tenant.tenant()};
    json entry = {{"tenant", tenant.tenant()}, {"pinned", tenant.pinned()}};
    for (const auto& [tier, share] :
         {std::pair("device", &tenant.device()), std::pair("backing", &tenant.backing())}) {
      for (const int32_t slots : {share->used(), share->guaranteed(), share->limit()}) {
        row.push_back(FormatCount(slots));
      }
      entry[tier] = {
          {"used", share->used()}, {"guaranteed", share->guaranteed()}, {"limit", share->limit()}};
    }
    row.push_back(FormatCount(tenant.pinned()));
    table->AddRow(row);
    list.push_back(entry);
  }
  return list;
}

Table MakeTenantTable() {
  Table table;
  for (const char* title : {"cache", "tenant"}) table.AddColumn(title, Table::Align::kLeft);
  for (const char* title :
       {"device used", "guaranteed", "limit", "backing used", "guaranteed", "limit", "pinned"}) {
    table.AddColumn(title);
  }
  return table;
}

absl::string_view SpillStateName(certkv::kvstore::v1::SpillState state) {
  switch (state) {
    case certkv::kvstore::v1::SPILL_STATE_WORKS:
      return "WORKS";
    case certkv::kvstore::v1::SPILL_STATE_OPENING:
      return "OPENING";
    default:
      return "DEGRADED";
  }
}

void AddMemoryAndDisk(const certkv::kvstore::v1::Stats& stats, json* data, std::string* text) {
  (*data)["memory_bytes"] = stats.memory_bytes();
  (*data)["memory_limit_bytes"] = stats.memory_limit_bytes();
  absl::StrAppend(text, "memory ", FormatBytes(stats.memory_bytes()),
                  stats.memory_limit_bytes() > 0
                      ? absl::StrCat(" of ", FormatBytes(stats.memory_limit_bytes()))
                      : "",
                  "\n");
  if (stats.has_spill()) {
    const auto& spill = stats.spill();
    const absl::string_view state = SpillStateName(spill.state());
    (*data)["spill"] = {{"state", state},
                        {"error", spill.error()},
                        {"blocks", spill.blocks()},
                        {"bytes", spill.bytes()},
                        {"write_errors", spill.write_errors()},
                        {"slow_calls", spill.slow_calls()}};
    absl::StrAppend(text, "disk ", state, ", ", FormatCount(spill.blocks()), " blocks, ",
                    FormatBytes(spill.bytes()), spill.error().empty() ? "" : ": ", spill.error(),
                    "\n");
  }
}

absl::Status Stats(const GlobalOptions& global) {
  StoreClient store(client::ResolveTargets(global.services));
  CERTKV_ASSIGN_OR_RETURN(const auto stats, store.GetStats());
  Table table;
  table.AddColumn("cache");
  table.AddColumn("spec", Table::Align::kLeft);
  for (const char* title :
       {"device slots", "backing slots", "leased", "pinned", "quantized", "original"}) {
    table.AddColumn(title);
  }
  Table tenants = MakeTenantTable();
  json data = {{"caches", json::array()}};
  for (const auto& cache : stats.caches()) {
    const int64_t device = cache.device_slots_used() * cache.device_slot_bytes();
    const int64_t backing = cache.backing_slots_used() * cache.backing_slot_bytes();
    table.AddRow({absl::StrCat(cache.cache_id()), cache.description(),
                  absl::StrCat(cache.device_slots_used(), " of ", cache.device_slot_count()),
                  absl::StrCat(cache.backing_slots_used(), " of ", cache.backing_slot_count()),
                  absl::StrCat(cache.blocks_leased()), absl::StrCat(cache.blocks_pinned()),
                  FormatBytes(device), FormatBytes(backing)});
    data["caches"].push_back({{"cache_id", cache.cache_id()},
                              {"description", cache.description()},
                              {"spec_digest", ToHex(cache.spec_digest())},
                              {"device_slots_used", cache.device_slots_used()},
                              {"device_slot_count", cache.device_slot_count()},
                              {"backing_slots_used", cache.backing_slots_used()},
                              {"backing_slot_count", cache.backing_slot_count()},
                              {"blocks_leased", cache.blocks_leased()},
                              {"blocks_pinned", cache.blocks_pinned()},
                              {"device_bytes", device},
                              {"backing_bytes", backing},
                              {"tenants", TenantsOf(cache, &tenants)}});
  }
  const std::vector<std::pair<const char*, int64_t>> counters = {
      {"sessions", stats.session_count()},
      {"leases", stats.lease_count()},
      {"blocks_sealed", stats.blocks_sealed()},
      {"blocks_shared", stats.blocks_shared()},
      {"blocks_demoted", stats.blocks_demoted()},
      {"blocks_promoted", stats.blocks_promoted()},
      {"blocks_evicted", stats.blocks_evicted()},
      {"blocks_aborted", stats.blocks_aborted()},
      {"lookups", stats.lookups()},
      {"lookup_blocks_asked", stats.lookup_blocks_asked()},
      {"lookup_blocks_found", stats.lookup_blocks_found()},
      {"leases_expired", stats.leases_expired()}};
  std::string text = absl::StrCat(table.Render(), "\n", tenants.Render(), "\n");
  for (const auto& [name, value] : counters) {
    data[name] = value;
    absl::StrAppend(&text, name, " ", FormatCount(value), "\n");
  }
  AddMemoryAndDisk(stats, &data, &text);
  Print(global, data, text);
  return absl::OkStatus();
}

absl::Status TraceInfo(const GlobalOptions& global, const std::string& path) {
  CERTKV_ASSIGN_OR_RETURN(const std::unique_ptr<Trace> trace, Trace::Open(path));
  const CacheSpec spec = trace->MakeSpec({});
  const auto& positions = trace->query_positions();
  const json data = {{"model", trace->model()},        {"license", trace->license()},
                     {"tokens", trace->token_count()}, {"layers", trace->layer_numbers()},
                     {"kv_heads", spec.kv_head_count}, {"query_heads", spec.query_head_count()},
                     {"head_dim", spec.head_dim},      {"logit_scale", spec.logit_scale},
                     {"query_positions", positions}};
  Print(global, data,
        absl::StrCat("model            ", trace->model(), " (", trace->license(), ")\n",
                     "tokens           ", FormatCount(trace->token_count()), "\n",
                     "layers           ", absl::StrJoin(trace->layer_numbers(), ", "), "\n",
                     "heads            ", spec.kv_head_count, " KV, ", spec.query_head_count(),
                     " query, d ", spec.head_dim, "\n", "logit scale      ", spec.logit_scale, "\n",
                     "query positions  ", positions.size(), ", from ", positions.front(), " to ",
                     positions.back(), "\n"));
  return absl::OkStatus();
}

}  // namespace

void Print(const GlobalOptions& global, const json& data, const std::string& text) {
  std::cout << (global.json ? data.dump(2) + "\n" : text) << std::flush;
}

int Fail(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  std::cerr << "error: " << absl::StatusCodeToString(status.code())
            << (reason.empty() ? "" : absl::StrCat(" [", reason, "]")) << " " << status.message()
            << std::endl;
  if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) return kExitUnavailable;
  return kExitFailed;
}

int RunPut(const GlobalOptions& global, const PutOptions& options) {
  const absl::Status status = Put(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

int RunAttend(const GlobalOptions& global, const AttendOptions& options) {
  const absl::Status status = AttendTrace(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

int RunStats(const GlobalOptions& global) {
  const absl::Status status = Stats(global);
  return status.ok() ? kExitOk : Fail(status);
}

int RunTraceInfo(const GlobalOptions& global, const std::string& path) {
  const absl::Status status = TraceInfo(global, path);
  return status.ok() ? kExitOk : Fail(status);
}

int RunTraceRecord(const std::vector<std::string>& arguments) {
  const char* named = std::getenv("CERTKV_PYTHON");
  std::vector<std::string> words = {named != nullptr ? named : "python3", "-m", "certkv.trace",
                                    "record"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  return Fail(MakeError(absl::StatusCode::kInternal, "SPAWN_FAILED",
                        absl::StrCat(words[0], " can't be started: ", std::strerror(errno),
                                     "; set CERTKV_PYTHON to a Python with the package certkv")));
}

}  // namespace certkv::cli
