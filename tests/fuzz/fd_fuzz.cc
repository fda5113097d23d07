// Fuzzes the descriptor socket: what a peer sends after it has connected. Descriptors go only to
// whoever has a session's token, and nobody's memory but the session's own and, for a reader,
// staging memory of its cache; every other request gets an error with a reason; when the connection
// is gone, so is the session. Bytes that are like kToken or kStaging stand for real ones.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/strand.hpp>
#include <cstring>
#include <memory>

#include "kernels/core/check.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "services/kvstore/fd_connection.h"
#include "tests/fuzz/fuzz_checks.h"
#include "tests/support/store_harness.h"

namespace certkv {
namespace {

using kvstore::FdConnection;

constexpr char kToken[] = "TTTTTTTTTTTTTTTT";  // of 16 bytes
constexpr int64_t kStaging = 0x5353535353535353;
constexpr size_t kRequestsMax = 64;  // their answers fit the socket's buffer

struct Store {
  Store() {
    absl::MutexLock lock(&gate->mutex);
    gate->engine = &harness.engine;
  }
  StoreHarness harness;
  StoreHarness::Worker worker = harness.Attach("worker");
  std::shared_ptr<kvstore::EngineGate> gate = std::make_shared<kvstore::EngineGate>();
  boost::asio::io_context io_context;
};

// Puts the session's token and the worker's staging_id where the input names them.
void FillIn(const Store& store, const std::string& token, std::vector<FdRequest>* requests) {
  for (FdRequest& request : *requests) {
    if (std::memcmp(request.token, kToken, sizeof(request.token)) == 0) {
      std::memcpy(request.token, token.data(), sizeof(request.token));
    }
    if (request.staging_id == kStaging) request.staging_id = store.worker.staging_id;
  }
}

bool CanWrite(int fd) {
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return false;
  munmap(memory, 4096);
  return true;
}

void CheckReply(const BytesWithFds& got, bool may_get, bool is_first, bool is_worker) {
  FdReply reply;
  std::memcpy(&reply, got.bytes.data(), sizeof(reply));
  CERTKV_CHECK(reply.magic == kFdMagic, "a reply is one");
  CERTKV_CHECK(reply.fd_count == static_cast<int32_t>(got.fds.size()), "it counts what it sends");
  CERTKV_CHECK((reply.code == 0) == (reply.fd_count > 0), "descriptors or an error");
  CERTKV_CHECK(std::memchr(reply.reason, 0, sizeof(reply.reason)) != nullptr &&
                   std::memchr(reply.message, 0, sizeof(reply.message)) != nullptr,
               "texts end");
  CERTKV_CHECK(reply.code == 0 || (reply.reason[0] != 0 && reply.message[0] != 0),
               "an error says why");
  if (reply.code != 0) return;
  CERTKV_CHECK(may_get, "nobody gets descriptors without the token");
  const size_t expected = !is_first ? 1 : is_worker ? 3 : 2;
  CERTKV_CHECK(got.fds.size() == expected && (is_first || !is_worker), "and no more than its own");
  for (size_t i = 0; i < got.fds.size(); ++i) {
    CERTKV_CHECK(CanWrite(got.fds[i].get()) == (i == 2), "only own staging memory is writable");
  }
}

// Is this what a connection begins with?
bool IsGoodFirst(const FdRequest& request, const std::string& token) {
  return request.magic == kFdMagic && request.reserved == 0 && request.staging_id == 0 &&
         std::memcmp(request.token, token.data(), token.size()) == 0;
}

void Connect(Store& store, bool is_worker, size_t chunk_bytes, const std::string& bytes) {
  const auto role = is_worker ? kvstore::SessionRole::kWorker : kvstore::SessionRole::kReader;
  const auto attached =
      store.harness.engine.AttachWorker({store.harness.cache, "fuzz", role, is_worker ? 1 : 0});
  CERTKV_CHECK(attached.ok(), "a session is free: those before have ended");
  std::vector<FdRequest> requests(std::min(bytes.size() / sizeof(FdRequest), kRequestsMax));
  std::copy_n(bytes.data(), requests.size() * sizeof(FdRequest),
              reinterpret_cast<char*>(requests.data()));
  FillIn(store, attached->fd_token, &requests);
  std::string sent(reinterpret_cast<const char*>(requests.data()),
                   requests.size() * sizeof(FdRequest));
  sent += bytes.substr(sent.size(), bytes.size() % sizeof(FdRequest));  // a cut one
  int ends[2];
  CERTKV_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "a pair is made");
  UniqueFd peer(ends[0]);
  FdConnection::Socket socket(boost::asio::make_strand(store.io_context));
  socket.assign(boost::asio::local::stream_protocol(), ends[1]);
  std::make_shared<FdConnection>(std::move(socket), store.gate)->Start();
  store.io_context.restart();
  for (size_t at = 0; at < sent.size(); at += chunk_bytes) {
    const size_t count = std::min(chunk_bytes, sent.size() - at);
    if (send(peer.get(), sent.data() + at, count, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) break;
    store.io_context.poll();
  }
  const bool may_get = !requests.empty() && IsGoodFirst(requests[0], attached->fd_token);
  bool is_first = true;
  char any;
  while (recv(peer.get(), &any, 1, MSG_PEEK | MSG_DONTWAIT) == 1) {
    const auto got = ReceiveWithFds(peer.get(), sizeof(FdReply), 1000);
    CERTKV_CHECK(got.ok(), "a reply comes as a whole");
    CheckReply(*got, may_get, is_first, is_worker);
    is_first = false;
  }
  peer.reset();
  store.io_context.poll();
  if (!may_get) store.harness.engine.EndSession(attached->session, "fuzzed");
  CERTKV_CHECK(store.harness.engine.GetStats().session_count == 1,
               "a session ends with its connection");
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* store = new certkv::Store;  // its threads live as long as the process
  certkv::FuzzInput input(data, size);
  const bool is_worker = (input.Take<uint8_t>() & 1) != 0;
  const size_t chunk_bytes = size_t{1} + input.Take<uint8_t>();
  certkv::Connect(*store, is_worker, chunk_bytes, input.Rest());
  store->harness.engine.CheckInvariants();
  return 0;
}
