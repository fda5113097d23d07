#include "services/gate/dashboard.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/gate/counters.h"
#include "services/gate/dashboard_files.h"
#include "services/gate/metrics.h"

namespace certkv::gate {
namespace {

using nlohmann::json;

constexpr int32_t kEventCount = 50;

HttpResponse Answer(int status, const json& body) {
  // A label that isn't UTF-8 must not make the answer fail. Infinities become null.
  return {.status = status,
          .content_type = "application/json",
          .body = body.dump(-1, ' ', false, json::error_handler_t::replace)};
}

HttpResponse Refusal(const absl::Status& status) {
  return Answer(absl::IsNotFound(status) ? 404 : 400,
                {{"error", absl::StrCat(ReasonOf(status), ": ", std::string(status.message()))}});
}

json EventJson(const RiskEvent& event) {
  return {{"time_ms", event.time_ms}, {"kind", event.kind}, {"message", event.message}};
}

json RiskJson(const RequestRisk& risk) {
  const RiskTotals& totals = risk.totals;
  int64_t repaired = 0;
  for (int rung = static_cast<int>(Rung::kValues); rung <= static_cast<int>(Rung::kLayer); ++rung) {
    repaired += totals.reads_by_rung[rung];
  }
  return {{"name", risk.request},
          {"label", risk.label},
          {"tenant", risk.tenant},
          {"model", risk.model},
          {"closed", risk.closed},
          {"score", risk.score},
          {"max", totals.sums.tv_max},
          {"sum", totals.sums.tv_sum},
          {"reads", totals.sums.read_count},
          {"repaired", repaired},
          {"failed_reads", totals.failed_read_count},
          {"outside_tolerance", totals.reads_outside_tolerance},
          {"canary_checks", totals.canary_checks},
          {"canary_mismatches", totals.canary_mismatches},
          {"repair_bytes", totals.repair_bytes},
          {"forced_exact", risk.forced_exact},
          {"tv_tolerance", risk.tolerances.tv_tolerance},
          {"read_mode", ReadModeName(risk.read_mode)},
          {"risk_mode", RiskModeName(risk.risk_mode)},
          {"budget", risk.budget},
          {"budget_committed", risk.budget_committed},
          {"open_time_ms", risk.open_time_ms},
          {"update_time_ms", risk.update_time_ms}};
}

json TimelineJson(const RiskTimeline& timeline) {
  json buckets = json::array();
  for (const RiskTimeline::Bucket& bucket : timeline.buckets()) {
    buckets.push_back({{"reads", bucket.reads},
                       {"repairs", bucket.repairs},
                       {"first_max", bucket.first_tv_max},
                       {"max", bucket.served_tv_max},
                       {"repair_bytes", bucket.repair_bytes}});
  }
  return {{"begin_ms", timeline.begin_ms()},
          {"bucket_ms", timeline.bucket_ms()},
          {"buckets", std::move(buckets)}};
}

HttpResponse AnswerRequest(const RequestRegistry& registry, const std::string& id) {
  const auto risk = registry.GetRisk(absl::StrCat(kRequestNamePrefix, id), /*all_heads=*/true);
  if (!risk.ok()) return Refusal(risk.status());
  json body = RiskJson(*risk);
  body["heads"] = json::array();
  for (const HeadRisk& head : risk->heads) {
    body["heads"].push_back({{"layer", head.layer},
                             {"query_head", head.query_head},
                             {"reads", head.sums.read_count},
                             {"max", head.sums.tv_max},
                             {"sum", head.sums.tv_sum}});
  }
  body["worst_reads"] = json::array();
  for (const WorstRead& read : risk->worst_reads) {
    body["worst_reads"].push_back({{"layer", read.layer},
                                   {"query_head", read.query_head},
                                   {"query_position", read.query_position},
                                   {"first", read.first_worst_case_tv},
                                   {"served", read.worst_case_tv},
                                   {"rung", RungName(read.rung)},
                                   {"outcome", OutcomeName(read.outcome)}});
  }
  body["events"] = json::array();
  for (const RiskEvent& event : risk->events) body["events"].push_back(EventJson(event));
  body["timeline"] = TimelineJson(risk->timeline);
  return Answer(200, body);
}

HttpResponse AnswerList(const RequestRegistry& registry, const HttpRequest& request) {
  const auto text = [&request](const char* name) {
    const auto found = request.query.find(name);
    return found == request.query.end() ? std::string() : found->second;
  };
  const std::pair<const char*, RiskOrder> orders[] = {{"score", RiskOrder::kScore},
                                                      {"sum", RiskOrder::kSum},
                                                      {"repair_bytes", RiskOrder::kRepairBytes},
                                                      {"budget_share", RiskOrder::kBudgetShare},
                                                      {"update_time", RiskOrder::kUpdateTime}};
  RiskQuery query;
  if (!text("page_size").empty() && !absl::SimpleAtoi(text("page_size"), &query.page_size)) {
    query.page_size = -1;  // refused below
  }
  for (const auto& [name, order] : orders) {
    if (text("order") == name) query.order = order;
  }
  query.page_token = text("page_token");
  query.filter.label_part = text("label");
  query.filter.tenant = text("tenant");
  query.filter.include_closed = text("closed") == "1";
  query.filter.only_troubled = text("troubled") == "1";
  const auto page = registry.ListRisks(query);
  if (!page.ok()) return Refusal(page.status());
  json requests = json::array();
  for (const RequestRisk& risk : page->risks) requests.push_back(RiskJson(risk));
  return Answer(200, {{"requests", std::move(requests)},
                      {"next_page_token", page->next_page_token},
                      {"request_count", page->request_count}});
}

json StoreJson(const StoreSummary& store) {
  json caches = json::array();
  for (const StoreSummary::Cache& cache : store.caches) {
    caches.push_back({{"description", cache.description},
                      {"device_used", cache.device_used_bytes},
                      {"device_capacity", cache.device_capacity_bytes},
                      {"device_block_bytes", cache.device_block_bytes},
                      {"backing_used", cache.backing_used_bytes},
                      {"backing_capacity", cache.backing_capacity_bytes},
                      {"backing_block_bytes", cache.backing_block_bytes},
                      {"blocks_leased", cache.blocks_leased},
                      {"blocks_pinned", cache.blocks_pinned}});
  }
  return {{"known", store.known},
          {"error", store.error},
          {"caches", std::move(caches)},
          {"disk_bytes", store.disk_bytes},
          {"sessions", store.session_count},
          {"leases", store.lease_count},
          {"asked", store.blocks_asked},
          {"found", store.blocks_found}};
}

HttpResponse AnswerOverview(const RequestRegistry& registry, const Clock& clock,
                            const StoreSummary& store) {
  const GateCounters& counters = registry.counters();
  json formats = json::array();
  for (const FormatReads& reads : ReadsByFormat(counters)) {
    json rungs;
    for (int rung = 1; rung < GateCounters::kRungCount; ++rung) {
      rungs[RungName(static_cast<Rung>(rung))] = reads.by_rung[rung];
    }
    formats.push_back({{"name", FormatName(reads.key_format, reads.value_format)},
                       {"total", reads.total()},
                       {"rungs", std::move(rungs)}});
  }
  json tenants = json::array();
  for (const TenantStanding& tenant : registry.Tenants()) {
    tenants.push_back(
        {{"tenant", tenant.tenant}, {"budget", tenant.budget}, {"committed", tenant.committed}});
  }
  const Policy policy = registry.policy();
  const RegistrySizes sizes = registry.sizes();
  return Answer(200, {{"now_ms", clock.NowMs()},
                      {"policy", {{"version", policy.version}, {"text", DescribePolicy(policy)}}},
                      {"requests", {{"open", sizes.open}, {"closed", sizes.closed}}},
                      {"formats", std::move(formats)},
                      {"tenants", std::move(tenants)},
                      {"failed_reads", counters.failed_reads.load()},
                      {"outside_tolerance", counters.reads_outside_tolerance.load()},
                      {"canary_mismatches", counters.canary_mismatches.load()},
                      {"repair_bytes", counters.repair_bytes.load()},
                      {"store", StoreJson(store)}});
}

HttpResponse AnswerEvents(const RequestRegistry& registry) {
  json events = json::array();
  for (const NamedEvent& named : registry.ListEvents(0, kEventCount)) {
    json event = EventJson(named.event);
    event["request"] = named.request;
    events.push_back(std::move(event));
  }
  return Answer(200, {{"events", std::move(events)}});
}

HttpRoute FileRoute(const std::string& path, const std::string& file, const std::string& type) {
  return {.path = path, .is_open = true, .handler = [file, type](const HttpRequest&) {
            const absl::string_view bytes = DashboardFile("dashboard/" + file);
            return HttpResponse{.content_type = type, .body = std::string(bytes)};
          }};
}

}  // namespace

std::vector<HttpRoute> DashboardRoutes(const RequestRegistry* registry, const Clock* clock,
                                       std::function<StoreSummary()> store) {
  std::vector<HttpRoute> routes = {
      FileRoute("/", "index.html", "text/html; charset=utf-8"),
      FileRoute("/app.js", "app.js", "text/javascript; charset=utf-8"),
      FileRoute("/charts.js", "charts.js", "text/javascript; charset=utf-8"),
      FileRoute("/style.css", "style.css", "text/css; charset=utf-8"),
      FileRoute("/icon.svg", "icon.svg", "image/svg+xml")};
  routes.push_back({.path = "/api/overview",
                    .is_open = false,
                    .handler = [registry, clock, store = std::move(store)](const HttpRequest&) {
                      return AnswerOverview(*registry, *clock, store());
                    }});
  routes.push_back({.path = "/api/requests",
                    .is_open = false,
                    .handler = [registry](const HttpRequest& request) {
                      return AnswerList(*registry, request);
                    }});
  const std::string folder = "/api/requests/";
  routes.push_back(
      {.path = folder, .is_open = false, .handler = [registry, folder](const HttpRequest& request) {
         return AnswerRequest(*registry, request.path.substr(folder.size()));
       }});
  routes.push_back({.path = "/api/events",
                    .is_open = false,
                    .handler = [registry](const HttpRequest&) { return AnswerEvents(*registry); }});
  return routes;
}

}  // namespace certkv::gate
