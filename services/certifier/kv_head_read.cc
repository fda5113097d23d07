#include "services/certifier/kv_head_read.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/skipping.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "services/certifier/device_read.h"

namespace certkv::certifier {
namespace {

constexpr uint8_t kSourceOriginals = kSourceOriginalKeys | kSourceOriginalValues;

absl::Status ArithmeticLimit(int32_t layer, int32_t query_head, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "ARITHMETIC_LIMIT",
                   absl::StrCat("layer ", layer, ", query head ", query_head, ": ", what,
                                "; float attention can't be bounded for such logits, check the "
                                "scale of queries and keys"));
}

// Less is skipped, by half or more; below this it saves less than another pass costs.
constexpr float kSkipLeast = 0.005f;
constexpr float kSkipAim = 0.8f;

// What a head may skip that missed its tolerances when it skipped within `skip`; 0 = nothing.
float NextSkip(const ReadCertificate& certificate, const Tolerances& tolerances, float skip) {
  // Values are not read better by reading more of them.
  if (MeetsTvTolerance(certificate, tolerances)) return 0;
  // u + (1 - u) TV* is the bound; TV* of what is read is taken to stay as it is.
  const float share = certificate.skipped_share;
  if (!(share < 1 && certificate.worst_case_tv < 1)) return 0;
  const float rest = (certificate.worst_case_tv - share) / (1 - share);
  if (!(rest < tolerances.tv_tolerance)) return 0;
  const float left = kSkipAim * (tolerances.tv_tolerance - rest) / (1 - rest);
  const float next = std::min(left, skip / 2);
  return next >= kSkipLeast ? next : 0;
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
  for (int32_t g = 0; g < group_size(); ++g) {
    workspace_->ladders[g].Reset();
    terms_[g] = TermsOf(*plan_.snapshot.policy, plan_.request.layer, kv_head_ * group_size() + g);
    if (plan_.mode == ReadMode::kEnforce && terms_[g].exact) {
      workspace_->ladders[g].ClimbToHead({plan_.tile_begin(), plan_.tile_end()}, sources(g));
    }
    share_[g] = TakeShare(g);
    skip_[g] = FirstSkip(g);
    is_pending_[g] = true;
    was_read_[g] = false;
  }
  for (bool any = true; any;) {
    any = false;
    for (const bool skipping : {true, false}) {
      if (!SelectHeads(skipping)) continue;
      any = true;
      const absl::Status status = skipping ? SkippingPass(result) : Pass(result);
      if (!status.ok()) return tiles_.Explain(status);
    }
  }
  std::copy_n(workspace_->sources.begin(), result->tile_sources.size(),
              result->tile_sources.begin());
  return tiles_.CheckUnchanged();
}

float KvHeadRead::TakeShare(int32_t g) {
  const bool reads_dither = plan_.tile_layout().key_format == KeyFormat::kK8D &&
                            plan_.tile_begin() < plan_.tile_end() &&
                            plan_.mode == ReadMode::kEnforce && !terms_[g].exact;
  if (!reads_dither) return 0;
  float share = 0;
  if (plan_.snapshot.policy->risk_mode == RiskMode::kUnion) {
    share = plan_.snapshot.budget->TakeShare();
  }
  (share > 0 ? counters_->dithered_heads : counters_->shareless_heads)
      .fetch_add(1, std::memory_order_relaxed);
  return share;
}

float KvHeadRead::FirstSkip(int32_t g) {
  const Tolerances& tolerances = terms_[g].tolerances;
  const float skip = UsableSkipTolerance(tolerances.skip_tolerance, tolerances.tv_tolerance);
  const bool exact =
      plan_.mode == ReadMode::kExact || (plan_.mode == ReadMode::kEnforce && terms_[g].exact);
  if (skip == 0 || exact || plan_.tile_end() - plan_.tile_begin() < kSkippingTilesMin) return 0;
  if (CanSkip(plan_.tile_layout())) return skip;
  counters_->unskippable_heads.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

bool KvHeadRead::SelectHeads(bool skipping) {
  pass_count_ = 0;
  for (int32_t g = 0; g < group_size(); ++g) {
    if (is_pending_[g] && (skip_[g] > 0) == skipping) pass_heads_[pass_count_++] = g;
  }
  return pass_count_ > 0;
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
      .top_half_width = workspace_->top_half_width.data(),
  };
  counters_->attend_passes.fetch_add(1, std::memory_order_relaxed);
  void* const scratch = workspace_->attend_scratch();
  if (!AttendOnDevice(plan_, kv_head_, kernels_, args, attended, scratch, counters_)) {
    CERTKV_RETURN_IF_ERROR(kernels_.attend(args, attended, scratch));
  }
  const int32_t atom_count = AttendAtomCount(args);
  for (int32_t i = 0; i < args.group_size; ++i) {
    FinishArgs finish_args{};
    finish_args.atom_count = atom_count;
    finish_args.block_lse = workspace_->block_lse.data() + int64_t{i} * atom_count;
    finish_args.block_max_logit = workspace_->block_max_logit.data() + int64_t{i} * atom_count;
    finish_args.logit_half_width = workspace_->logit_half_width.data() + int64_t{i} * atom_count;
    finish_args.top_half_width = workspace_->top_half_width.data() + int64_t{i} * atom_count;
    finish_args.sink_index = atom_count - 1;
    CERTKV_RETURN_IF_ERROR(
        Finish(finish_args, i, value_radius, &result->certificates[pass_heads_[i]]));
    CERTKV_RETURN_IF_ERROR(Decide(args, i, result));
  }
  return absl::OkStatus();
}

absl::Status KvHeadRead::SkippingPass(KvHeadResult* result) {
  ProgressiveArgs args{PassArgs(), workspace_->pass_skip_tolerance.data()};
  args.read.tile_sources = nullptr;  // all are quantized
  for (int32_t i = 0; i < pass_count_; ++i) {
    workspace_->pass_skip_tolerance[i] = skip_[pass_heads_[i]];
  }
  float value_radius = 0;
  const ProgressiveResult attended = {
      .outputs = result->outputs.empty() ? nullptr : workspace_->outputs.data(),
      .lse_nat = workspace_->lse_nat.data(),
      .atom_count = workspace_->atom_count.data(),
      .block_lse = workspace_->block_lse.data(),
      .block_max_logit = workspace_->block_max_logit.data(),
      .logit_half_width = workspace_->logit_half_width.data(),
      .value_term = workspace_->value_term.data(),
      .rounding_term = workspace_->rounding_term.data(),
      .value_radius = &value_radius,
      .skipped_lse_nat = workspace_->skipped_lse_nat.data(),
      .sub_blocks_read = workspace_->sub_blocks_read.data(),
  };
  counters_->attend_passes.fetch_add(1, std::memory_order_relaxed);
  CERTKV_RETURN_IF_ERROR(kernels_.attend_progressive(args, attended, workspace_->attend_scratch()));
  const int64_t atoms_max = ProgressiveAtomsMax(args.read);
  for (int32_t i = 0; i < args.read.group_size; ++i) {
    FinishArgs finish_args{};
    finish_args.atom_count = workspace_->atom_count[i];
    finish_args.block_lse = workspace_->block_lse.data() + i * atoms_max;
    finish_args.block_max_logit = workspace_->block_max_logit.data() + i * atoms_max;
    finish_args.logit_half_width = workspace_->logit_half_width.data() + i * atoms_max;
    finish_args.sink_index = ProgressiveSinkAtom(args.read);
    finish_args.skipped_lse_nat = workspace_->skipped_lse_nat[i];
    CERTKV_RETURN_IF_ERROR(
        Finish(finish_args, i, value_radius, &result->certificates[pass_heads_[i]]));
    CERTKV_RETURN_IF_ERROR(DecideSkipping(i, result));
  }
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
    workspace_->pass_failure_probability[i] = share_[pass_heads_[i]];
  }
  AttendArgs args{};
  args.layout = &plan_.tile_layout();
  args.original_dtype = spec.original_dtype;
  args.logit_scale = spec.logit_scale;
  args.soft_cap = spec.soft_cap;
  args.group_size = pass_count_;
  args.queries = workspace_->pass_queries.data();
  args.sink_logits = request.sink_logits.empty() ? nullptr : workspace_->pass_sink_logits.data();
  args.failure_probability = workspace_->pass_failure_probability.data();
  args.witness_weights = WitnessWeightsOf(spec, request.layer, kv_head_);
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

absl::Status KvHeadRead::Finish(FinishArgs finish_args, int32_t pass_index, float value_radius,
                                ReadCertificate* certificate) {
  const int32_t g = pass_heads_[pass_index];
  const Tolerances& tolerances = terms_[g].tolerances;
  finish_args.value_term = workspace_->value_term[pass_index];
  finish_args.rounding_term = workspace_->rounding_term[pass_index];
  finish_args.value_radius = value_radius;
  // A budget is spent by the bound itself, so that there the tightest one is wanted.
  finish_args.tv_tolerance = plan_.snapshot.tv_budget() == nullptr ? tolerances.tv_tolerance : 0.0f;
  Certificate finished;
  CERTKV_RETURN_IF_ERROR(kernels_.finish(finish_args, &workspace_->finish, &finished));
  if (finished.left_to_reference) counters_->slow_finishes.fetch_add(1, std::memory_order_relaxed);
  certificate->worst_case_tv = finished.worst_case_tv;
  certificate->value_term = finished.value_term;
  certificate->output_error_bound = finished.output_error_bound;
  certificate->value_radius = finished.value_radius;
  certificate->skipped_share = finished.skipped_share;
  if (finish_args.tv_tolerance > 0 && !MeetsOutputTolerance(*certificate, tolerances)) {
    // It may have stopped at tv_tolerance while the output's limit needs less.
    finish_args.tv_tolerance = 0;
    CERTKV_RETURN_IF_ERROR(kernels_.finish(finish_args, &workspace_->finish, &finished));
    if (finished.left_to_reference) {
      counters_->slow_finishes.fetch_add(1, std::memory_order_relaxed);
    }
    certificate->worst_case_tv = finished.worst_case_tv;
    certificate->output_error_bound = finished.output_error_bound;
  }
  certificate->failure_probability = share_[g];
  certificate->layer = plan_.request.layer;
  certificate->query_head = kv_head_ * group_size() + g;
  certificate->query_position = plan_.request.query_position;
  if (!was_read_[g]) certificate->first_worst_case_tv = certificate->worst_case_tv;
  was_read_[g] = true;
  return absl::OkStatus();
}

bool KvHeadRead::TakeFromBudget(int32_t g, KvHeadResult* result) {
  int64_t units = 0;
  if (plan_.snapshot.tv_budget() != nullptr) {
    units = plan_.snapshot.tv_budget()->Reserve(result->certificates[g].worst_case_tv);
  }
  if (units >= 0) {
    result->reserved_units += units;
    return true;
  }
  // The budget is used up: exact from now on.
  workspace_->ladders[g].ClimbToHead({plan_.tile_begin(), plan_.tile_end()}, sources(g));
  skip_[g] = 0;
  return false;
}

absl::Status KvHeadRead::DecideSkipping(int32_t pass_index, KvHeadResult* result) {
  const int32_t g = pass_heads_[pass_index];
  const ReadCertificate& certificate = result->certificates[g];
  const Tolerances& tolerances = terms_[g].tolerances;
  const bool meets = MeetsTolerances(certificate, tolerances);
  if (meets || plan_.mode == ReadMode::kObserve) {
    if (plan_.mode != ReadMode::kObserve && !TakeFromBudget(g, result)) return absl::OkStatus();
    for (int32_t tile = plan_.tile_begin(); tile < plan_.tile_end(); ++tile) {
      const uint8_t read =
          workspace_->sub_blocks_read[int64_t{pass_index} * plan_.tile_count + tile];
      sources(g)[tile] |= static_cast<uint8_t>((~read & 0xf) << kSkippedShift);
    }
    return Accept(pass_index, meets ? Outcome::kCertified : Outcome::kObserved,
                  SkippingAmountOf(pass_index), result);
  }
  counters_->skip_misses.fetch_add(1, std::memory_order_relaxed);
  skip_[g] = NextSkip(certificate, tolerances, skip_[g]);
  return absl::OkStatus();
}

absl::Status KvHeadRead::Decide(const AttendArgs& args, int32_t pass_index, KvHeadResult* result) {
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
    return Accept(pass_index, Outcome::kExact, AmountOf(g), result);
  }
  const bool meets = MeetsTolerances(certificate, tolerances);
  if (plan_.mode == ReadMode::kObserve) {
    return Accept(pass_index, meets ? Outcome::kCertified : Outcome::kObserved, AmountOf(g),
                  result);
  }
  if (meets) {
    if (!TakeFromBudget(g, result)) return absl::OkStatus();
    return Accept(pass_index, Outcome::kCertified, AmountOf(g), result);
  }
  const TileSpan tiles = {plan_.tile_begin(), plan_.tile_end()};
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
      .top_half_width = workspace_->top_half_width.data() + first_atom,
      .tile_value_error =
          workspace_->tile_value_error.data() + int64_t{pass_index} * plan_.tile_count,
  };
  workspace_->ladders[g].Climb(evidence, tolerances, &workspace_->ladder, sources(g));
  return absl::OkStatus();
}

