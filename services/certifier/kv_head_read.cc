#include "services/certifier/kv_head_read.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

constexpr uint8_t kSourceOriginals = kSourceOriginalKeys | kSourceOriginalValues;

absl::Status ArithmeticLimit(int32_t layer, int32_t query_head, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "ARITHMETIC_LIMIT",
                   absl::StrCat("layer ", layer, ", query head ", query_head, ": ", what,
                                "; float attention can't be bounded for such logits, check the "
                                "scale of queries and keys"));
}

bool AllFinite(const float* values, int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

}  // namespace

KvHeadRead::KvHeadRead(const ReadPlan& plan, int32_t kv_head, const ReadKernels& kernels,
                       CertifierCounters* counters, ReadWorkspace* workspace)
    : plan_(plan),
      kv_head_(kv_head),
      kernels_(kernels),
      counters_(counters),
      workspace_(workspace),
      tiles_(plan, kv_head, kernels.verify_every_read, counters, workspace) {}

absl::Status KvHeadRead::Run(KvHeadResult* result) {
  CERTKV_RETURN_IF_ERROR(tiles_.Open());
  const uint8_t source = plan_.mode == ReadMode::kExact ? kSourceOriginals : kSourceQuantized;
  std::fill_n(workspace_->sources.begin(), int64_t{group_size()} * plan_.tile_count, source);
  pass_count_ = group_size();
  for (int32_t g = 0; g < group_size(); ++g) {
    pass_heads_[g] = g;
    workspace_->ladders[g].Reset();
    terms_[g] = TermsOf(*plan_.snapshot.policy, plan_.request.layer, kv_head_ * group_size() + g);
    if (plan_.mode == ReadMode::kEnforce && terms_[g].exact) {
      workspace_->ladders[g].ClimbToHead({plan_.tile_begin(), plan_.tile_end()}, sources(g));
    }
  }
  while (pass_count_ > 0) {
    const absl::Status status = Pass(result);
    if (!status.ok()) return tiles_.Explain(status);
    first_pass_ = false;
  }
  std::copy_n(workspace_->sources.begin(), result->tile_sources.size(),
              result->tile_sources.begin());
  return tiles_.CheckUnchanged();
}

absl::Status KvHeadRead::Pass(KvHeadResult* result) {
  CERTKV_RETURN_IF_ERROR(HoldOriginalsOfPass());
  const AttendArgs args = PassArgs();
  float value_radius = 0;
  const AttendResult attended = {
      .outputs = result->outputs.empty() ? nullptr : workspace_->outputs.data(),
      .lse_nat = workspace_->lse_nat.data(),
      .block_lse = workspace_->block_lse.data(),
      .block_max_logit = workspace_->block_max_logit.data(),
      .logit_half_width = workspace_->logit_half_width.data(),
      .tile_value_error = workspace_->tile_value_error.data(),
      .value_term = workspace_->value_term.data(),
      .rounding_term = workspace_->rounding_term.data(),
      .value_radius = &value_radius,
  };
  counters_->attend_passes.fetch_add(1, std::memory_order_relaxed);
  CERTKV_RETURN_IF_ERROR(kernels_.attend(args, attended, workspace_->attend_scratch()));
  int32_t still_pending = 0;
  for (int32_t i = 0; i < args.group_size; ++i) {
    const int32_t g = pass_heads_[i];
    CERTKV_RETURN_IF_ERROR(Finish(args, i, value_radius, &result->certificates[g]));
    CERTKV_ASSIGN_OR_RETURN(const bool done, Decide(args, i, result));
    // Earlier heads of the list have been dealt with, so that it can be rewritten in place.
    if (!done) pass_heads_[still_pending++] = g;
  }
  pass_count_ = still_pending;
  return absl::OkStatus();
}

absl::Status KvHeadRead::HoldOriginalsOfPass() {
  for (int32_t tile = plan_.tile_begin(); tile < plan_.tile_end(); ++tile) {
    uint8_t wanted = kSourceQuantized;
    for (int32_t i = 0; i < pass_count_; ++i) wanted |= sources(pass_heads_[i])[tile];
    if (wanted == kSourceQuantized) continue;
    CERTKV_RETURN_IF_ERROR(tiles_.HoldOriginal(tile));
  }
  return absl::OkStatus();
}

