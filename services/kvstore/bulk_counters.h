// What the bulk plane has done since its process started.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_COUNTERS_H_
#define CERTKV_SERVICES_KVSTORE_BULK_COUNTERS_H_

#include <atomic>
#include <cstdint>

namespace certkv::kvstore {

// Threads: safe.
struct BulkCounters {
  std::atomic<int64_t> connections{0};  // open now, of both kinds
  std::atomic<int64_t> blocks_sent{0};
  std::atomic<int64_t> bytes_sent{0};  // of data
  std::atomic<int64_t> blocks_received{0};
  std::atomic<int64_t> bytes_received{0};         // of data, whether or not they were good
  std::atomic<int64_t> reconnects{0};             // connections that were made anew within a pull
  std::atomic<int64_t> idle_connections{0};       // of ours to others, open now and used by no pull
  std::atomic<int64_t> connections_made{0};       // of ours, those made anew included
  std::atomic<int64_t> connections_reused{0};     // that a pull had of one before it
  std::atomic<int64_t> connections_replaced{0};   // of these, that had ended meanwhile
  std::atomic<int64_t> connections_displaced{0};  // of others, idle ones closed for new ones
  std::atomic<int64_t> blocks_damaged{0};  // received otherwise than sealed, and asked for again
  std::atomic<int64_t> planes_rebuilt{0};  // of these, planes made anew from good originals
  std::atomic<int64_t> originals_lost{0};  // blocks whose originals did not come after their planes
  std::atomic<int64_t> pulls{0};           // that began
  std::atomic<int64_t> pulls_failed{0};    // ended with an error
  std::atomic<int64_t> peers_refused{0};   // connections ended for what was asked or not shown
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_COUNTERS_H_
