#include "tests/simulation/system_model.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/gate/budget_units.h"
#include "services/gate/gate_fixture.h"
#include "tests/simulation/system_client.h"

namespace certkv {
namespace {

constexpr size_t kClients = 4;
constexpr size_t kCertifiers = 2;
constexpr int64_t kTenantWindowMs = 4000;
constexpr int64_t kPayloadBytesMax = 55'000;  // of a block on disk

gate::Policy PolicyOf(uint32_t seed) {
  gate::Policy policy = gate::CumulativePolicy(2.0 + 3 * (seed % 5), 0.05 + 0.05 * (seed % 4));
  if (seed % 4 == 1) {
    policy.risk_mode = RiskMode::kAnytime;
    policy.failure_probability = 0.1;
  }
  policy.lease_duration_ms = 2000;
  // Less than what its requests together ask for, so that it binds.
  policy.tenant_budget = 1.0 + 0.5 * (seed % 3);
  policy.tenant_window_ms = kTenantWindowMs;
  return policy;
}

}  // namespace

SystemModel::SystemModel(uint32_t seed, Canary canary)
    : random_(seed), canary_(canary), network_(NetworkFaults{}, seed + 1) {
  gate_config_.policy = PolicyOf(seed);
  gate_config_.reporters_per_request_max = 65536;
  StartStore();
  StartGate();
  for (size_t i = 0; i < kCertifiers; ++i) certifiers_.push_back(std::make_unique<Certifier>());
  clients_.resize(kClients);
  for (size_t i = 0; i < kClients; ++i) StartClient(i);
}

SystemModel::~SystemModel() = default;

void SystemModel::StartStore() {
  ++store_life_;
  // Two of the four clients are of a tenant that is guaranteed and limited.
  const int64_t slot = SlabLayout::SlotBytes(TinySpec(), SlabKind::kBacking);
  const std::vector<kvstore::TenantQuota> quotas = {{.tenant = "t0",
                                                     .backing_guaranteed_bytes = 3 * slot,
                                                     .backing_limit_bytes = 6 * slot,
                                                     .spill_limit_bytes = 6 * kPayloadBytesMax}};
  tier_ = std::make_unique<kvstore::SpillTier>(
      std::make_unique<FakeSpillStore>(&disk_),
      kvstore::SpillLimits{
          .size_bytes = kPayloadBytesMax * 16, .ttl_ms = 600'000, .quotas = quotas},
      &disk_clock_);
  if (!tier_->Load().ok()) Fail("the disk's index can't be read");
  StoreShape shape;
  shape.device_slots = 8;
  shape.backing_slots = 10;
  shape.config.lease_duration_ms = kBlockLeaseMs;
  shape.config.tenant_quotas = quotas;
  shape.spill = tier_.get();
  const int64_t now_ms = store_ == nullptr ? FakeClock::kStartMs : NowMs();
  store_.reset();
  store_ = std::make_unique<StoreHarness>(shape);
  store_->clock.AdvanceMs(now_ms - FakeClock::kStartMs);
}

void SystemModel::StartGate() {
  ++gate_life_;
  tenant_units_.clear();
  gate_start_ms_ = disk_clock_.NowMs();
  tenant_window_ = 0;
  gate_ = std::make_unique<gate::RequestRegistry>(gate_config_, &disk_clock_);
}

void SystemModel::StartClient(size_t index) {
  auto client = std::make_unique<Client>(++last_id_);
  client->worker = store_->Attach(absl::StrCat("c", client->id), 4, absl::StrCat("t", index % 2));
  client->store_life = store_life_;
  clients_[index] = std::move(client);
}

void SystemModel::Step() {
  const auto moved_ms = static_cast<int64_t>(Draw(12));
  store_->clock.AdvanceMs(moved_ms);
  disk_clock_.AdvanceMs(moved_ms);
  network_.Deliver(NowMs());
  store_->engine.Tick();
  const uint32_t action = Draw(1000);
  if (action < 12) {
    Break();
  } else if (action < 30) {
    store_->engine.SpillAhead();
    store_->engine.KeepWatermarks();
    store_->engine.Prefetch();
    tier_->Expire();
  } else if (action < 45) {
    gate_->Sweep();  // tenants' windows, requests that are idle
  } else {
    Work(Draw(kClients));
  }
  CheckBudgets();
  CheckTenants();
  for (const kvstore::TenantSpill& tenant : tier_->GetStats().tenants) {
    if (tenant.tenant == "t0" && tenant.bytes > 6 * kPayloadBytesMax) {
      Fail("a tenant has more on disk than its limit");
    }
  }
  if (last_id_ % 16 == 0) store_->engine.CheckInvariants();
}

void SystemModel::Break() {
  ++counts_.restarts;
  const uint32_t what = Draw(15);
  if (what < 3) {  // a client dies, with its slice, its leases and what it did not report
    const size_t index = Draw(kClients);
    store_->engine.EndSession(clients_[index]->worker.session, "its process ended");
    StartClient(index);
  } else if (what < 6) {  // a certifier dies, with its accounts of slices
    certifiers_[Draw(kCertifiers)] = std::make_unique<Certifier>();
  } else if (what == 6) {
    StartGate();
  } else if (what == 7) {  // kill -9 of the store; clients find that out by themselves
    StartStore();          // what a client has mapped stays mapped
  } else if (what == 8) {
    disk_.is_full = !disk_.is_full;
  } else if (what == 9 && !disk_.files.empty()) {  // a torn write: the end is not there
    auto file = disk_.files.begin();
    std::advance(file, Draw(static_cast<uint32_t>(disk_.files.size())));
    auto& payload = file->second.payload;
    const size_t kept = Draw(static_cast<uint32_t>(payload.size()));
    std::fill(payload.begin() + static_cast<int64_t>(kept), payload.end(), uint8_t{0});
  } else if (what == 10) {
    store_->engine.Scrub(1 << 20);
  } else if (what < 14) {
    DamageMemory();
  } else {
    // A partition, or a process that is stopped for a while: nobody hears anything.
    const auto moved_ms = static_cast<int64_t>(Draw(1500));
    store_->clock.AdvanceMs(moved_ms);
    disk_clock_.AdvanceMs(moved_ms);
  }
}

// Flips a bit of a block that a client reads: in its planes, or less often in its originals.
void SystemModel::DamageMemory() {
  const Client& client = *clients_[Draw(kClients)];
  if (client.store_life != store_life_ || !HoldsBlocks(client)) return;
  const BlockHandle& block = client.blocks[Draw(static_cast<uint32_t>(client.blocks.size()))];
  const auto layer = static_cast<int32_t>(Draw(static_cast<uint32_t>(store_->spec.layer_count())));
  const bool is_backing = Draw(4) == 0;
  const SlotRef& ref = is_backing ? block.backing : block.device;
  if (!ref.present() || !store_->IsReadable(client.worker, block)) return;
  const auto& memory = is_backing ? client.worker.backing_memory : client.worker.device_memory;
  const int64_t begin = is_backing ? store_->backing_layout.key_offset(ref.slot, layer, 0)
                                   : store_->device_layout.detail_offset(ref.slot, layer, 0, 0);
  memory->base()[begin + Draw(1024)] ^= static_cast<uint8_t>(1 << Draw(8));
  damages_.insert({store_life_, is_backing, ref.slot, ref.generation});
}

bool SystemModel::IsDamaged(const BlockHandle& block) const {
  return damages_.contains({store_life_, true, block.backing.slot, block.backing.generation}) ||
         damages_.contains({store_life_, false, block.device.slot, block.device.generation});
}

// In no window does a tenant get more than its budget, so that what was served is at most a budget
// for each window that has begun.
void SystemModel::CheckTenants() {
  const int64_t window = (disk_clock_.NowMs() - gate_start_ms_) / kTenantWindowMs;
  const double limit = gate_config_.policy.tenant_budget;
  for (const auto& [tenant, units] : tenant_units_) {
    if (gate::ToAmount(units) > limit * static_cast<double>(window + 1)) {
      Fail(absl::StrCat("tenant ", tenant, " was served ", gate::ToAmount(units), " in ",
                        window + 1, " windows of ", limit));
    }
  }
  for (const gate::TenantStanding& tenant : gate_->Tenants()) {
    if (tenant.committed > limit) {
      Fail(absl::StrCat("tenant ", tenant.tenant, " has committed ", tenant.committed, " of ",
                        limit));
    }
    if (window > tenant_window_ && tenant.committed > 0.9 * limit) ++counts_.tenant_windows;
  }
  tenant_window_ = window;
}

void SystemModel::CheckBudgets() {
  for (const auto& [where, units] : served_units_) {
    if (where.first != gate_life_) continue;
    const auto risk = gate_->GetRisk(where.second);
    if (!risk.ok()) continue;  // closed and forgotten
    if (gate::ToAmount(units) > risk->budget_committed) {
      Fail(absl::StrCat(where.second, " was served ", gate::ToAmount(units),
                        ", gate has committed ", risk->budget_committed));
    }
    if (risk->budget_committed > risk->budget) {
      Fail(absl::StrCat(where.second, " has committed ", risk->budget_committed, " of a budget of ",
                        risk->budget));
    }
    if (risk->forced_exact)
      Fail(absl::StrCat(where.second, " was reported outside its tolerance, or beyond its slices"));
  }
}

void SystemModel::End() {
  disk_.is_full = false;
  for (const auto& client : clients_) {
    store_->engine.EndSession(client->worker.session, "the end");
  }
  // A lookup whose answer was lost left a lease, which ends with its session.
  const kvstore::StoreStats stats = store_->engine.GetStats();
  if (stats.session_count != 0 || stats.lease_count != 0) Fail("sessions or leases are left");
  for (const kvstore::CacheStats& cache : stats.caches) {
    if (cache.blocks_leased != 0 || cache.blocks_writing != 0) Fail("blocks are held by nobody");
  }
  store_->engine.CheckInvariants();
}

SystemModel::Counts SystemModel::counts() const {
  Counts counts = counts_;
  counts.messages = network_.delivered();
  return counts;
}

}  // namespace certkv
