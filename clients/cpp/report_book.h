// ReportBook: one request's account at gate as its client keeps it: the lease to read under, what
// of its slice was used, the batches that gate has not acknowledged, and the slices to return. It
// neither waits, nor reads a clock, nor calls; Request does, and so does the simulator.
#ifndef CERTKV_CLIENTS_CPP_REPORT_BOOK_H_
#define CERTKV_CLIENTS_CPP_REPORT_BOOK_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "clients/cpp/slice_account.h"
#include "kernels/core/policy.h"

namespace certkv::client {

// A lease and the account of its slice, to be held while a read under it runs.
struct LeaseInUse {
  PolicyLease lease;
  std::shared_ptr<SliceAccount> account;  // null when lease.lease_id is 0
};

// How far an output that was used lies from the exact one, and how far it may.
struct CanaryFinding {
  int32_t layer = 0;
  int32_t query_head = 0;
  int64_t query_position = 0;
  double error = 0;  // 2-norm, value units; NaN or infinite: a mismatch
  double bound = 0;
};

struct SpentSlice {
  int64_t lease_id = 0;
  double spent = 0;  // a multiple of 2^-40
};
struct OutgoingReport {
  int64_t batch_number = 0;
  int64_t lease_id = 0;
  std::vector<ReadCertificate> certificates;
  int64_t failed_read_count = 0;
  std::vector<CanaryFinding> canaries;
  std::vector<SpentSlice> returned;
  bool is_last = false;
};
struct ReportAnswer {
  int64_t batch_number = 0;
  bool release = false;      // gate does not know the request any more
  bool force_exact = false;  // the lease is one to read exactly under
  std::optional<PolicyLease> lease;
};

// Invariants:
//  1. Batches are acknowledged in order; the front is the one that is (re)sent.
//  2. No lease replaces one of a later sequence number.
//  3. A slice is returned once nobody can spend of it any more, and then only once.
// Threads: the caller serializes; accounts are spent from on any thread.
class ReportBook {
 public:
  static constexpr size_t kBatchesWaitingMax = 64;
  static constexpr size_t kSlicesReturnableMax = 7;  // and the lease in use: 8, as at gate

  explicit ReportBook(PolicyLease lease);

  // What to read under now: exact when the request was released, closed or lost certificates, when
  // the lease has expired, or its slice was abandoned.
  LeaseInUse UseLease(int64_t now_ms) const;
  // The certifier that read under this lease is gone, and with it its account of the slice.
  void AbandonSlice(int64_t lease_id);

  bool HasRoom() const { return waiting_.size() < kBatchesWaitingMax; }
  void AddReport(absl::Span<const ReadCertificate> certificates, int64_t failed_read_count);
  void AddCanaries(absl::Span<const CanaryFinding> findings);
  // Certificates were lost: reads are exact from now on.
  void NoteLoss() { incomplete_ = true; }
  // Queues a batch without certificates, which renews the lease. The last one returns all slices,
  // and asks for no lease.
  void QueueRenewal(bool is_last);
  // Queues the last one; once.
  void Close();

  // The batch to send now, or null. It stays until it is acknowledged.
  const OutgoingReport* Front() const { return waiting_.empty() ? nullptr : &waiting_.front(); }
  void TakeAnswer(ReportAnswer answer);

  bool wants_lease() const { return account_ == nullptr && !released_ && !closing_; }
  bool is_closing() const { return closing_; }
  bool is_released() const { return released_; }  // reads are exact; open another request
  bool is_incomplete() const { return incomplete_; }
  size_t waiting_count() const { return waiting_.size(); }

 private:
  void TakeLease(PolicyLease lease);
  // The slices of retired accounts that no read uses any more, with what was spent; of all, for the
  // last batch. They are returned with the batch that is queued next.
  std::vector<SpentSlice> TakeReturnable(bool is_last);

  PolicyLease lease_;
  std::shared_ptr<SliceAccount> account_;  // null: abandoned
  std::vector<std::shared_ptr<SliceAccount>> retired_;
  bool closing_ = false;
  bool released_ = false;
  bool incomplete_ = false;
  int64_t next_batch_ = 1;
  std::deque<OutgoingReport> waiting_;
};

// A lease that allows nothing but exact reads, of no slice.
PolicyLease ExactLease(const std::string& request);

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_REPORT_BOOK_H_
