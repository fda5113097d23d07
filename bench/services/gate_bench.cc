// certkv-bench-gate: how many certificates per second gate counts, what a request costs in memory,
// and what Decide and the lists take, with many live requests.
//
// Two ways in: the engine alone (threads call RequestRegistry::Report), and the service over a Unix
// socket (threads write batches to Report streams; server and clients share the machine's cores).
#include <grpcpp/grpcpp.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/kernels/bench_report.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "kernels/core/check.h"
#include "services/common/clock.h"
#include "services/common/convert.h"
#include "services/common/http_server.h"
#include "services/common/log.h"
#include "services/common/server_runner.h"
#include "services/gate/dashboard.h"
#include "services/gate/request_registry.h"
#include "services/gate/service.h"

ABSL_FLAG(int32_t, requests, 100'000, "live requests");
ABSL_FLAG(int32_t, threads, 2, "threads that report");
ABSL_FLAG(int32_t, seconds, 5, "seconds of each measurement");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

namespace v1 = gate::v1;

// One step of the demo's model: 30 layers, 9 query heads.
constexpr int32_t kLayers = 30;
constexpr int32_t kQueryHeads = 9;
constexpr int32_t kHeads = kLayers * kQueryHeads;

std::vector<ReadCertificate> Step(uint32_t seed) {
  std::vector<ReadCertificate> reads;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    for (int32_t head = 0; head < kQueryHeads; ++head) {
      ReadCertificate read;
      read.layer = layer;
      read.query_head = head;
      read.query_position = 1000 + seed % 1000;
      seed = seed * 1664525u + 1013904223u;
      read.worst_case_tv = 0.1f * static_cast<float>(seed >> 8) * 0x1p-24f;
      read.first_worst_case_tv = read.worst_case_tv;
      read.value_radius = 1;
      read.value_term = 0.02f;
      read.output_error_bound = 0.3f;
      read.rung = Rung::kNone;
      read.outcome = Outcome::kCertified;
      reads.push_back(read);
    }
  }
  return reads;
}

std::string IdOf(int32_t index) { return absl::StrCat("r", index); }
std::string NameOf(int32_t index) { return absl::StrCat("requests/", IdOf(index)); }

double Seconds(int64_t begin_ns) {
  return static_cast<double>(RealClock()->MonotonicNs() - begin_ns) * 1e-9;
}

GateConfig BenchConfig(int32_t request_count) {
  GateConfig config;
  config.request_limit = request_count + 16;
  config.policy.risk_mode = RiskMode::kCumulative;
  config.policy.cumulative_budget = 1e6;
  return config;
}

