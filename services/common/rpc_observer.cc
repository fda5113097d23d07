#include "services/common/rpc_observer.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/strip.h"
#include "services/common/log.h"
#include "services/common/trace_context.h"

namespace certkv {
namespace {

constexpr MetricInfo kInfos[] = {
    {"certkv_server_rpc_seconds", MetricKind::kHistogram, "service, method",
     "Time of unary calls, from their arrival to their end"},
    {"certkv_server_rpcs_total", MetricKind::kCounter, "service, method, code",
     "Calls that have ended, by the code they ended with"},
    {"certkv_server_streams_open_total", MetricKind::kGauge, "service, method",
     "Streaming calls that are open"},
};
// More methods than all services have: what is asked for beside them shares one row.
constexpr size_t kMethodsMax = 128;

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// `path` is "/certkv.gate.v1.Gate/Decide".
RpcObserver::Method::Method(absl::string_view path) {
  absl::ConsumePrefix(&path, "/");
  const size_t slash = path.rfind('/');
  absl::string_view full = path.substr(0, slash);
  name = slash == absl::string_view::npos ? "" : std::string(path.substr(slash + 1));
  if (absl::ConsumePrefix(&full, "certkv.")) full = full.substr(0, full.find('.'));
  service = std::string(full);
}

// Lives as long as one call.
class RpcObserver::Call final : public grpc::experimental::Interceptor {
 public:
  Call(Method* method, bool is_unary) : method_(method), is_unary_(is_unary), begin_ns_(NowNs()) {
    if (!is_unary_) method_->streams_open.fetch_add(1, std::memory_order_relaxed);
  }

  ~Call() override {
    const int64_t took_ns = NowNs() - begin_ns_;
    const int code = std::clamp(static_cast<int>(code_), 0, kCodeCount - 1);
    method_->ends[code].fetch_add(1, std::memory_order_relaxed);
    if (is_unary_) {
      method_->seconds.Observe(took_ns);
    } else {
      method_->streams_open.fetch_add(-1, std::memory_order_relaxed);
    }
    const bool is_ours = code_ == grpc::StatusCode::INTERNAL ||
                         code_ == grpc::StatusCode::UNKNOWN || code_ == grpc::StatusCode::DATA_LOSS;
    Log(is_ours ? LogLevel::kWarning : LogLevel::kDebug, "rpc",
        {{"callee", method_->service},
         {"method", method_->name},
         {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))},
         {"took_us", took_ns / 1000},
         {"message", message_},
         {"traceparent", traceparent_}});
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      const auto* metadata = methods->GetRecvInitialMetadata();
      if (metadata != nullptr) {
        const auto found = metadata->find(kTraceparentKey);
        if (found != metadata->end()) {
          traceparent_ = TraceparentOrNone({found->second.data(), found->second.size()});
        }
      }
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = methods->GetSendStatus();
      code_ = status.error_code();
      message_ = status.error_message();
    }
    methods->Proceed();
  }

 private:
  Method* const method_;
  const bool is_unary_;
  const int64_t begin_ns_;
  grpc::StatusCode code_ = grpc::StatusCode::CANCELLED;  // no status was sent
  std::string message_;
  std::string traceparent_;
};

class RpcObserver::Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(RpcObserver* observer) : observer_(observer) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return new Call(observer_->MethodOf(info->method()),
                    info->type() == grpc::experimental::ServerRpcInfo::Type::UNARY);
  }

 private:
  RpcObserver* const observer_;
};

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> RpcObserver::MakeFactory() {
  return std::make_unique<Factory>(this);
}

RpcObserver::Method* RpcObserver::MethodOf(absl::string_view path) {
  {
    absl::ReaderMutexLock lock(&mutex_);
    if (const auto found = methods_.find(path); found != methods_.end()) return found->second.get();
  }
  absl::MutexLock lock(&mutex_);
  const absl::string_view known = methods_.size() < kMethodsMax ? path : "other/other";
  std::unique_ptr<Method>& method = methods_[known];
  if (method == nullptr) method = std::make_unique<Method>(known);
  return method.get();
}

absl::Span<const MetricInfo> RpcObserver::MetricInfos() { return kInfos; }

void RpcObserver::CollectMetrics(MetricSink* sink) {
  absl::ReaderMutexLock lock(&mutex_);
  for (const auto& [path, method] : methods_) {
    const HistogramSnapshot seconds = method->seconds.Snapshot();
    if (seconds.cumulative_counts.back() > 0) {
      sink->AddHistogram("certkv_server_rpc_seconds", seconds,
                         {{"service", method->service}, {"method", method->name}});
    }
    sink->Add("certkv_server_streams_open_total",
              static_cast<double>(method->streams_open.load(std::memory_order_relaxed)),
              {{"service", method->service}, {"method", method->name}});
    for (int code = 0; code < kCodeCount; ++code) {
      const int64_t count = method->ends[code].load(std::memory_order_relaxed);
      if (count == 0) continue;
      sink->Add("certkv_server_rpcs_total", static_cast<double>(count),
                {{"service", method->service},
                 {"method", method->name},
                 {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
  }
}

}  // namespace certkv
