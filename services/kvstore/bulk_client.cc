#include "services/kvstore/bulk_client.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

absl::Status Contradiction(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BULK_FRAME_INVALID",
                   absl::StrCat("the peer's answer contradicts what was asked for: ", what));
}

int64_t TotalBytes(const BulkTarget& target) {
  int64_t bytes = 0;
  for (const auto& span : target.spans) bytes += static_cast<int64_t>(span.size());
  return bytes;
}

}  // namespace

void BulkClient::Close() {
  boost::asio::post(strand_, [self = shared_from_this()] {
    if (self->socket_ != nullptr) self->socket_->Close();
  });
}

BulkSocket::Awaitable<absl::Status> BulkClient::Connect() {
  if (was_connected_) counters_->reconnects.fetch_add(1, std::memory_order_relaxed);
  was_connected_ = true;
  counters_->connections_made.fetch_add(1, std::memory_order_relaxed);
  last_request_ = 0;
  const auto socket = std::make_shared<BulkSocket>(strand_, peer_.tls);
  socket_ = socket;
  socket->ExpireAfter(peer_.timeout_ms);
  absl::Status status = co_await socket->Connect(peer_.address);
  if (!status.ok()) co_return status;
  status = co_await socket->Write(EncodeBulkHello(peer_.hello));
  if (!status.ok()) co_return status;
  const absl::StatusOr<BulkFrame> frame = co_await socket->ReadFrame();
  if (!frame.ok()) co_return frame.status();
  if (frame->header.type == BulkFrameType::kError) {
    absl::Status error;
    const absl::Status parsed = ParseBulkError(frame->body, &error);
    co_return parsed.ok() ? error : parsed;
  }
  if (frame->header.type != BulkFrameType::kWelcome) co_return Contradiction("no WELCOME");
  const absl::StatusOr<BulkWelcome> welcome = ParseBulkWelcome(frame->body);
  if (!welcome.ok()) co_return welcome.status();
  const WireVersions& offered = peer_.hello.versions;
  if (welcome->version < offered.min || welcome->version > offered.max) {
    co_return Contradiction(
        absl::StrCat("version ", welcome->version, ", offered was ", WireVersionsToText(offered)));
  }
  if (welcome->plane_bytes == peer_.plane_bytes &&
      welcome->original_bytes == peer_.original_bytes) {
    co_return absl::OkStatus();
  }
  co_return MakeError(
      absl::StatusCode::kFailedPrecondition, "BULK_PEER_MISMATCH",
      absl::StrCat("blocks of the peer have ", welcome->plane_bytes, " + ", welcome->original_bytes,
                   " bytes, of this store ", peer_.plane_bytes, " + ", peer_.original_bytes,
                   ", for the same spec; run the same version"));
}

BulkSocket::Awaitable<absl::Status> BulkClient::Fetch(std::vector<BulkTarget*> targets) {
  const bool is_rested = std::exchange(has_rested_, false) && socket_ != nullptr;
  if (!is_rested) {
    const absl::Status status = co_await Ask(targets, peer_.timeout_ms);
    co_return status;
  }
  counters_->connections_reused.fetch_add(1, std::memory_order_relaxed);
  const int64_t before = answer_count_;
  const int64_t first_answer_ms = std::min(peer_.timeout_ms, kRestedAnswerMs);
  const absl::Status rested = co_await Ask(targets, first_answer_ms);
  if (rested.ok() || answer_count_ > before) co_return rested;
  counters_->connections_replaced.fetch_add(1, std::memory_order_relaxed);
  was_connected_ = false;  // nothing of this pull was lost
  const absl::Status status = co_await Ask(targets, peer_.timeout_ms);
  co_return status;
}

BulkSocket::Awaitable<absl::Status> BulkClient::Ask(const std::vector<BulkTarget*>& targets,
                                                    int64_t first_answer_ms) {
  absl::Status status;
  if (socket_ == nullptr) status = co_await Connect();
  std::string asked;
  std::vector<BulkTarget*> open;
  for (BulkTarget* target : targets) {
    if (target->is_done) continue;
    open.push_back(target);
    absl::StrAppend(&asked, EncodeBulkGet(++last_request_,
                                          {target->key, target->parts, target->received_bytes}));
  }
  uint32_t request_id = last_request_ - static_cast<uint32_t>(open.size());
  if (status.ok()) {
    socket_->ExpireAfter(peer_.timeout_ms);
    status = co_await socket_->Write(std::move(asked));
  }
  int64_t answer_ms = first_answer_ms;
  for (BulkTarget* target : open) {
    if (!status.ok()) break;
    socket_->ExpireAfter(std::exchange(answer_ms, peer_.timeout_ms));
    status = co_await Receive(++request_id, target);
  }
  if (status.ok()) {
    socket_->NeverExpire();
  } else if (socket_ != nullptr) {
    socket_->Close();
    socket_ = nullptr;
  }
  co_return status;
}

absl::Status BulkClient::CheckHead(const BulkBlock& head, BulkTarget* target) {
  if (head.key != target->key) return Contradiction("another block");
  if (head.parts != target->parts || head.total_bytes != TotalBytes(*target)) {
    return Contradiction(absl::StrCat("parts ", head.parts, " of ", head.total_bytes,
                                      " bytes, asked for ", target->parts, " of ",
                                      TotalBytes(*target)));
  }
  if (head.offset != target->received_bytes) {
    return Contradiction(
        absl::StrCat("it begins at ", head.offset, ", asked for ", target->received_bytes));
  }
  const bool is_same =
      !target->has_head || (target->head.parent == head.parent &&
                            target->head.originals_digest == head.originals_digest);
  if (!is_same) {
    // What came before is of another block under this key: all anew.
    target->received_bytes = 0;
    target->has_head = false;
    return Contradiction("its digest or parent is not what it was before the connection was cut");
  }
  target->head = head;
  target->has_head = true;
  return absl::OkStatus();
}

BulkSocket::Awaitable<absl::Status> BulkClient::Receive(uint32_t request_id, BulkTarget* target) {
  const absl::StatusOr<BulkFrame> frame = co_await socket_->ReadFrame();
  if (!frame.ok()) co_return frame.status();
  const BulkHeader& header = frame->header;
  if (header.type == BulkFrameType::kError) {
    absl::Status error;
    const absl::Status parsed = ParseBulkError(frame->body, &error);
    if (!parsed.ok()) co_return parsed;
    if (header.request_id == 0) co_return error;
    ++answer_count_;
    if (header.request_id != request_id) co_return Contradiction("an answer out of order");
    target->status = error;
    target->is_done = true;
    co_return absl::OkStatus();
  }
  ++answer_count_;
  if (header.type != BulkFrameType::kBlock || header.request_id != request_id) {
    co_return Contradiction("an answer out of order");
  }
  const absl::StatusOr<BulkBlock> head = ParseBulkBlock(frame->body, header.data_bytes);
  if (!head.ok()) co_return head.status();
  const absl::Status checked = CheckHead(*head, target);
  if (!checked.ok()) co_return checked;
  socket_->ExpireAfter(peer_.timeout_ms);
  const int64_t before = target->received_bytes;
  const absl::Status status = co_await socket_->ReadData(target->spans, &target->received_bytes);
  counters_->bytes_received.fetch_add(target->received_bytes - before, std::memory_order_relaxed);
  if (!status.ok()) co_return status;
  counters_->blocks_received.fetch_add(1, std::memory_order_relaxed);
  target->is_done = true;
  co_return absl::OkStatus();
}

}  // namespace certkv::kvstore
