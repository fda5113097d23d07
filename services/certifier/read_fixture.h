// A fake cache, a checker and a view: what most tests of reads begin with.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_FIXTURE_H_
#define CERTKV_SERVICES_CERTIFIER_READ_FIXTURE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "services/certifier/fake_cache.h"
#include "services/certifier/read_checker.h"

namespace certkv::certifier {

struct ReadFixture {
  static constexpr uint64_t kSeed = 20260301;

  // A random sequence, and random queries of norm about query_scale * sqrt(d).
  ReadFixture(const CacheSpec& spec, int64_t token_count, const PolicyLease& policy,
              float query_scale = 1.0f, ReadKernels kernels = KernelsOf(Backend::kCpu))
      : random(kSeed), fake(spec, 64), checker(&fake, std::move(kernels)), book(64) {
    fake.Put(RandomSequence(spec, token_count, 1.0f, &random));
    view = fake.OpenView(policy, &book);
    queries = RandomQueries(spec, query_scale, &random);
  }

  ReadRequest Request(int32_t layer, int64_t position) const {
    ReadRequest request;
    request.layer = layer;
    request.query_position = position;
    request.queries = queries;
    return request;
  }
  absl::Status Read(int32_t layer, int64_t position) {
    return checker.Read(*view, Request(layer, position));
  }
  // At the last position of the sequence.
  absl::Status ReadLast() { return Read(0, fake.data().token_count - 1); }

  std::mt19937_64 random;
  FakeCache fake;
  ReadChecker checker;
  BudgetBook book;
  std::shared_ptr<View> view;
  std::vector<float> queries;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_FIXTURE_H_
