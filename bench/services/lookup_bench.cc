// certkv-bench-services: LookupAndLease over a Unix socket against an empty unary call of the same
// server, and what the engine alone takes.
//
// Server and client run in one process, on their own threads. Rounds alternate the calls, because
// clocks of shared machines drift; the percentiles are over rounds.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/kernels/bench_report.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/check.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/half.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "services/common/clock.h"
#include "services/common/convert.h"
#include "services/common/server_runner.h"
#include "services/kvstore/service.h"

ABSL_FLAG(int32_t, rounds, 2000, "rounds of alternating calls, at least 100");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

namespace v1 = kvstore::v1;
using kvstore::v1::KvStore;

constexpr int32_t kBlockCountMax = 1024;
constexpr int32_t kSealBatch = 128;

// The geometry of the demo's trace: 4 layers, 3 KV heads, d 64.
CacheSpec BenchSpec() {
  CacheSpec spec;
  spec.model = "bench";
  spec.kv_head_count = 3;
  spec.group_size = 3;
  spec.head_dim = 64;
  spec.value_dim = 64;
  spec.rope_pairing = RopePairing::kNone;
  spec.logit_scale = 0.125f;
  spec.layers.resize(4);
  return spec;
}

BlockKey KeyAt(int32_t index) {
  BlockKey key;
  key.bytes.fill(0xbe);
  std::memcpy(key.bytes.data(), &index, sizeof(index));
  return key;
}

void CheckOk(const grpc::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error_message().c_str());
  CERTKV_CHECK(status.ok(), "a call of the benchmark succeeds");
}

template <typename Call>
int64_t TimeNs(const Call& call) {
  const int64_t start = RealClock()->MonotonicNs();
  call();
  return RealClock()->MonotonicNs() - start;
}

struct Samples {
  std::vector<int64_t> ns;
  double PercentileUs(double percent) {
    std::sort(ns.begin(), ns.end());
    const auto index = static_cast<size_t>(percent / 100 * static_cast<double>(ns.size() - 1));
    return static_cast<double>(ns[index]) / 1000;
  }
  nlohmann::json ToJson() {
    return {{"p50_us", PercentileUs(50)},
            {"p90_us", PercentileUs(90)},
            {"p99_us", PercentileUs(99)},
            {"rounds", ns.size()}};
  }
};

// A server on a Unix socket with one worker attached.
class Bench {
 public:
  Bench()
      : directory_(std::filesystem::temp_directory_path() /
                   absl::StrCat("certkv-bench-", getpid())) {
    std::filesystem::create_directory(directory_);
    ServerConfig server_config;
    server_config.unix_socket = directory_ / "s";
    server_config.log_level = LogLevel::kError;
    runner_ = std::make_unique<ServerRunner>("certkv-bench-services", server_config);
    KvStoreConfig config;
    config.fd_socket = directory_ / "fd";
    auto store = KvStoreServer::Create(config, RealClock(), runner_->io_context());
    CERTKV_CHECK(store.ok(), "the store starts");
    store_ = *std::move(store);
    const absl::Status started = runner_->Start(
        {{"certkv.kvstore.v1.KvStore", store_->grpc_services(), [this] { store_->Drain(); }}});
    CERTKV_CHECK(started.ok(), "the server starts");
    stub_ = KvStore::NewStub(
        grpc::CreateChannel(runner_->targets()[0], grpc::InsecureChannelCredentials()));
    Attach();
  }
  ~Bench() {
    runner_->Stop();
    store_.reset();
    std::filesystem::remove_all(directory_);
  }

  // Writes and seals the blocks; returns nanoseconds of each SealBlocks call of kSealBatch blocks.
  std::vector<int64_t> Seal() {
    std::vector<int64_t> times;
    for (int32_t first = 0; first < kBlockCountMax; first += kSealBatch) {
      v1::ReserveBlocksRequest reserve;
      reserve.set_session_id(session_);
      reserve.set_block_count(kSealBatch);
      v1::ReserveBlocksResponse reserved;
      CheckOk(Call(&KvStore::Stub::ReserveBlocks, reserve, &reserved));
      v1::SealBlocksRequest seal;
      seal.set_session_id(session_);
      for (int32_t i = 0; i < kSealBatch; ++i) {
        Fill(reserved.staging_slots(i), first + i);
        v1::SealEntry* entry = seal.add_entries();
        entry->set_staging_slot(reserved.staging_slots(i));
        entry->set_block_key(std::string(KeyAt(first + i).view()));
        const BlockKey parent = first + i == 0 ? BlockKey{} : KeyAt(first + i - 1);
        entry->set_parent_key(std::string(parent.view()));
      }
      v1::SealBlocksResponse sealed;
      times.push_back(TimeNs([&] { CheckOk(Call(&KvStore::Stub::SealBlocks, seal, &sealed)); }));
      Release(sealed.lease_id());
    }
    return times;
  }

  // The call that does nothing: ends a lease that isn't there.
  int64_t EmptyNs() {
    return TimeNs([this] { Release(0); });
  }

  int64_t LookupNs(int32_t block_count) {
    v1::LookupAndLeaseRequest request;
    request.set_session_id(session_);
    for (int32_t i = 0; i < block_count; ++i) {
      request.add_block_keys(std::string(KeyAt(i).view()));
    }
    v1::LookupAndLeaseResponse found;
    const int64_t ns =
        TimeNs([&] { CheckOk(Call(&KvStore::Stub::LookupAndLease, request, &found)); });
    CERTKV_CHECK(found.blocks_size() == block_count, "every block is found");
    Release(found.lease_id());
    return ns;
  }

  int64_t block_bytes() const { return SlabLayout::SlotBytes(spec_, SlabKind::kBacking); }

