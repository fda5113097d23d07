// `certkv pull`: has the store fetch a trace's prefix from another store over the bulk plane.
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cli/commands.h"
#include "clients/cli/spec_file.h"
#include "clients/cli/table.h"
#include "clients/cli/trace.h"
#include "clients/cpp/worker.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

absl::StatusOr<client::PullOrder> ParseOrder(const std::string& name) {
  if (name == "whole") return client::PullOrder::kWhole;
  if (name == "originals-later") return client::PullOrder::kOriginalsLater;
  if (name == "originals-only") return client::PullOrder::kOriginalsOnly;
  return MakeError(
      absl::StatusCode::kInvalidArgument, "PULL_ORDER_UNKNOWN",
      absl::StrCat("order is '", name, "', must be whole, originals-later or originals-only"));
}

absl::Status Pull(const GlobalOptions& global, const PullOptions& options) {
  CERTKV_ASSIGN_OR_RETURN(const client::PullOrder order, ParseOrder(options.order));
  CERTKV_ASSIGN_OR_RETURN(const auto trace, Trace::Open(options.trace_path));
  CERTKV_ASSIGN_OR_RETURN(const CacheSpec spec, SpecOf(*trace, options.format, options.spec_path));
  client::Options services = global.services;
  services.worker_name = "certkv-pull";
  CERTKV_ASSIGN_OR_RETURN(const auto worker, client::Worker::Attach(services, spec));
  const absl::Time start = absl::Now();
  CERTKV_ASSIGN_OR_RETURN(
      const auto sequence,
      worker->Pull(options.peer, trace->token_ids(), client::DefaultKeyContext(spec), order));
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const auto blocks = static_cast<int64_t>(sequence->blocks().size());
  const int64_t wanted = trace->token_count() / spec.block_tokens;
  const nlohmann::json data = {{"peer", options.peer},
                               {"tokens", sequence->token_count()},
                               {"blocks", blocks},
                               {"blocks_wanted", wanted},
                               {"seconds", seconds}};
  Print(global, data,
        absl::StrCat(FormatCount(sequence->token_count()), " tokens in ", blocks, " of ", wanted,
                     " whole blocks are here, after ", FormatNanoseconds(seconds * 1e9),
                     "; what was missing came from ", options.peer, "\n"));
  return absl::OkStatus();
}

}  // namespace

int RunPull(const GlobalOptions& global, const PullOptions& options) {
  const absl::Status status = Pull(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace certkv::cli
