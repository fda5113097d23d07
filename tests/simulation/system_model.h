// A whole CertKV in one thread, deterministically: the store's engine with its disk tier, gate's
// registry, certifiers' budget books, and clients made of the client library's own state machines
// (LeaseBook, ReportBook, SliceAccount, RetryPlan), over a network and a disk that misbehave. An
// oracle that sees everything says whether the promises hold.
#ifndef CERTKV_TESTS_SIMULATION_SYSTEM_MODEL_H_
#define CERTKV_TESTS_SIMULATION_SYSTEM_MODEL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "clients/cpp/lease_book.h"
#include "clients/cpp/report_book.h"
#include "services/certifier/budget.h"
#include "services/gate/request_registry.h"
#include "tests/simulation/fake_network.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv {

// A defect that is built in on purpose, to see whether the simulation finds it.
enum class Canary : uint8_t {
  kNone,
  kSkipsSpend,         // a client uses outputs without taking them from its slice
  kIgnoresLeases,      // a client reads on when its block lease is lost
  kReturnsTooMuch,     // a client returns a slice as if nothing had been spent of it
  kStoreForgetsLease,  // the store drops a live lease by itself
  kUsesUncertified,    // a client takes the output of a read that the certifier refused
  kIgnoresDamage,      // a client uses what it read from damaged blocks
  kGateForgetsTenant,  // gate counts no request to its tenant
};

class SystemModel {
 public:
  SystemModel(uint32_t seed, Canary canary);
  ~SystemModel();

  // One event: something is asked for, delivered, killed or broken. Time moves on.
  void Step();
  // What is wrong, or "". Stays once it is something.
  const std::string& violation() const { return violation_; }
  // All that a run that is over must leave behind: nothing leased, nothing leaked.
  void End();

  struct Counts {
    int64_t reads = 0;
    int64_t certified = 0;
    int64_t exact = 0;
    int64_t failed = 0;
    int64_t restarts = 0;
    int64_t messages = 0;
    int64_t refusals = 0;        // for want of room
    int64_t repairs = 0;         // of damaged blocks, by their readers
    int64_t lost = 0;            // of these, blocks whose originals were damaged
    int64_t tenant_windows = 0;  // that ended with most of a tenant's budget committed
  };
  Counts counts() const;

 private:
  struct Client;
  struct Certifier;

  double Uniform() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  uint32_t Draw(uint32_t count) { return static_cast<uint32_t>(random_() % count); }
  int64_t NowMs() const { return store_->clock.NowMs(); }
  void Fail(const std::string& text) {
    if (violation_.empty()) violation_ = text;
  }

  void StartStore();
  void StartGate();
  void StartClient(size_t index);
  void Send(std::function<void()> deliver) { network_.Send(NowMs(), std::move(deliver)); }

  // A client's moves: system_model_client.cc
  void Work(size_t index);
  void OpenRequest(size_t index);
  void LookUpOrWrite(size_t index);
  void RenewLeases(size_t index);
  void Read(size_t index);
  void FinishRead(size_t index, int64_t call, const PolicyLease& lease,
                  const std::shared_ptr<client::SliceAccount>& account,
                  const std::vector<ReadCertificate>& certificates);
  void ReadExactly(size_t index);
  void SendReport(size_t index);
  bool HoldsBlocks(const Client& client) const;
  // May what is read of the client's blocks be used? Not when a certifier would find damage in
  // them.
  bool CheckBytes(const Client& client);
  // Asks the store to make damaged blocks good, as Worker::RepairBlocks does.
  void Repair(size_t index);
  void CheckRepair(const Client& client, const std::vector<BlockKey>& keys,
                   const absl::StatusOr<std::vector<BlockHandle>>& repaired);

  void Break();
  void DamageMemory();
  bool IsDamaged(const BlockHandle& block) const;
  void CheckBudgets();
  void CheckTenants();
  static std::string TenantOf(size_t client) { return client % 2 == 0 ? "even" : "odd"; }

  std::mt19937_64 random_;
  const Canary canary_;
  FakeNetwork network_;
  FakeDisk disk_;
  FakeClock disk_clock_;
  std::unique_ptr<kvstore::SpillTier> tier_;
  std::unique_ptr<StoreHarness> store_;
  int64_t store_life_ = 0;
  GateConfig gate_config_;
  std::unique_ptr<gate::RequestRegistry> gate_;
  int64_t gate_life_ = 0;
  std::vector<std::unique_ptr<Certifier>> certifiers_;
  std::vector<std::unique_ptr<Client>> clients_;
  int64_t last_id_ = 0;
  std::set<int64_t> issued_;  // reads that a certifier has answered with certificates
  // The truth: certified outputs that were used, in units of 2^-40, by life of gate and request.
  std::map<std::pair<int64_t, std::string>, int64_t> served_units_;
  // The same of all requests of a tenant, in the present life of gate, which began then.
  std::map<std::string, int64_t> tenant_units_;
  int64_t gate_start_ms_ = 0;
  int64_t tenant_window_ = 0;  // that was looked at last
  // Slots in which a bit was flipped, by store, tier and generation; and in which tier.
  struct Damage {
    int64_t store_life = 0;
    bool is_backing = false;
    int32_t slot = 0;
    uint64_t generation = 0;
    auto operator<=>(const Damage&) const = default;
  };
  std::set<Damage> damages_;
  std::string violation_;
  Counts counts_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SIMULATION_SYSTEM_MODEL_H_
