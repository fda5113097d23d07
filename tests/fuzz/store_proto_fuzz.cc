// Fuzzes the store's messages, from wire bytes to an engine with one small cache: each call is
// refused with a reason or done, and the engine's invariants hold. The first byte says which.
#include "certkv/kvstore/v1/kvstore.pb.h"
#include "kernels/core/check.h"
#include "services/common/convert.h"
#include "services/common/identity.h"
#include "services/kvstore/convert.h"
#include "services/kvstore/convert_links.h"
#include "tests/fuzz/fuzz_checks.h"
#include "tests/support/store_harness.h"

namespace certkv {
namespace {

namespace v1 = kvstore::v1;

// One for all inputs: they are to find it as others left it.
struct Store {
  StoreHarness harness;
  StoreHarness::Worker worker = harness.Attach("fuzz");
};

template <typename Message>
bool Parse(const std::string& bytes, Message* message) {
  return message->ParseFromString(bytes);
}

void Attach(Store& store, const std::string& bytes) {
  v1::AttachWorkerRequest request;
  if (!Parse(bytes, &request)) return;
  auto attach = kvstore::AttachRequestFromProto(request);
  CheckRefusal(attach.status());
  if (!attach.ok()) return;
  attach->cache = store.harness.cache;
  attach->tenant = request.tenant();
  const auto attached = store.harness.engine.AttachWorker(*attach);
  CheckRefusal(attached.status());
  if (attached.ok()) store.harness.engine.EndSession(attached->session, "fuzzed");
}

void Register(const std::string& bytes) {
  v1::RegisterCacheRequest request;
  if (!Parse(bytes, &request)) return;
  const auto spec = CacheSpecFromProto(request.spec());
  CheckRefusal(spec.status());
  CheckRefusal(CheckTenantName(request.tenant()));
  if (!spec.ok()) return;
  const auto again = CacheSpecFromProto(CacheSpecToProto(*spec));
  CERTKV_CHECK(again.ok() && DigestCacheSpec(*again) == DigestCacheSpec(*spec),
               "a spec is the same after another trip");
}

void Lookup(Store& store, const std::string& bytes) {
  v1::LookupAndLeaseRequest request;
  if (!Parse(bytes, &request)) return;
  const auto keys = kvstore::BlockKeysFromProto(request.block_keys());
  CheckRefusal(keys.status());
  if (!keys.ok()) return;
  const auto leased =
      store.harness.engine.LookupAndLease(store.worker.session, *keys, request.lease_duration_ms());
  CheckRefusal(leased.status());
  if (leased.ok() && !leased->blocks.empty()) {
    CheckRefusal(store.harness.engine.ReleaseLease(store.worker.session, leased->lease));
  }
}

void Seal(Store& store, const std::string& bytes) {
  v1::SealBlocksRequest request;
  if (!Parse(bytes, &request)) return;
  const auto entries = kvstore::SealEntriesFromProto(request.entries());
  CheckRefusal(entries.status());
  const auto options = kvstore::SealOptionsFromProto(request);
  CheckRefusal(options.status());
  if (!entries.ok() || !options.ok()) return;
  store.harness.engine.ReserveBlocks(store.worker.session, 2).status().IgnoreError();
  const auto sealed = store.harness.engine.SealBlocks(store.worker.session, *entries, *options);
  CheckRefusal(sealed.status());
  if (sealed.ok()) {
    CheckRefusal(store.harness.engine.ReleaseLease(store.worker.session, sealed->lease));
  }
}

void Slots(Store& store, const std::string& bytes) {
  v1::AbortBlocksRequest request;
  if (!Parse(bytes, &request)) return;
  CheckRefusal(store.harness.engine.AbortBlocks(store.worker.session, request.staging_slots()));
  CheckRefusal(store.harness.engine
                   .ReserveBlocks(store.worker.session, static_cast<int32_t>(request.session_id()))
                   .status());
}

void Drop(Store& store, const std::string& bytes) {
  v1::PinBlocksRequest request;
  if (!Parse(bytes, &request)) return;
  const auto keys = kvstore::BlockKeysFromProto(request.block_keys());
  CheckRefusal(keys.status());
  if (!keys.ok()) return;
  CheckRefusal(store.harness.engine.PinBlocks(store.worker.session, *keys, request.pinned(),
                                              request.ttl_ms()));
  CheckRefusal(store.harness.engine.DropBlocks(store.worker.session, *keys).status());
}

void List(Store& store, const std::string& bytes) {
  v1::ListBlocksRequest request;
  if (!Parse(bytes, &request)) return;
  CheckRefusal(
      store.harness.engine
          .ListBlocks(CacheId{request.cache_id()}, request.page_size(), request.page_token())
          .status());
}

// Between stores: what comes of a message is the same after another trip.
void Nccl(const std::string& bytes) {
  v1::JoinLinkRequest join;
  v1::SendBlocksRequest send;
  v1::SendBlocksResponse sent;
  if (Parse(bytes, &join)) {
    const auto offer = kvstore::NcclOfferFromProto(join);
    CheckRefusal(offer.status());
    if (offer.ok()) {
      const auto again = kvstore::NcclOfferFromProto(kvstore::NcclOfferToProto(*offer));
      CERTKV_CHECK(again.ok() && again->id == offer->id && again->spec == offer->spec,
                   "an offer is the same");
    }
  }
  if (Parse(bytes, &send)) {
    const auto ask = kvstore::NcclAskFromProto(send);
    CheckRefusal(ask.status());
    CERTKV_CHECK(!ask.ok() || kvstore::NcclAskFromProto(kvstore::NcclAskToProto(*ask)).ok(),
                 "an ask is the same");
  }
  if (Parse(bytes, &sent)) CheckRefusal(kvstore::SentBlocksFromProto(sent, 3).status());
}

}  // namespace
}  // namespace certkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static auto* store = new certkv::Store;  // its threads live as long as the process
  certkv::FuzzInput input(data, size);
  const auto kind = input.Take<uint8_t>();
  const std::string bytes = input.Rest();
  switch (kind % 8) {
    case 0:
      certkv::Attach(*store, bytes);
      break;
    case 1:
      certkv::Register(bytes);
      break;
    case 2:
      certkv::Lookup(*store, bytes);
      break;
    case 3:
      certkv::Seal(*store, bytes);
      break;
    case 4:
      certkv::Slots(*store, bytes);
      break;
    case 5:
      certkv::Drop(*store, bytes);
      break;
    case 6:
      certkv::List(*store, bytes);
      break;
    default:
      certkv::Nccl(bytes);
  }
  store->harness.engine.CheckInvariants();
  return 0;
}