AttendArgs KvHeadRead::PassArgs() {
  const CacheSpec& spec = plan_.cache->spec();
  const ReadRequest& request = plan_.request;
  for (int32_t i = 0; i < pass_count_; ++i) {
    const int32_t query_head = kv_head_ * group_size() + pass_heads_[i];
    std::copy_n(request.queries.begin() + int64_t{query_head} * spec.head_dim, spec.head_dim,
                workspace_->pass_queries.begin() + int64_t{i} * spec.head_dim);
    std::copy_n(sources(pass_heads_[i]), plan_.tile_count,
                workspace_->pass_sources.begin() + int64_t{i} * plan_.tile_count);
    if (!request.sink_logits.empty()) {
      workspace_->pass_sink_logits[i] = request.sink_logits[query_head];
    }
  }
  AttendArgs args{};
  args.layout = &plan_.tile_layout();
  args.original_dtype = spec.original_dtype;
  args.logit_scale = spec.logit_scale;
  args.soft_cap = spec.soft_cap;
  args.group_size = pass_count_;
  args.queries = workspace_->pass_queries.data();
  args.sink_logits = request.sink_logits.empty() ? nullptr : workspace_->pass_sink_logits.data();
  args.tiles = workspace_->tiles.data();
  args.tile_count = plan_.tile_count;
  args.tile_sources = workspace_->pass_sources.data();
  args.tail_keys = tiles_.tail_keys();
  args.tail_values = tiles_.tail_values();
  args.tail_count = plan_.tail_count;
  args.tail_key_stride = spec.head_dim;
  args.tail_value_stride = spec.value_dim;
  args.token_begin = plan_.token_begin;
  args.token_end = plan_.token_end;
  return args;
}

absl::Status KvHeadRead::Finish(const AttendArgs& args, int32_t pass_index, float value_radius,
                                ReadCertificate* certificate) {
  const Tolerances& tolerances = terms_[pass_heads_[pass_index]].tolerances;
  const int32_t atom_count = AttendAtomCount(args);
  const int64_t first_atom = int64_t{pass_index} * atom_count;
  FinishArgs finish_args{};
  finish_args.atom_count = atom_count;
  finish_args.block_lse = workspace_->block_lse.data() + first_atom;
  finish_args.block_max_logit = workspace_->block_max_logit.data() + first_atom;
  finish_args.logit_half_width = workspace_->logit_half_width.data() + first_atom;
  finish_args.sink_index = atom_count - 1;
  finish_args.value_term = workspace_->value_term[pass_index];
  finish_args.rounding_term = workspace_->rounding_term[pass_index];
  finish_args.value_radius = value_radius;
  // A budget is spent by the bound itself, so that there the tightest one is wanted.
  finish_args.tv_tolerance = plan_.snapshot.budget == nullptr ? tolerances.tv_tolerance : 0.0f;
  Certificate finished;
  CERTKV_RETURN_IF_ERROR(kernels_.finish(finish_args, &workspace_->finish, &finished));
  certificate->worst_case_tv = finished.worst_case_tv;
  certificate->value_term = finished.value_term;
  certificate->output_error_bound = finished.output_error_bound;
  certificate->value_radius = finished.value_radius;
  if (finish_args.tv_tolerance > 0 && !MeetsOutputTolerance(*certificate, tolerances)) {
    // It may have stopped at tv_tolerance while the output's limit needs less.
    finish_args.tv_tolerance = 0;
    CERTKV_RETURN_IF_ERROR(kernels_.finish(finish_args, &workspace_->finish, &finished));
    certificate->worst_case_tv = finished.worst_case_tv;
    certificate->output_error_bound = finished.output_error_bound;
  }
  certificate->layer = plan_.request.layer;
  certificate->query_head = kv_head_ * group_size() + pass_heads_[pass_index];
  certificate->query_position = plan_.request.query_position;
  if (first_pass_) certificate->first_worst_case_tv = certificate->worst_case_tv;
  return absl::OkStatus();
}

