// Two stores in this process with the bulk plane between them, and plain sockets to compare it
// with.
#ifndef CERTKV_BENCH_SERVICES_BULK_STORES_H_
#define CERTKV_BENCH_SERVICES_BULK_STORES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "services/kvstore/bulk_plane.h"
#include "tests/support/loopback.h"
#include "tests/support/packet_link.h"
#include "tests/support/store_harness.h"

namespace certkv::bench {

inline constexpr int32_t kStagingSlots = 4;

// 8 layers, 8 KV heads, d 128, 256 tokens: 8.4 MB of originals and 3.4 MB of planes a block.
CacheSpec BulkSpec();

double SecondsOf(const std::function<void()>& call);

// A server's and a client's certificate, made by the script that operators use.
class BenchCertificates {
 public:
  BenchCertificates();
  ~BenchCertificates();
  std::string Path(const char* name) const;

 private:
  std::string directory_;
};

enum class Wire : uint8_t { kPlain, kTls };

// How a store that pulls is set up.
struct PullSetup {
  Wire wire = Wire::kPlain;
  int32_t connections = 1;
  bool keeps_connections = true;
};

class Stores {
 public:
  // The source has a chain of so many blocks, and serves it on loopback and, where there is one, at
  // end 1 of a link; the target is at end 0.
  Stores(const CacheSpec& spec, int32_t blocks, const PacketLink* link = nullptr);

  int64_t plane_bytes() const { return plane_bytes_; }
  int64_t original_bytes() const { return original_bytes_; }
  int32_t port(Wire wire = Wire::kPlain) { return ServerOf(wire)->port(); }
  int32_t link_port() const { return link_server_->port(); }
  const uint8_t* memory() const { return writer_.backing_memory->base(); }

  // From now on pulls go to that port of loopback, or of the link's other end.
  void Connect(int32_t port, const PullSetup& setup);
  void ConnectOverLink(const PullSetup& setup);
  // Seconds until the chain is there; the target has nothing of it before and after.
  double Pull(int32_t count, kvstore::PullOrder order);

 private:
  kvstore::BulkConfig Config(Wire wire) const;
  std::unique_ptr<kvstore::BulkPlane>& ServerOf(Wire wire) {
    return servers_[static_cast<size_t>(wire)];
  }
  static std::unique_ptr<kvstore::BulkPlane> MakePlane(StoreHarness* store,
                                                       const kvstore::BulkConfig& config);
  void MakeClient(const std::string& peer, const PullSetup& setup);

  const BenchCertificates certificates_;
  const int32_t blocks_;
  const PacketLink* const link_;
  StoreHarness source_;
  StoreHarness target_;
  StoreHarness::Worker writer_;
  StoreHarness::Worker worker_;
  int64_t plane_bytes_ = 0;
  int64_t original_bytes_ = 0;
  std::string peer_;
  std::unique_ptr<kvstore::BulkPlane> servers_[2];
  std::unique_ptr<kvstore::BulkPlane> link_server_;
  std::unique_ptr<kvstore::BulkPlane> client_;
};

// Sends so many bytes of `memory` to each of `connections` that come.
class PlainSender {
 public:
  PlainSender(const uint8_t* memory, int64_t bytes, int32_t connections,
              const char* host = kLoopback);
  ~PlainSender();
  int32_t port() const { return port_; }

 private:
  int32_t port_ = 0;
  const UniqueFd listener_;
  std::vector<std::thread> threads_;
};

// Seconds until all connections have received all their bytes into `memory`.
double PlainReceive(int32_t port, int64_t bytes, int32_t connections, std::vector<uint8_t>& memory,
                    const char* host = kLoopback);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_SERVICES_BULK_STORES_H_
