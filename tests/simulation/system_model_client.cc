// What a client of a SystemModel does.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "services/gate/budget_units.h"
#include "services/gate/gate_fixture.h"
#include "tests/simulation/system_client.h"

namespace certkv {
namespace {

constexpr int64_t kCallTimeoutMs = 200;
constexpr int64_t kPolicyRenewMs = 600;

}  // namespace

void SystemModel::Work(size_t index) {
  Client& client = *clients_[index];
  if (client.store_life != store_life_) {
    // Its descriptor socket is closed: a real worker's calls say SESSION_LOST, and it starts anew.
    StartClient(index);
    return;
  }
  RenewLeases(index);
  if (client.read_call != 0 && NowMs() >= client.read_timeout_ms) {
    // The certifier does not answer: with it is gone what it knew of the slice.
    client.read_call = 0;
    client.read_lease.account = nullptr;
    if (client.book != nullptr) client.book->AbandonSlice(client.read_lease.lease.lease_id);
    ReadExactly(index);
  }
  const uint32_t choice = Draw(100);
  const bool is_over =
      client.book != nullptr && (client.book->is_released() || client.book->is_incomplete());
  if (is_over && client.read_call == 0) {
    client.book = nullptr;  // gate was restarted, or unreachable for long
    client.sent_batch = 0;
  }
  if (client.book == nullptr) return OpenRequest(index);
  if (choice < 20) return LookUpOrWrite(index);
  if (choice < 50) return Read(index);
  if (choice < 99) return SendReport(index);
  if (client.read_call != 0) return;
  // The request ends, with all that is left of its slices.
  client.book->Close();
  SendReport(index);
}

void SystemModel::OpenRequest(size_t index) {
  const int64_t id = clients_[index]->id;
  Send([this, index, id] {
    gate::RequestTerms terms;
    if (canary_ != Canary::kGateForgetsTenant) terms.tenant = TenantOf(index);
    const std::string name = absl::StrCat("r", gate_life_, "-", TenantOf(index), id % 3);
    const auto lease = gate_->OpenRequest(name, "", terms);
    if (!lease.ok()) {
      if (ReasonOf(lease.status()) != "REQUEST_CLOSED") Fail(lease.status().ToString());
      return;
    }
    const int64_t life = gate_life_;
    Send([this, index, id, life, lease = *lease] {
      Client& client = *clients_[index];
      if (client.id != id || client.book != nullptr) return;  // another's, or the second answer
      client.request = lease.request;
      client.request_life = life;
      client.reporter_id = ++last_id_;
      client.book = std::make_unique<client::ReportBook>(lease);
      served_units_.try_emplace({life, lease.request}, 0);
    });
  });
}

bool SystemModel::HoldsBlocks(const Client& client) const {
  if (client.blocks.empty()) return false;
  return canary_ == Canary::kIgnoresLeases || client.leases.Check(client.lease, NowMs()).ok();
}

bool SystemModel::CheckBytes(const Client& client) {
  for (const BlockHandle& block : client.blocks) {
    if (store_->IsReadable(client.worker, block)) continue;
    if (IsDamaged(block) && canary_ != Canary::kIgnoresDamage) return false;
    const auto info = store_->engine.GetBlock(store_->cache, block.key);
    Fail(absl::StrCat(
        "client ", client.id, " of store ", client.store_life, " (now ", store_life_,
        ") holds a lease, but its block has other bytes: slots ", block.device.slot, " and ",
        block.backing.slot, ", generations ", block.device.generation, " and ",
        block.backing.generation, "; the store has ",
        info.ok() ? absl::StrCat(info->handle.device.slot, " and ", info->handle.backing.slot,
                                 ", generations ", info->handle.device.generation, " and ",
                                 info->handle.backing.generation, info->lost ? ", lost" : "",
                                 ", leases ", info->lease_count)
                  : info.status().ToString()));
    return false;
  }
  return true;
}

void SystemModel::Repair(size_t index) {
  Client& client = *clients_[index];
  if (NowMs() < client.repair_time_ms) return;
  client.repair_time_ms = NowMs() + kCallTimeoutMs;
  std::vector<BlockKey> keys;
  for (const BlockHandle& block : client.blocks) keys.push_back(block.key);
  Send([this, index, keys, id = client.id, life = store_life_, lease = client.lease] {
    Client& client = *clients_[index];
    if (client.id != id || life != store_life_) return;
    const auto repaired = store_->engine.FetchOriginals(client.worker.session, lease, keys);
    CheckRepair(client, keys, repaired);
    if (!absl::IsDataLoss(repaired.status())) return;
    Send([this, index, id, lease] {
      Client& client = *clients_[index];
      if (client.id != id || client.lease != lease) return;
      client.leases.Remove(lease);  // it will write the blocks anew
      client.blocks.clear();
    });
  });
}

// After success every block is what was sealed; and none is given up whose originals were good.
void SystemModel::CheckRepair(const Client& client, const std::vector<BlockKey>& keys,
                              const absl::StatusOr<std::vector<BlockHandle>>& repaired) {
  if (repaired.ok()) {
    ++counts_.repairs;
    for (const BlockHandle& block : *repaired) {
      if (!store_->IsReadable(client.worker, block))
        Fail("a repaired block is not what was sealed");
    }
    return;
  }
  if (!absl::IsDataLoss(repaired.status())) return;  // its lease has ended, say
  ++counts_.lost;
  for (const BlockKey& key : keys) {
    const auto info = store_->engine.GetBlock(store_->cache, key);
    if (!info.ok() || !info->lost) continue;
    const SlotRef& ref = info->handle.backing;
    if (!damages_.contains({store_life_, true, ref.slot, ref.generation})) {
      Fail("a repair gave up a block whose originals were good");
    }
  }
}

void SystemModel::LookUpOrWrite(size_t index) {
  Client& client = *clients_[index];
  if (HoldsBlocks(client) && Draw(4) != 0) return;
  if (NowMs() < client.retry_time_ms) return;
  if (client.lease != LeaseId{}) {
    client.leases.Remove(client.lease);
    Send([this, session = client.worker.session, lease = client.lease] {
      // The store may have forgotten the session.
      store_->engine.ReleaseLease(session, lease).IgnoreError();
    });
    client.lease = LeaseId{};
    client.blocks.clear();
  }
  const auto chain = static_cast<int32_t>(Draw(kChains)) + 100 * static_cast<int32_t>(index % 2);
  const int64_t id = client.id;
  const int64_t call = client.lookup_call = ++last_id_;
  Send([this, index, id, call, chain, life = store_life_] {
    Client& client = *clients_[index];
    if (client.id != id || life != store_life_) return;
    const SessionId session = client.worker.session;
    auto found = store_->engine.LookupAndLease(session, ChainKeys(chain, kChainLength), 0);
    if (found.ok() && static_cast<int32_t>(found->blocks.size()) < kChainLength) {
      // The worker writes what is missing; its staging memory is its own.
      const auto have = static_cast<int32_t>(found->blocks.size());
      const auto sealed = store_->Put(client.worker, chain, have, kChainLength - have);
      if (!sealed.ok() && RetryDelayMsOf(sealed.status()) > 0) {
        ++counts_.refusals;
        if (!client.retry.has_value()) client.retry.emplace(client::Retry::kNever, 2000, id);
        const auto delay_ms = client.retry->NextDelayMs(sealed.status(), 10'000);
        if (delay_ms.has_value()) {
          client.retry_time_ms = NowMs() + *delay_ms;
        } else {
          client.retry.reset();
        }
      }
    }
    if (!found.ok() || found->lease == LeaseId{}) return;
    Send([this, index, id, call, chain, found = *found] {
      Client& client = *clients_[index];
      // An answer that nobody waits for: its lease is left to its deadline.
      if (client.id != id || client.lookup_call != call) return;
      client.lookup_call = 0;
      client.chain = chain;
      client.lease = found.lease;
      client.blocks = found.blocks;
      client.retry.reset();
      client.leases.Add(found.lease, found.expire_time_ms);
    });
  });
  if (canary_ == Canary::kStoreForgetsLease && Draw(8) == 0 && client.lease != LeaseId{}) {
    store_->engine.ReleaseLease(client.worker.session, client.lease).IgnoreError();
  }
}

void SystemModel::RenewLeases(size_t index) {
  Client& client = *clients_[index];
  for (const LeaseId lease : client.leases.Due(NowMs())) {
    if (!client.renewing.insert(lease).second) continue;
    const int64_t id = client.id;
    Send([this, index, id, lease, session = client.worker.session] {
      const auto renewed = store_->engine.RenewLease(session, lease, 0);
      Send([this, index, id, lease, renewed] {
        Client& client = *clients_[index];
        if (client.id != id) return;
        client.leases.NoteRenewal(lease, renewed, NowMs());
        client.renewing.erase(lease);
      });
    });
    // An answer that does not come in time is one of UNAVAILABLE.
    if (Draw(3) == 0) {
      client.renewing.erase(lease);
      client.leases.NoteRenewal(lease, absl::UnavailableError("no answer"), NowMs());
    }
  }
  if (canary_ == Canary::kStoreForgetsLease && client.lease != LeaseId{} && Draw(20) == 0) {
    store_->engine.ReleaseLease(client.worker.session, client.lease).IgnoreError();
  }
  if (HoldsBlocks(client) && !CheckBytes(client)) Repair(index);
}

void SystemModel::Read(size_t index) {
  Client& client = *clients_[index];
  if (client.read_call != 0 || !HoldsBlocks(client)) return;
  ++counts_.reads;
  client::LeaseInUse use = client.book->UseLease(NowMs());
  if (use.lease.read_mode == ReadMode::kExact || use.account == nullptr) {
    return ReadExactly(index);
  }
  client.read_call = ++last_id_;
  client.read_timeout_ms = NowMs() + kCallTimeoutMs;
  client.read_lease = use;
  const auto tv = static_cast<float>(Uniform() * Uniform() * 0.2);
  const auto server = static_cast<size_t>(Draw(static_cast<uint32_t>(certifiers_.size())));
  Send([this, index, server, tv, call = client.read_call, lease = use.lease] {
    // The certifier: its account of the slice first, then the read.
    std::vector<ReadCertificate> certificates;
    bool refused = NowMs() >= lease.expire_time_ms || Draw(32) == 0;  // or too many streams
    if (!refused) {
      const auto account = certifiers_[server]->budgets.AccountOf(lease, NowMs());
      refused = !account.ok();
      if (account.ok()) {
        const bool fits = *account == nullptr || (*account)->Reserve(tv) >= 0;
        certificates.push_back(fits ? gate::Certified(tv) : gate::Exact(tv));
        issued_.insert(call);
      }
    }
    if (refused && canary_ == Canary::kUsesUncertified) {
      certificates.push_back(gate::Certified(tv));
      refused = false;
    }
    Send([this, index, call, lease, certificates, refused] {
      Client& client = *clients_[index];
      if (client.read_call != call) return;  // too late, or the second answer
      client.read_call = 0;
      const auto account = std::exchange(client.read_lease.account, nullptr);
      if (refused) return ReadExactly(index);
      FinishRead(index, call, lease, account, certificates);
    });
  });
}

void SystemModel::FinishRead(size_t index, int64_t call, const PolicyLease& lease,
                             const std::shared_ptr<client::SliceAccount>& account,
                             const std::vector<ReadCertificate>& certificates) {
  Client& client = *clients_[index];
  const bool is_spent = canary_ == Canary::kSkipsSpend || account->Spend(lease, certificates);
  if (!is_spent) return ReadExactly(index);
  if (!HoldsBlocks(client)) {  // the lease ended under the read: its output is not used
    ++counts_.failed;
    return;
  }
  if (!CheckBytes(client)) {  // the certifier has answered DATA_LOSS
    ++counts_.failed;
    return Repair(index);
  }
  for (const ReadCertificate& certificate : certificates) {
    if (certificate.outcome == Outcome::kExact) {
      ++counts_.exact;
      continue;
    }
    ++counts_.certified;
    if (!(certificate.worst_case_tv <= lease.tolerances.tv_tolerance)) {
      Fail("an output outside its tolerance was used");
    }
    if (lease.read_mode != ReadMode::kEnforce) Fail("an output of a mode that does not enforce");
    if (!issued_.contains(call)) Fail("an output that no certifier has certified was used");
    served_units_[{client.request_life, client.request}] +=
        gate::SpentUnits(certificate.worst_case_tv);
    if (client.request_life == gate_life_) {
      tenant_units_[TenantOf(index)] += gate::SpentUnits(certificate.worst_case_tv);
    }
  }
  if (client.book->HasRoom()) {
    client.book->AddReport(certificates, 0);
  } else {
    client.book->NoteLoss();
  }
}

void SystemModel::ReadExactly(size_t index) {
  Client& client = *clients_[index];
  if (!HoldsBlocks(client)) {
    ++counts_.failed;  // an error, not an output
    return;
  }
  if (!CheckBytes(client)) {
    ++counts_.failed;
    return Repair(index);
  }
  ++counts_.exact;
}

void SystemModel::SendReport(size_t index) {
  Client& client = *clients_[index];
  if (client.book->Front() == nullptr) {
    if (client.book->is_closing()) {  // all is acknowledged: the request is over
      client.book = nullptr;
      client.sent_batch = 0;
      return;
    }
    if (!client.book->wants_lease() && NowMs() < client.renew_policy_ms) return;
    client.renew_policy_ms = NowMs() + kPolicyRenewMs;
    client.book->QueueRenewal(false);
  }
  const client::OutgoingReport report = *client.book->Front();
  if (client.sent_batch == report.batch_number && NowMs() < client.send_again_ms) return;
  client.sent_batch = report.batch_number;
  client.send_again_ms = NowMs() + kCallTimeoutMs;
  Send([this, index, report, id = client.reporter_id, request = client.request] {
    gate::OwnedBatch batch{.reporter_id = id,
                           .batch_number = report.batch_number,
                           .lease_id = report.lease_id,
                           .certificates = report.certificates,
                           .failed_read_count = report.failed_read_count,
                           .is_last = report.is_last};
    for (const client::SpentSlice& slice : report.returned) {
      const double spent = canary_ == Canary::kReturnsTooMuch ? 0 : slice.spent;
      batch.returned.push_back({slice.lease_id, gate::SpentUnits(spent)});
    }
    const auto answer = gate_->Report(request, batch.batch());
    if (!answer.ok()) {
      // A copy that was overtaken by later batches, of a reporter that gate knows otherwise.
      if (ReasonOf(answer.status()) != "BATCH_GAP") Fail(answer.status().ToString());
      return;
    }
    client::ReportAnswer reply;
    reply.batch_number = report.batch_number;
    reply.release = answer->action == gate::DirectiveAction::kRelease;
    reply.force_exact = answer->action == gate::DirectiveAction::kForceExact;
    reply.lease = answer->lease;
    Send([this, index, id, reply] {
      Client& client = *clients_[index];
      if (client.reporter_id != id || client.book == nullptr) return;
      client.book->TakeAnswer(reply);
    });
  });
}

}  // namespace certkv