absl::StatusOr<bool> KvHeadRead::Decide(const AttendArgs& args, int32_t pass_index,
                                        KvHeadResult* result) {
  const int32_t g = pass_heads_[pass_index];
  const ReadCertificate& certificate = result->certificates[g];
  const Tolerances& tolerances = terms_[g].tolerances;
  if (IsExact(g)) {
    if (!(certificate.worst_case_tv <= kExactWorstCaseTvMax)) {
      return ArithmeticLimit(
          certificate.layer, certificate.query_head,
          absl::StrCat("read from originals, worst_case_tv is still ", certificate.worst_case_tv,
                       ", at most ", kExactWorstCaseTvMax, " is arithmetic"));
    }
    CERTKV_RETURN_IF_ERROR(Accept(pass_index, Outcome::kExact, result));
    return true;
  }
  const bool meets = MeetsTolerances(certificate, tolerances);
  if (plan_.mode == ReadMode::kObserve) {
    CERTKV_RETURN_IF_ERROR(
        Accept(pass_index, meets ? Outcome::kCertified : Outcome::kObserved, result));
    return true;
  }
  HeadLadder& ladder = workspace_->ladders[g];
  const TileSpan tiles = {plan_.tile_begin(), plan_.tile_end()};
  if (meets) {
    int64_t units = 0;
    if (plan_.snapshot.budget != nullptr) {
      units = plan_.snapshot.budget->Reserve(certificate.worst_case_tv);
    }
    if (units >= 0) {
      result->reserved_units += units;
      CERTKV_RETURN_IF_ERROR(Accept(pass_index, Outcome::kCertified, result));
      return true;
    }
    ladder.ClimbToHead(tiles, sources(g));  // the budget is used up: exact from now on
    return false;
  }
  const int32_t atom_count = AttendAtomCount(args);
  const int64_t first_atom = int64_t{pass_index} * atom_count;
  const LadderEvidence evidence = {
      .certificate = certificate,
      .rounding_term = workspace_->rounding_term[pass_index],
      .tiles = tiles,
      .atoms_per_tile = args.layout->atoms_per_tile(),
      .atom_count = atom_count,
      .lse_nat = workspace_->lse_nat[pass_index],
      .block_lse = workspace_->block_lse.data() + first_atom,
      .block_max_logit = workspace_->block_max_logit.data() + first_atom,
      .logit_half_width = workspace_->logit_half_width.data() + first_atom,
      .tile_value_error =
          workspace_->tile_value_error.data() + int64_t{pass_index} * plan_.tile_count,
  };
  ladder.Climb(evidence, tolerances, &workspace_->ladder, sources(g));
  return false;
}

absl::Status KvHeadRead::Accept(int32_t pass_index, Outcome outcome, KvHeadResult* result) {
  const int32_t g = pass_heads_[pass_index];
  ReadCertificate& certificate = result->certificates[g];
  certificate.outcome = outcome;
  certificate.rung = plan_.mode == ReadMode::kExact ? Rung::kHead : workspace_->ladders[g].rung();
  certificate.repair_bytes = RepairBytes(g);
  if (result->outputs.empty()) return absl::OkStatus();
  const int32_t value_dim = plan_.cache->spec().value_dim;
  const float* output = workspace_->outputs.data() + int64_t{pass_index} * value_dim;
  if (!AllFinite(output, value_dim)) {
    return ArithmeticLimit(certificate.layer, certificate.query_head, "its output is not finite");
  }
  std::copy_n(output, value_dim, result->outputs.begin() + int64_t{g} * value_dim);
  return absl::OkStatus();
}

bool KvHeadRead::IsExact(int32_t g) {
  const uint8_t* source = sources(g);
  return std::all_of(source + plan_.tile_begin(), source + plan_.tile_end(),
                     [](uint8_t bits) { return bits == kSourceOriginals; });
}

int64_t KvHeadRead::RepairBytes(int32_t g) {
  int64_t bytes = 0;
  for (int32_t tile = plan_.tile_begin(); tile < plan_.tile_end(); ++tile) {
    const uint8_t source = sources(g)[tile];
    if ((source & kSourceOriginalKeys) != 0) bytes += tiles_.original_key_bytes();
    if ((source & kSourceOriginalValues) != 0) bytes += tiles_.original_value_bytes();
  }
  return bytes;
}

}  // namespace certkv::certifier
