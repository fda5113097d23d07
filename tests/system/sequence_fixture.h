// Deterministic sequences and queries for system tests, and the check of what a read returned.
#ifndef CERTKV_TESTS_SYSTEM_SEQUENCE_FIXTURE_H_
#define CERTKV_TESTS_SYSTEM_SEQUENCE_FIXTURE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "clients/cpp/attention.h"
#include "clients/cpp/worker.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/policy.h"

namespace certkv {

// 2 layers, 2 KV heads x 3, d 64.
CacheSpec SmallSpec(KeyFormat key_format = KeyFormat::kK8);

// Random keys and values of a sequence, drawn from `seed`. Tokens are 0, 1, 2, ... + seed * 1000.
struct TestSequence {
  TestSequence(const CacheSpec& spec, int32_t token_count, uint32_t seed);

  CacheSpec spec;
  std::vector<int32_t> token_ids;
  std::vector<std::vector<uint16_t>> keys;    // per layer
  std::vector<std::vector<uint16_t>> values;  // per layer
  std::vector<client::LayerKv> layers() const;
  // Of one token, for AppendToken.
  std::vector<client::LayerKv> layers_at(int64_t token) const;
};

// [query_head_count][d], larger `sharpness` = more peaked softmax.
std::vector<float> TestQueries(const CacheSpec& spec, uint32_t seed, float sharpness = 1.0f);

// Holds one read against the truth in double. "" when all is well; otherwise what is wrong: an
// output that is neither certified within `tolerances` nor exact, or an error above its bound.
std::string CheckReadAgainstTruth(const TestSequence& sequence, const client::ReadRequest& read,
                                  const client::ReadResult& result, const Tolerances& tolerances);

// What was used of one outcome, in the units of budgets (2^-40), rounded up read by read.
double SumOfTv(const std::vector<client::ReadResult>& results, Outcome outcome);

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_SEQUENCE_FIXTURE_H_