absl::Status KvHeadRead::Accept(int32_t pass_index, Outcome outcome, const Amount& amount,
                                KvHeadResult* result) {
  const int32_t g = pass_heads_[pass_index];
  ReadCertificate& certificate = result->certificates[g];
  is_pending_[g] = false;
  certificate.read_tokens = amount.read_tokens;
  certificate.skipped_tokens = amount.skipped_tokens;
  certificate.read_bytes = amount.bytes;
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

int64_t KvHeadRead::TailBytes() const {
  const CacheSpec& spec = plan_.cache->spec();
  const int64_t tail_begin = int64_t{plan_.tile_count} * kTileTokens;
  const int64_t tokens =
      std::max<int64_t>(0, plan_.token_end - std::max(tail_begin, plan_.token_begin));
  return tokens * (spec.head_dim + spec.value_dim) * int64_t{sizeof(uint16_t)};
}

KvHeadRead::Amount KvHeadRead::AmountOf(int32_t g) {
  Amount amount;
  amount.read_tokens = plan_.token_end - plan_.token_begin;
  amount.bytes = RepairBytes(g) + TailBytes();
  for (int32_t tile = plan_.tile_begin(); tile < plan_.tile_end(); ++tile) {
    const bool header_only = sources(g)[tile] == kSourceOriginals;
    amount.bytes += header_only ? int64_t{sizeof(TileHeader)} : plan_.tile_layout().tile_bytes();
  }
  return amount;
}

KvHeadRead::Amount KvHeadRead::SkippingAmountOf(int32_t pass_index) const {
  const TileLayout& layout = plan_.tile_layout();
  const uint8_t* read = workspace_->sub_blocks_read.data() + int64_t{pass_index} * plan_.tile_count;
  const int64_t tail_begin = int64_t{plan_.tile_count} * kTileTokens;
  Amount amount;
  amount.read_tokens =
      std::max<int64_t>(0, plan_.token_end - std::max(tail_begin, plan_.token_begin));
  amount.bytes = TailBytes() + layout.scan_bytes * (plan_.tile_end() - plan_.tile_begin());
  for (int32_t tile = plan_.tile_begin(); tile < plan_.tile_end(); ++tile) {
    for (int b = 0; b < kSubBlocksPerTile; ++b) {
      if ((read[tile] >> b & 1) == 0) continue;
      const int64_t begin = int64_t{tile} * kTileTokens + b * kSubBlockTokens;
      amount.read_tokens +=
          std::min(begin + kSubBlockTokens, plan_.token_end) - std::max(begin, plan_.token_begin);
      amount.bytes += layout.sub_block_bytes;
    }
  }
  amount.skipped_tokens = plan_.token_end - plan_.token_begin - amount.read_tokens;
  return amount;
}

}  // namespace certkv::certifier
