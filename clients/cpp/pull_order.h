// When blocks that are fetched from another store are found.
#ifndef CERTKV_CLIENTS_CPP_PULL_ORDER_H_
#define CERTKV_CLIENTS_CPP_PULL_ORDER_H_

#include <cstdint>

namespace certkv::client {

// As certkv.kvstore.v1.PullOrder, with its numbers.
enum class PullOrder : uint8_t {
  kWhole = 1,           // once planes and originals are there
  kOriginalsLater = 2,  // once planes are there: reads that need originals before they have
                        // followed get errors
  kOriginalsOnly = 3,   // once originals are there and planes were made of them
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_PULL_ORDER_H_
