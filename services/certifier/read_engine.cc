#include "services/certifier/read_engine.h"

#include <algorithm>

#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::certifier {

absl::Status ReadEngine::ReadKvHead(const ReadPlan& plan, int32_t kv_head, ReadWorkspace* workspace,
                                    const ReadOutput& output, int64_t* reserved_units) const {
  const CacheSpec& spec = plan.cache->spec();
  CERTKV_CHECK(kv_head >= 0 && kv_head < spec.kv_head_count, "KV head is inside the spec");
  CERTKV_CHECK(static_cast<int64_t>(output.certificates.size()) == spec.query_head_count(),
               "one certificate per query head");
  workspace->Reserve(ShapeOfRead(spec, plan.tile_layout(), plan.tile_count, plan.tail_count));
  const int64_t first_head = int64_t{kv_head} * spec.group_size;
  KvHeadResult result;
  result.certificates = output.certificates.subspan(first_head, spec.group_size);
  if (!output.outputs.empty()) {
    result.outputs = output.outputs.subspan(first_head * spec.value_dim,
                                            int64_t{spec.group_size} * spec.value_dim);
  }
  if (!output.tile_sources.empty()) {
    result.tile_sources = output.tile_sources.subspan(first_head * plan.tile_count,
                                                      int64_t{spec.group_size} * plan.tile_count);
  }
  const absl::Status status =
      KvHeadRead(plan, kv_head, kernels_, counters_, workspace).Run(&result);
  *reserved_units += result.reserved_units;
  return status;
}

absl::Status ReadEngine::EndRead(const ReadPlan& plan, const absl::Status& status,
                                 int64_t reserved_units, const ReadOutput& output) const {
  if (!status.ok()) {
    if (plan.snapshot.tv_budget() != nullptr) plan.snapshot.tv_budget()->Refund(reserved_units);
    counters_->failed_reads.fetch_add(1, std::memory_order_relaxed);
    counters_->CountError(status);
    return status;
  }
  const LayerSpec& layer = plan.cache->spec().layers[plan.request.layer];
  const bool layer_is_exact = std::all_of(
      output.certificates.begin(), output.certificates.end(),
      [](const ReadCertificate& certificate) { return certificate.rung == Rung::kHead; });
  for (ReadCertificate& certificate : output.certificates) {
    if (layer_is_exact) certificate.rung = Rung::kLayer;
    certificate.key_format = static_cast<uint8_t>(layer.key_format);
    certificate.value_format = static_cast<uint8_t>(layer.value_format);
    counters_->CountHead(certificate);
  }
  counters_->reads.fetch_add(1, std::memory_order_relaxed);
  return status;
}

absl::Status ReadEngine::Read(const ReadPlan& plan, ReadWorkspace* workspace,
                              const ReadOutput& output) const {
  int64_t reserved_units = 0;
  absl::Status status;
  for (int32_t kv_head = 0; kv_head < plan.cache->spec().kv_head_count && status.ok(); ++kv_head) {
    status = ReadKvHead(plan, kv_head, workspace, output, &reserved_units);
  }
  return EndRead(plan, status, reserved_units, output);
}

}  // namespace certkv::certifier
