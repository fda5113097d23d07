// The worker of the chaos test: puts, reads and checks against the truth, whatever dies around it.
#ifndef CERTKV_TESTS_SYSTEM_CHAOS_WORKER_H_
#define CERTKV_TESTS_SYSTEM_CHAOS_WORKER_H_

#include <cstdint>
#include <map>
#include <string>

#include "clients/cpp/options.h"
#include "kernels/core/cache_spec.h"

namespace certkv {

// What one worker saw. Text: "reads=1 certified=2 exact=3 errors=4 uncertified=0 wrong=0", then
// " REASON:count" for each reason of an error.
struct ChaosTally {
  int64_t reads = 0;        // answered without an error
  int64_t certified = 0;    // query heads
  int64_t exact = 0;        // query heads
  int64_t errors = 0;       // calls and reads that said so
  int64_t uncertified = 0;  // outputs that are neither certified nor exact
  int64_t wrong = 0;        // outputs farther from the truth than they say
  std::map<std::string, int64_t> reasons;

  std::string ToText() const;
  static ChaosTally FromText(const std::string& text);
  void Add(const ChaosTally& other);
};

// Goes on for ever; says "tally ..." on stdout about every 50 ms, and what was wrong in "wrong
// ...".
[[noreturn]] void RunChaosWorker(const client::Options& options, const CacheSpec& spec,
                                 uint32_t seed);

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_CHAOS_WORKER_H_
