// What a certifier has done since it started. Written from all threads, read for logs and metrics.
#ifndef CERTKV_SERVICES_CERTIFIER_COUNTERS_H_
#define CERTKV_SERVICES_CERTIFIER_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/policy.h"
#include "services/common/metrics.h"

namespace certkv::certifier {

// Threads: all members may be used concurrently. Each number is exact; several read together are
// not a snapshot.
struct CertifierCounters {
  static constexpr int kFormatCount = 8;

  std::atomic<int64_t> reads{0};         // reads answered without an error
  std::atomic<int64_t> failed_reads{0};  // reads answered with an error
  // Query heads of the reads answered, by the rung they ended on and by outcome.
  std::atomic<int64_t> heads_by_rung[6]{};     // index: Rung; [0] unused
  std::atomic<int64_t> heads_by_outcome[4]{};  // index: Outcome; [0] unused
  // The same by KeyFormat and ValueFormat and by rung: docs/metrics.md.
  std::atomic<int64_t> heads_by_format[kFormatCount][kFormatCount][6]{};
  std::atomic<int64_t> repair_bytes{0};   // originals read again for repairs
  std::atomic<int64_t> attend_passes{0};  // calls of the attention kernel
  std::atomic<int64_t> device_passes{0};  // of these, by a GPU
  std::atomic<int64_t> slow_finishes{0};  // certificates that were left to the reference
  // Progressive reads. Tokens are counted per query head, of reads answered.
  std::atomic<int64_t> skipping_heads{0};     // heads that skipped tokens
  std::atomic<int64_t> skip_misses{0};        // times a head skipped too much and read more
  std::atomic<int64_t> unskippable_heads{0};  // allowed to skip, but their format can't
  // Heads of dithered keys: with a failure probability from the lease, and without one, so that
  // they are read by the bound that holds for sure.
  std::atomic<int64_t> dithered_heads{0};
  std::atomic<int64_t> shareless_heads{0};
  std::atomic<int64_t> read_tokens{0};         // tokens read in full
  std::atomic<int64_t> skipped_tokens{0};      // and those skipped
  std::atomic<int64_t> read_bytes{0};          // bytes of records, originals and tails
  std::atomic<int64_t> tiles_verified{0};      // tiles whose checksums were recomputed
  std::atomic<int64_t> originals_verified{0};  // tiles whose originals' checksum was recomputed
  LatencyHistogram read_seconds;               // from a read's first KV head to its last
  // What says that there are too few replicas.
  std::atomic<int64_t> busy_ns{0};  // threads' time in reads
  LatencyHistogram queue_seconds;   // from a message's arrival to the begin of its work

  void CountHead(const ReadCertificate& certificate) {
    heads_by_rung[static_cast<int>(certificate.rung)].fetch_add(1, std::memory_order_relaxed);
    heads_by_outcome[static_cast<int>(certificate.outcome)].fetch_add(1, std::memory_order_relaxed);
    heads_by_format[certificate.key_format % kFormatCount][certificate.value_format % kFormatCount]
                   [static_cast<int>(certificate.rung)]
                       .fetch_add(1, std::memory_order_relaxed);
    repair_bytes.fetch_add(certificate.repair_bytes, std::memory_order_relaxed);
    if (certificate.skipped_tokens > 0) skipping_heads.fetch_add(1, std::memory_order_relaxed);
    read_tokens.fetch_add(certificate.read_tokens, std::memory_order_relaxed);
    skipped_tokens.fetch_add(certificate.skipped_tokens, std::memory_order_relaxed);
    read_bytes.fetch_add(certificate.read_bytes, std::memory_order_relaxed);
  }

  // Counts an error under its reason ("" becomes the code's name).
  void CountError(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex);
  std::map<std::string, int64_t> ErrorsByReason() const ABSL_LOCKS_EXCLUDED(mutex);

  // A pass that a GPU was to run and the host ran, under the reason for it.
  void CountDeviceFallback(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex);
  std::map<std::string, int64_t> DeviceFallbacksByReason() const ABSL_LOCKS_EXCLUDED(mutex);

  mutable absl::Mutex mutex;
  std::map<std::string, int64_t> errors_by_reason ABSL_GUARDED_BY(mutex);
  std::map<std::string, int64_t> device_fallbacks_by_reason ABSL_GUARDED_BY(mutex);
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_COUNTERS_H_