// Runs `report(thread, round)` on all threads for the time asked; returns certificates per second.
template <typename Report>
double Rate(const Report& report) {
  const int32_t thread_count = absl::GetFlag(FLAGS_threads);
  const int64_t begin_ns = RealClock()->MonotonicNs();
  const double limit_seconds = absl::GetFlag(FLAGS_seconds);
  std::vector<int64_t> counts(static_cast<size_t>(thread_count));
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < thread_count; ++t) {
    threads.emplace_back([&, t] {
      int64_t count = 0;
      for (int64_t round = 0; Seconds(begin_ns) < limit_seconds; ++round) count += report(t, round);
      counts[static_cast<size_t>(t)] = count;
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = Seconds(begin_ns);
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  return static_cast<double>(sum) / seconds;
}

struct EngineResult {
  double certificates_per_second = 0;
  double bytes_per_request = 0;
  double list_ms = 0;
  double risk_us = 0;
};

EngineResult MeasureEngine(int32_t request_count) {
  const int32_t thread_count = absl::GetFlag(FLAGS_threads);
  EngineResult result;
  const auto heap_before = static_cast<double>(mallinfo2().uordblks);
  gate::RequestRegistry registry(BenchConfig(request_count), RealClock());
  std::vector<int64_t> lease_ids;
  for (int32_t i = 0; i < request_count; ++i) {
    const auto lease = registry.OpenRequest(IdOf(i), "a label", {});
    CERTKV_CHECK(lease.ok(), "a request opens");
    lease_ids.push_back(lease->lease_id);
  }
  const std::vector<ReadCertificate> step = Step(1);
  std::vector<int64_t> batch_numbers(static_cast<size_t>(request_count));
  const auto report = [&](int32_t index) {
    const auto i = static_cast<size_t>(index);
    const gate::ReportBatch batch{.reporter_id = 1,
                                  .batch_number = ++batch_numbers[i],
                                  .lease_id = lease_ids[i],
                                  .certificates = step};
    CERTKV_CHECK(registry.Report(NameOf(index), batch).ok(), "a batch is counted");
    return int64_t{kHeads};
  };
  for (int32_t i = 0; i < request_count; ++i) report(i);  // every head of every request has a read
  result.bytes_per_request =
      (static_cast<double>(mallinfo2().uordblks) - heap_before) / request_count;
  result.certificates_per_second = Rate([&](int32_t thread, int64_t round) {
    // Each thread has its own requests, spread over all of them.
    const int64_t index = (round * 7919 * thread_count + thread) % request_count;
    return report(static_cast<int32_t>(index - index % thread_count + thread) % request_count);
  });
  int64_t begin_ns = RealClock()->MonotonicNs();
  constexpr int kLists = 5;
  for (int i = 0; i < kLists; ++i) CERTKV_CHECK(registry.ListRisks({}).ok(), "a list is made");
  result.list_ms = Seconds(begin_ns) * 1e3 / kLists;
  begin_ns = RealClock()->MonotonicNs();
  constexpr int kRisks = 2000;
  for (int i = 0; i < kRisks; ++i) {
    CERTKV_CHECK(registry.GetRisk(NameOf(i % request_count)).ok(), "a risk is told");
  }
  result.risk_us = Seconds(begin_ns) * 1e6 / kRisks;
  return result;
}

class ServiceBench {
 public:
  explicit ServiceBench(int32_t request_count)
      : directory_(std::filesystem::temp_directory_path() /
                   absl::StrCat("certkv-bench-gate-", getpid())) {
    std::filesystem::create_directory(directory_);
    ServerConfig server;
    server.unix_socket = (directory_ / "gate.sock").string();
    server.log_level = LogLevel::kError;
    SetLeastLogLevel(server.log_level);
    runner_ = std::make_unique<ServerRunner>("certkv-bench-gate", server);
    auto gate = GateServer::Create(BenchConfig(request_count), RealClock(), runner_->io_context());
    CERTKV_CHECK(gate.ok(), "gate starts");
    gate_ = *std::move(gate);
    const absl::Status started = runner_->Start(
        {{"certkv.gate.v1.Gate", gate_->grpc_services(), [this] { gate_->Drain(); }}});
    CERTKV_CHECK(started.ok(), "the server starts");
    channel_ = grpc::CreateChannel(runner_->targets()[0], grpc::InsecureChannelCredentials());
    stub_ = v1::Gate::NewStub(channel_);
  }
  ~ServiceBench() {
    stub_.reset();
    channel_.reset();
    runner_->Stop();
    gate_.reset();
    std::filesystem::remove_all(directory_);
  }

  double CertificatesPerSecond(int32_t certificates_per_batch) {
    const int32_t thread_count = absl::GetFlag(FLAGS_threads);
    struct Stream {
      grpc::ClientContext context;
      std::unique_ptr<grpc::ClientReaderWriter<v1::ReportRequest, v1::ReportResponse>> calls;
      v1::ReportRequest batch;
    };
    std::vector<std::unique_ptr<Stream>> streams;
    for (int32_t t = 0; t < thread_count; ++t) {
      streams.push_back(std::make_unique<Stream>());
      Stream& stream = *streams.back();
      Open(absl::StrCat("stream-", certificates_per_batch, "-", t));
      stream.calls = stub_->Report(&stream.context);
      stream.batch.set_request(absl::StrCat("requests/stream-", certificates_per_batch, "-", t));
      stream.batch.set_reporter_id(t + 1);
      while (stream.batch.certificates_size() < certificates_per_batch) {
        for (const ReadCertificate& read : Step(static_cast<uint32_t>(t))) {
          *stream.batch.add_certificates() = ReadCertificateToProto(read);
        }
      }
    }
    const double rate = Rate([&](int32_t thread, int64_t round) {
      Stream& stream = *streams[static_cast<size_t>(thread)];
      stream.batch.set_batch_number(round + 1);
      v1::ReportResponse response;
      CERTKV_CHECK(stream.calls->Write(stream.batch) && stream.calls->Read(&response),
                   "a batch is answered");
      return int64_t{stream.batch.certificates_size()};
    });
    for (const auto& stream : streams) {
      stream->calls->WritesDone();
      stream->calls->Finish();
    }
    return rate;
  }

  // p50 and p99 of Decide, and of a call that does nothing, microseconds.
  nlohmann::json Decide() {
    Open("decide");
    v1::DecideRequest request;
    request.set_request("requests/decide");
    *request.mutable_certificate() = ReadCertificateToProto(Step(1)[0]);
    std::vector<double> decide_us;
    std::vector<double> empty_us;
    constexpr int kRounds = 2000;
    for (int i = -100; i < kRounds; ++i) {
      v1::Policy policy;
      const double empty = TimeUs([&](grpc::ClientContext* context) {
        return stub_->GetPolicy(context, v1::GetPolicyRequest(), &policy);
      });
      v1::DecideResponse response;
      const double decide = TimeUs(
          [&](grpc::ClientContext* context) { return stub_->Decide(context, request, &response); });
      if (i < 0) continue;
      empty_us.push_back(empty);
      decide_us.push_back(decide);
    }
    std::sort(empty_us.begin(), empty_us.end());
    std::sort(decide_us.begin(), decide_us.end());
    return {{"rounds", kRounds},
            {"empty_call", "GetPolicy"},
            {"empty_p50_us", empty_us[kRounds / 2]},
            {"empty_p99_us", empty_us[kRounds * 99 / 100]},
            {"decide_p50_us", decide_us[kRounds / 2]},
            {"decide_p99_us", decide_us[kRounds * 99 / 100]}};
  }

 private:
  template <typename Call>
  double TimeUs(const Call& call) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    const int64_t begin_ns = RealClock()->MonotonicNs();
    CERTKV_CHECK(call(&context).ok(), "a call of the benchmark succeeds");
    return Seconds(begin_ns) * 1e6;
  }
  void Open(const std::string& id) {
    v1::OpenRequestRequest request;
    request.set_request_id(id);
    v1::OpenRequestResponse response;
    TimeUs([&](grpc::ClientContext* context) {
      return stub_->OpenRequest(context, request, &response);
    });
  }

  const std::filesystem::path directory_;
  std::unique_ptr<ServerRunner> runner_;
  std::unique_ptr<GateServer> gate_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Gate::Stub> stub_;
};

// The dashboard with so many requests: what the answers to one refresh take, and how much longer
// Debian's Chromium takes to show it than to show nothing (medians; null without the browser).
class DashboardBench {
 public:
  static constexpr int32_t kRequests = 10'000;

  DashboardBench() : registry_(BenchConfig(kRequests), RealClock()) {
    for (int32_t i = 0; i < kRequests; ++i) {
      const auto lease = registry_.OpenRequest(IdOf(i), "a label", {});
      CERTKV_CHECK(lease.ok(), "a request opens");
      const std::vector<ReadCertificate> step = Step(static_cast<uint32_t>(i));
      const gate::ReportBatch batch{
          .reporter_id = 1, .batch_number = 1, .lease_id = lease->lease_id, .certificates = step};
      CERTKV_CHECK(registry_.Report(NameOf(i), batch).ok(), "a batch is counted");
    }
    routes_ = gate::DashboardRoutes(&registry_, RealClock(), [] { return gate::StoreSummary{}; });
    auto server = HttpServer::Start({.address = "127.0.0.1:0"}, routes_, &io_context_);
    CERTKV_CHECK(server.ok(), "the dashboard listens");
    server_ = *std::move(server);
    thread_ = std::thread([this] { io_context_.run(); });
  }
  ~DashboardBench() {
    server_.reset();
    io_context_.stop();
    thread_.join();
  }

  nlohmann::json Measure() {
    nlohmann::json result = {{"requests", kRequests}};
    for (const HttpRoute& route : routes_) {
      if (route.path.find("/api/") != 0 || route.path.back() == '/') continue;
      const int64_t begin_ns = RealClock()->MonotonicNs();
      for (int i = 0; i < kRounds; ++i) {
        CERTKV_CHECK(route.handler({.path = route.path, .query = {}}).status == 200, "it answers");
      }
      result["answer_ms"][route.path] = Seconds(begin_ns) * 1e3 / kRounds;
    }
    result["browser_page_ms"] = BrowseMs(absl::StrCat("http://127.0.0.1:", server_->port(), "/"));
    result["browser_blank_ms"] = BrowseMs("about:blank");
    return result;
  }

 private:
  static constexpr int kRounds = 5;

  static nlohmann::json BrowseMs(const std::string& url) {
    const std::string browser = "/usr/bin/chromium-headless-shell";
    if (!std::filesystem::exists(browser)) return nullptr;
    // Virtual time stands still while the page waits for an answer, and then ends at once.
    const std::string command =
        absl::StrCat(browser, " --no-sandbox --disable-gpu --virtual-time-budget=1000 --dump-dom '",
                     url, "' 2>/dev/null | grep -q '</html>'");
    std::vector<double> times;
    for (int i = 0; i < kRounds; ++i) {
      const int64_t begin_ns = RealClock()->MonotonicNs();
      CERTKV_CHECK(std::system(command.c_str()) == 0, "the browser shows the page");
      times.push_back(Seconds(begin_ns) * 1e3);
    }
    std::sort(times.begin(), times.end());
    return times[kRounds / 2];
  }

  gate::RequestRegistry registry_;
  std::vector<HttpRoute> routes_;
  boost::asio::io_context io_context_;
  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
};

int Run() {
  const int32_t request_count =
      std::max(absl::GetFlag(FLAGS_threads), absl::GetFlag(FLAGS_requests));
  const EngineResult engine = MeasureEngine(request_count);
  std::printf(
      "engine, %d requests of %d heads, %d threads: %.3g certificates/s, %.1f KiB a request\n",
      request_count, kHeads, absl::GetFlag(FLAGS_threads), engine.certificates_per_second,
      engine.bytes_per_request / 1024);
  std::printf("ListRequestRisks, 50 of them: %.1f ms; GetRequestRisk: %.1f us\n", engine.list_ms,
              engine.risk_us);
  nlohmann::json report = {{"run", DescribeRun()},
                           {"engine",
                            {{"requests", request_count},
                             {"heads_per_request", kHeads},
                             {"threads", absl::GetFlag(FLAGS_threads)},
                             {"certificates_per_second", engine.certificates_per_second},
                             {"bytes_per_request", engine.bytes_per_request},
                             {"list_first_page_ms", engine.list_ms},
                             {"get_risk_us", engine.risk_us}}}};
  ServiceBench bench(request_count);
  for (const int32_t batch : {kHeads, 4050, 65070 / 2}) {
    const double rate = bench.CertificatesPerSecond(batch);
    std::printf("service, batches of %d: %.3g certificates/s\n", batch, rate);
    report["service"].push_back(
        {{"certificates_per_batch", batch}, {"certificates_per_second", rate}});
  }
  report["dashboard"] = DashboardBench().Measure();
  std::printf("%s\n", report["dashboard"].dump().c_str());
  report["decide"] = bench.Decide();
  std::printf("%s\n", report["decide"].dump().c_str());
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Run();
}
