// WatchBlockEvents over a real Unix socket.
#include <gtest/gtest.h>

#include <memory>

#include "kernels/core/status.h"
#include "services/common/errors.h"
#include "tests/support/kvstore_service_fixture.h"

namespace certkv {
namespace {

// The first message of every watch.
v1::BlockEvent ReadBegin(grpc::ClientReader<v1::BlockEvent>& reader) {
  v1::BlockEvent event;
  EXPECT_TRUE(reader.Read(&event));
  EXPECT_EQ(event.kind(), v1::BlockEvent::KIND_BEGUN);
  EXPECT_GT(event.store_id(), 0);
  EXPECT_EQ(event.block_key(), "");
  return event;
}

TEST_F(KvStoreServiceTest, WatcherSeesEventsInOrderUntilItCancels) {
  Session worker = Connect();
  auto context = std::make_unique<grpc::ClientContext>();
  const auto reader = stub_->WatchBlockEvents(context.get(), {});
  ReadBegin(*reader);
  // One event after another comes through, more in all than the queue holds.
  v1::BlockEvent event;
  int64_t last_sequence = 0;
  for (int chain = 1; chain <= 6; ++chain) {
    Seal(Write(worker, chain, 1));
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_EQ(event.kind(), v1::BlockEvent::KIND_SEALED);
    EXPECT_EQ(event.block_key(), ChainKey(chain, 0).view());
    EXPECT_GT(event.sequence(), last_sequence);
    last_sequence = event.sequence();
  }
  context->TryCancel();
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(KvStoreServiceTest, WatcherThatComesBackSeesWhatItMissed) {
  Session worker = Connect();
  v1::BlockEvent event;
  {
    grpc::ClientContext context;
    const auto reader = stub_->WatchBlockEvents(&context, {});
    ReadBegin(*reader);
    Seal(Write(worker, 1, 1));
    ASSERT_TRUE(reader->Read(&event));
    context.TryCancel();
    reader->Finish();
  }
  Seal(Write(worker, 2, 1));
  Seal(Write(worker, 3, 1));
  v1::WatchBlockEventsRequest request;
  request.set_store_id(event.store_id());
  request.set_after_sequence(event.sequence());
  grpc::ClientContext context;
  const auto reader = stub_->WatchBlockEvents(&context, request);
  EXPECT_EQ(ReadBegin(*reader).sequence(), request.after_sequence());
  for (int chain = 2; chain <= 3; ++chain) {
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_EQ(event.block_key(), ChainKey(chain, 0).view());
    EXPECT_EQ(event.sequence(), request.after_sequence() + chain - 1);
  }
  context.TryCancel();
  reader->Finish();

  request.set_store_id(event.store_id() + 1);  // a store that was started again has another
  grpc::ClientContext other;
  const auto refused = stub_->WatchBlockEvents(&other, request);
  EXPECT_FALSE(refused->Read(&event));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(refused->Finish())), "EVENTS_GONE");
}

TEST_F(KvStoreServiceTest, WatchOfAnUnknownCacheIsRefused) {
  auto context = std::make_unique<grpc::ClientContext>();
  v1::WatchBlockEventsRequest request;
  request.set_cache_id(4711);
  const auto reader = stub_->WatchBlockEvents(context.get(), request);
  v1::BlockEvent event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(reader->Finish())), "CACHE_NOT_FOUND");
}

TEST_F(KvStoreServiceTest, WatcherThatFallsBehindIsCutOff) {
  Session worker = Connect();
  auto context = std::make_unique<grpc::ClientContext>();
  const auto reader = stub_->WatchBlockEvents(context.get(), {});
  ReadBegin(*reader);
  Seal(Write(worker, 1, 6));  // six events at once, the queue holds four
  v1::BlockEvent event;
  while (reader->Read(&event)) ADD_FAILURE() << "a gap before " << event.sequence();
  EXPECT_EQ(ReasonOf(FromGrpcStatus(reader->Finish())), "EVENTS_LOST");
}

}  // namespace
}  // namespace certkv
