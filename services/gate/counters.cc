#include "services/gate/counters.h"

#include <numeric>

namespace certkv::gate {
namespace {

// Of one batch, so that each shared number is touched once.
struct Tally {
  int64_t by_rung[GateCounters::kRungCount] = {};
  int64_t by_outcome[4] = {};
  int64_t tv_histogram[kTvBucketCount] = {};
  double tv_sum = 0;
  int64_t repair_bytes = 0;
};

void AddAll(absl::Span<const int64_t> from, std::atomic<int64_t>* to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 0) to[i].fetch_add(from[i], std::memory_order_relaxed);
  }
}

}  // namespace

void GateCounters::CountReads(absl::Span<const ReadCertificate> certificates) {
  Tally tally;
  int key = 0;
  int value = 0;
  const auto flush_format = [&] {
    AddAll(tally.by_rung, reads_by_format[key][value]);
    for (int64_t& count : tally.by_rung) count = 0;
  };
  for (const ReadCertificate& certificate : certificates) {
    const int its_key = certificate.key_format % kFormatCount;
    const int its_value = certificate.value_format % kFormatCount;
    if (its_key != key || its_value != value) {
      flush_format();
      key = its_key;
      value = its_value;
    }
    ++tally.by_rung[static_cast<int>(certificate.rung)];
    ++tally.by_outcome[static_cast<int>(certificate.outcome)];
    ++tally.tv_histogram[TvBucketOf(certificate.worst_case_tv)];
    tally.tv_sum += certificate.worst_case_tv;
    tally.repair_bytes += certificate.repair_bytes;
  }
  flush_format();
  AddAll(tally.by_outcome, reads_by_outcome);
  AddAll(tally.tv_histogram, tv_histogram);
  tv_sum.fetch_add(tally.tv_sum, std::memory_order_relaxed);
  repair_bytes.fetch_add(tally.repair_bytes, std::memory_order_relaxed);
}

int64_t FormatReads::total() const {
  return std::accumulate(by_rung.begin(), by_rung.end(), int64_t{0});
}

std::vector<FormatReads> ReadsByFormat(const GateCounters& counters) {
  std::vector<FormatReads> formats;
  for (int key = 0; key < GateCounters::kFormatCount; ++key) {
    for (int value = 0; value < GateCounters::kFormatCount; ++value) {
      FormatReads reads{.key_format = key, .value_format = value};
      for (int rung = 0; rung < GateCounters::kRungCount; ++rung) {
        reads.by_rung[rung] =
            counters.reads_by_format[key][value][rung].load(std::memory_order_relaxed);
      }
      if (reads.total() > 0) formats.push_back(reads);
    }
  }
  return formats;
}

}  // namespace certkv::gate
