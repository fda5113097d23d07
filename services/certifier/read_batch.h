// Runs the reads of one message in parallel over (read, KV head).
#ifndef CERTKV_SERVICES_CERTIFIER_READ_BATCH_H_
#define CERTKV_SERVICES_CERTIFIER_READ_BATCH_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"
#include "kernels/core/policy.h"
#include "services/certifier/read_engine.h"
#include "services/certifier/read_plan.h"
#include "services/certifier/view_table.h"
#include "services/common/clock.h"
#include "services/common/identity.h"

namespace certkv::certifier {

// One read of a message: what was asked and, afterwards, the answer.
struct BatchRead {
  ViewId view_id{};
  int32_t layer = 0;
  int64_t query_position = 0;
  std::vector<float> queries;      // [query heads][d]
  std::vector<float> sink_logits;  // [query heads], or empty

  // OK before the read, or why it isn't done; afterwards its outcome. On error the rest is empty.
  absl::Status status;
  std::vector<ReadCertificate> certificates;  // [query heads]
  std::vector<float> outputs;                 // [query heads][d_v], or empty: not wanted
  std::vector<uint8_t> tile_sources;          // [query heads][tiles], or empty: not wanted
  int32_t first_tile = 0;                     // tile of the sequence that tile_sources begins with
  int64_t read_time_ns = 0;
};

// What all reads of a message have in common.
struct BatchOptions {
  bool measure_only = false;
  bool want_outputs = true;
  bool want_tile_sources = false;
  // Once true, what has not begun is not done: nobody takes the answers. Lives as long as what
  // `done` holds; null = never.
  const std::atomic<bool>* is_cancelled = nullptr;
  // Whose views may be read; null: everybody's.
  std::shared_ptr<const Identity> caller = {};
};

// Threads: Run may be called concurrently.
class BatchRunner {
 public:
  // All arguments outlive the batches (see Run). At most `thread_count` >= 1 threads of
  // `io_context` work on one batch.
  BatchRunner(const ReadEngine* engine, ViewTable* views, WorkspacePool* workspaces,
              CertifierCounters* counters, const Clock* clock, boost::asio::io_context* io_context,
              int32_t thread_count);

  // Fills the answers of `*reads` and calls `done` on a thread of the io_context. `*reads` lives
  // until then; what `done` holds keeps alive until no thread works on the batch any more. Reads
  // whose answers would make the message larger than a message may be get InvalidArgument
  // [ANSWER_TOO_LARGE]. Doesn't block.
  void Run(std::vector<BatchRead>* reads, const BatchOptions& options, std::function<void()> done);

 private:
  class Batch;

  const ReadEngine* const engine_;
  ViewTable* const views_;
  WorkspacePool* const workspaces_;
  CertifierCounters* const counters_;
  const Clock* const clock_;
  boost::asio::io_context* const io_context_;
  const int32_t thread_count_;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_BATCH_H_