 private:
  template <typename Method, typename Request, typename Response>
  grpc::Status Call(Method method, const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return (stub_.get()->*method)(&context, request, response);
  }

  void Release(int64_t lease) {
    v1::ReleaseLeaseRequest request;
    request.set_session_id(session_);
    request.set_lease_id(lease);
    v1::ReleaseLeaseResponse response;
    CheckOk(Call(&KvStore::Stub::ReleaseLease, request, &response));
  }

  void Attach() {
    v1::RegisterCacheRequest cache_request;
    *cache_request.mutable_spec() = CacheSpecToProto(spec_);
    v1::RegisterCacheResponse cache;
    CheckOk(Call(&KvStore::Stub::RegisterCache, cache_request, &cache));
    v1::AttachWorkerRequest request;
    request.set_cache_id(cache.cache_id());
    request.set_worker_name("bench");
    request.set_role(v1::SESSION_ROLE_WORKER);
    request.set_staging_slot_count(kSealBatch);
    v1::AttachWorkerResponse attached;
    CheckOk(Call(&KvStore::Stub::AttachWorker, request, &attached));
    session_ = attached.session_id();
    auto socket = ConnectUnixSocket(attached.fd_socket());
    CERTKV_CHECK(socket.ok(), "the descriptor socket answers");
    socket_ = *std::move(socket);
    FdRequest ask{};
    ask.magic = kFdMagic;
    std::memcpy(ask.token, attached.fd_token().data(), sizeof(ask.token));
    const absl::string_view bytes(reinterpret_cast<const char*>(&ask), sizeof(ask));
    CERTKV_CHECK(SendWithFds(socket_.get(), bytes, {}).ok(), "the token is sent");
    auto answer = ReceiveWithFds(socket_.get(), sizeof(FdReply), 10'000);
    CERTKV_CHECK(answer.ok() && answer->fds.size() == 3, "three slabs come back");
    auto staging = Mapping::Map(answer->fds[2].get(), Mapping::Access::kReadWrite);
    CERTKV_CHECK(staging.ok(), "staging memory is mapped");
    staging_ = *std::move(staging);
  }

  void Fill(int32_t slot, int32_t block) {
    auto* halves = reinterpret_cast<uint16_t*>(staging_.data() + layout_.key_offset(slot, 0, 0));
    uint32_t state = static_cast<uint32_t>(block) + 1;
    for (int64_t i = 0; i < block_bytes() / 2; ++i) {
      state = state * 1664525u + 1013904223u;
      halves[i] = static_cast<uint16_t>(0x3000 + (state >> 20));  // 0.125 to 2
    }
  }

  const CacheSpec spec_ = BenchSpec();
  const SlabLayout layout_{spec_, SlabKind::kStaging, kSealBatch};
  const std::filesystem::path directory_;
  std::unique_ptr<ServerRunner> runner_;
  std::unique_ptr<KvStoreServer> store_;
  std::unique_ptr<KvStore::Stub> stub_;
  int64_t session_ = 0;
  UniqueFd socket_;
  Mapping staging_;
};

int Run() {
  const int32_t rounds = std::max(100, absl::GetFlag(FLAGS_rounds));
  Bench bench;
  std::vector<int64_t> seals = bench.Seal();
  std::sort(seals.begin(), seals.end());
  const auto seal_bytes = static_cast<double>(bench.block_bytes() * kSealBatch);
  const std::vector<int32_t> counts = {1, 32, 128, 1024};
  Samples empty;
  std::vector<Samples> lookups(counts.size());
  for (int32_t round = -50; round < rounds; ++round) {  // the first 50 warm up
    const int64_t empty_ns = bench.EmptyNs();
    std::vector<int64_t> lookup_ns;
    for (const int32_t count : counts) lookup_ns.push_back(bench.LookupNs(count));
    if (round < 0) continue;
    empty.ns.push_back(empty_ns);
    for (size_t i = 0; i < counts.size(); ++i) lookups[i].ns.push_back(lookup_ns[i]);
  }
  nlohmann::json report = {{"run", DescribeRun()}, {"empty_call", empty.ToJson()}};
  report["empty_call"]["call"] = "ReleaseLease of no lease";
  std::printf("%-28s %9s %9s %9s %8s\n", "call", "p50 us", "p90 us", "p99 us", "x empty");
  const auto print = [&](const std::string& name, Samples& samples) {
    std::printf("%-28s %9.1f %9.1f %9.1f %8.2f\n", name.c_str(), samples.PercentileUs(50),
                samples.PercentileUs(90), samples.PercentileUs(99),
                samples.PercentileUs(50) / empty.PercentileUs(50));
  };
  print("empty", empty);
  for (size_t i = 0; i < counts.size(); ++i) {
    print(absl::StrCat("LookupAndLease, ", counts[i], " blocks"), lookups[i]);
    nlohmann::json entry = lookups[i].ToJson();
    entry["block_count"] = counts[i];
    entry["p50_over_empty"] = lookups[i].PercentileUs(50) / empty.PercentileUs(50);
    report["lookup_and_lease"].push_back(entry);
  }
  const double seal_seconds = static_cast<double>(seals[seals.size() / 2]) * 1e-9;
  report["seal_blocks"] = {{"block_count", kSealBatch},
                           {"original_bytes", seal_bytes},
                           {"p50_ms", seal_seconds * 1e3},
                           {"gigabytes_per_second", seal_bytes / seal_seconds * 1e-9}};
  std::printf("SealBlocks, %d blocks of %ld KiB: %.1f ms, %.2f GB/s of originals\n", kSealBatch,
              static_cast<long>(bench.block_bytes() >> 10), seal_seconds * 1e3,
              seal_bytes / seal_seconds * 1e-9);
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Run();
}
