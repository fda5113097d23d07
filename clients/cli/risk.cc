// `certkv risk`: what gate knows, the riskiest request first.
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cli/commands.h"
#include "clients/cli/heat_map.h"
#include "clients/cli/table.h"
#include "clients/cpp/rpc.h"
#include "kernels/core/policy.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

namespace v1 = certkv::gate::v1;
using nlohmann::json;

constexpr size_t kHeadsShown = 16;
constexpr int kHeatMapColumns = 136;

json ToJson(const v1::RequestRisk& risk) {
  json heads = json::array();
  for (const auto& head : risk.heads()) {
    heads.push_back(
        {{"layer", head.layer()},
         {"query_head", head.query_head()},
         {"read_count", head.read_count()},
         {"max_worst_case_tv", head.max_worst_case_tv()},
         {"sum_worst_case_tv", head.sum_worst_case_tv()},
         {"histogram", std::vector<int64_t>(head.histogram().begin(), head.histogram().end())}});
  }
  json worst_reads = json::array();
  for (const auto& read : risk.worst_reads()) {
    worst_reads.push_back({{"layer", read.layer()},
                           {"query_head", read.query_head()},
                           {"query_position", read.query_position()},
                           {"first_worst_case_tv", read.first_worst_case_tv()},
                           {"worst_case_tv", read.worst_case_tv()},
                           {"rung", RungName(static_cast<Rung>(read.rung()))},
                           {"outcome", OutcomeName(static_cast<Outcome>(read.outcome()))}});
  }
  return {{"request", risk.request()},
          {"label", risk.label()},
          {"closed", risk.closed()},
          {"risk_score", risk.risk_score()},
          {"read_count", risk.read_count()},
          {"failed_read_count", risk.failed_read_count()},
          {"max_worst_case_tv", risk.max_worst_case_tv()},
          {"sum_worst_case_tv", risk.sum_worst_case_tv()},
          {"budget", risk.budget()},
          {"budget_committed", risk.budget_committed()},
          {"budget_left", risk.budget_left()},
          {"counts_one_replica", risk.counts_one_replica()},
          {"loss_bound", risk.loss_bound()},
          {"tenant", risk.tenant()},
          {"model", risk.model()},
          {"read_mode", ReadModeName(static_cast<ReadMode>(risk.read_mode()))},
          {"risk_mode", RiskModeName(static_cast<RiskMode>(risk.risk_mode()))},
          {"worst_reads", worst_reads},
          {"reads_certified_first", risk.reads_certified_first()},
          {"repairs",
           {{"values", risk.reads_repaired_values()},
            {"keys", risk.reads_repaired_keys()},
            {"head", risk.reads_repaired_head()},
            {"layer", risk.reads_repaired_layer()}}},
          {"reads_exact", risk.reads_exact()},
          {"reads_observed", risk.reads_observed()},
          {"repair_bytes", risk.repair_bytes()},
          {"max_output_error_bound", risk.max_output_error_bound()},
          {"heads", heads}};
}

void AddColumns(Table& table) {
  table.AddColumn("request", Table::Align::kLeft);
  table.AddColumn("risk", Table::Align::kLeft);
  for (const char* title : {"score", "reads", "failed", "served max TV", "served sum TV",
                            "repaired", "exact", "observed", "re-read"}) {
    table.AddColumn(title);
  }
  table.AddColumn("state", Table::Align::kLeft);
}

void AddRow(Table& table, const v1::RequestRisk& risk) {
  table.AddRow({risk.request(), Bar(risk.risk_score(), 12), FormatBound(risk.risk_score()),
                FormatCount(risk.read_count()), FormatCount(risk.failed_read_count()),
                FormatBound(risk.max_worst_case_tv()), FormatBound(risk.sum_worst_case_tv()),
                FormatCount(risk.reads_repaired_values() + risk.reads_repaired_keys() +
                            risk.reads_repaired_head() + risk.reads_repaired_layer()),
                FormatCount(risk.reads_exact()), FormatCount(risk.reads_observed()),
                FormatBytes(risk.repair_bytes()), risk.closed() ? "closed" : "open"});
}

void Print(const GlobalOptions& global, const v1::RequestRisk& risk) {
  if (global.json) {
    std::cout << ToJson(risk).dump() << std::endl;
    return;
  }
  Table summary;
  AddColumns(summary);
  AddRow(summary, risk);
  if (risk.budget() > 0) {
    std::cout << RiskModeName(static_cast<RiskMode>(risk.risk_mode())) << " budget "
              << FormatBound(risk.budget()) << ", " << FormatBound(risk.budget_committed())
              << " of it given away\n";
  }
  if (risk.counts_one_replica()) {
    std::cout << "gate runs in replicas: budget of all, counts of the one that answered\n";
  }
  Table worst;
  for (const char* title : {"position", "layer", "head", "first TV", "served TV"}) {
    worst.AddColumn(title);
  }
  for (const char* title : {"repaired", "outcome"}) worst.AddColumn(title, Table::Align::kLeft);
  for (const auto& read : risk.worst_reads()) {
    worst.AddRow({FormatCount(read.query_position()), absl::StrCat(read.layer()),
                  absl::StrCat(read.query_head()), FormatBound(read.first_worst_case_tv()),
                  FormatBound(read.worst_case_tv()), RungName(static_cast<Rung>(read.rung())),
                  OutcomeName(static_cast<Outcome>(read.outcome()))});
  }
  Table heads;
  for (const char* title : {"layer", "head", "reads", "max TV", "sum TV"}) heads.AddColumn(title);
  heads.AddColumn("reads by TV", Table::Align::kLeft);
  std::vector<const v1::HeadRisk*> riskiest;
  for (const auto& head : risk.heads()) riskiest.push_back(&head);
  std::stable_sort(riskiest.begin(), riskiest.end(),
                   [](const v1::HeadRisk* a, const v1::HeadRisk* b) {
                     return a->max_worst_case_tv() > b->max_worst_case_tv();
                   });
  if (riskiest.size() > kHeadsShown) riskiest.resize(kHeadsShown);
  for (const v1::HeadRisk* one : riskiest) {
    const v1::HeadRisk& head = *one;
    std::string histogram;
    const char* const heights[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    const int64_t largest =
        std::max<int64_t>(1, *std::max_element(head.histogram().begin(), head.histogram().end()));
    for (const int64_t count : head.histogram()) {
      histogram += heights[count == 0 ? 0 : std::max<int64_t>(1, count * 8 / largest)];
    }
    heads.AddRow({absl::StrCat(head.layer()), absl::StrCat(head.query_head()),
                  FormatCount(head.read_count()), FormatBound(head.max_worst_case_tv()),
                  FormatBound(head.sum_worst_case_tv()), histogram});
  }
  std::cout << summary.Render() << "\n"
            << HeatMap(risk, WantsColor(), kHeatMapColumns) << "\nworst reads\n"
            << worst.Render() << "\nriskiest heads\n"
            << heads.Render() << std::flush;
}

std::string RequestName(const std::string& id) {
  return id.rfind("requests/", 0) == 0 ? id : absl::StrCat("requests/", id);
}

absl::Status Watch(const GlobalOptions& global, v1::Gate::Stub& stub, const std::string& id) {
  grpc::ClientContext context;
  v1::WatchRequestRiskRequest request;
  request.set_request(RequestName(id));
  const auto stream = stub.WatchRequestRisk(&context, request);
  v1::RequestRisk risk;
  while (stream->Read(&risk)) Print(global, risk);
  return FromGrpcStatus(stream->Finish());
}

absl::Status ShowOne(const GlobalOptions& global, v1::Gate::Stub& stub, const std::string& id) {
  v1::GetRequestRiskRequest request;
  request.set_request(RequestName(id));
  request.set_all_heads(true);
  v1::RequestRisk risk;
  CERTKV_RETURN_IF_ERROR(client::CallUnary(
      global.services.rpc_timeout_ms, client::Retry::kIdempotent,
      [&](grpc::ClientContext& context) { return stub.GetRequestRisk(&context, request, &risk); }));
  Print(global, risk);
  return absl::OkStatus();
}

absl::Status ShowList(const GlobalOptions& global, v1::Gate::Stub& stub,
                      const RiskOptions& options) {
  v1::ListRequestRisksRequest request;
  request.set_page_size(options.limit);
  request.set_include_closed(options.include_closed);
  v1::ListRequestRisksResponse response;
  CERTKV_RETURN_IF_ERROR(
      client::CallUnary(global.services.rpc_timeout_ms, client::Retry::kIdempotent,
                        [&](grpc::ClientContext& context) {
                          return stub.ListRequestRisks(&context, request, &response);
                        }));
  json data = {{"risks", json::array()}, {"more", !response.next_page_token().empty()}};
  Table table;
  AddColumns(table);
  for (const auto& risk : response.risks()) {
    data["risks"].push_back(ToJson(risk));
    AddRow(table, risk);
  }
  std::cout << (global.json ? data.dump(2) + "\n" : table.Render()) << std::flush;
  if (!global.json && !response.next_page_token().empty()) {
    std::cout << "more requests: raise --limit\n";
  }
  return absl::OkStatus();
}

}  // namespace

int RunRisk(const GlobalOptions& global, const RiskOptions& options) {
  const auto stub = v1::Gate::NewStub(
      client::MakeChannel(client::ResolveTargets(global.services).gate_target, global.services));
  absl::Status status;
  if (options.request_id.empty()) {
    status = ShowList(global, *stub, options);
  } else if (options.watch) {
    status = Watch(global, *stub, options.request_id);
  } else {
    status = ShowOne(global, *stub, options.request_id);
  }
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace certkv::cli
