#include "services/kvstore/nccl_channel.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

using Spans = absl::Span<const absl::Span<uint8_t>>;

constexpr size_t kPageBytes = 4096;
// Between two looks; the first ones follow soon, for a movement may take microseconds.
constexpr absl::Duration kPauseMin = absl::Microseconds(20);
constexpr absl::Duration kPauseMax = absl::Milliseconds(1);

// Goes through spans as if they were one.
class SpanWalk {
 public:
  explicit SpanWalk(Spans spans) : spans_(spans) {
    for (const auto& span : spans) left_bytes_ += static_cast<int64_t>(span.size());
  }
  int64_t left_bytes() const { return left_bytes_; }

  // Calls use(address, bytes) for the next `size_bytes`, which are there.
  template <typename Use>
  void Next(int64_t size_bytes, const Use& use) {
    left_bytes_ -= size_bytes;
    while (size_bytes > 0) {
      const auto& span = spans_[span_];
      const int64_t size =
          std::min<int64_t>(size_bytes, static_cast<int64_t>(span.size()) - offset_);
      use(span.data() + offset_, size);
      size_bytes -= size;
      offset_ += size;
      if (offset_ < static_cast<int64_t>(span.size())) continue;
      ++span_;
      offset_ = 0;
    }
  }

 private:
  const Spans spans_;
  size_t span_ = 0;
  int64_t offset_ = 0;
  int64_t left_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NcclChannel>> NcclChannel::Create(const Dependencies& with,
                                                                 int64_t movement_bytes) {
  std::unique_ptr<NcclChannel> channel(new NcclChannel(with, movement_bytes));
  CERTKV_RETURN_IF_ERROR(channel->Open());
  return channel;
}

NcclChannel::NcclChannel(const Dependencies& with, int64_t movement_bytes)
    : with_(with), movement_bytes_(movement_bytes) {}

NcclChannel::~NcclChannel() {
  OrAbort(absl::CancelledError("the channel is given up")).IgnoreError();
  DeviceRuntime* const runtime = with_.place.runtime;
  if (movements_ != nullptr) runtime->DestroyStream(movements_);
  if (copies_ != nullptr) runtime->DestroyStream(copies_);
  for (const Buffer& buffer : buffers_) {
    if (buffer.device != nullptr) runtime->Free(buffer.device);
    if (buffer.is_pinned) runtime->UnpinHost(buffer.host);
    std::free(buffer.host);
  }
}

absl::Status NcclChannel::Open() {
  DeviceRuntime* const runtime = with_.place.runtime;
  const int32_t device = with_.place.device.device;
  CERTKV_ASSIGN_OR_RETURN(movements_, runtime->CreateStream(device));
  CERTKV_ASSIGN_OR_RETURN(copies_, runtime->CreateStream(device));
  const size_t host_bytes =
      (static_cast<size_t>(movement_bytes_) + kPageBytes - 1) / kPageBytes * kPageBytes;
  for (Buffer& buffer : buffers_) {
    CERTKV_ASSIGN_OR_RETURN(buffer.device, runtime->Allocate(device, movement_bytes_));
    buffer.host = static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, host_bytes));
    CERTKV_CHECK(buffer.host != nullptr, "the process has memory for a buffer");
    CERTKV_RETURN_IF_ERROR(runtime->PinHost(buffer.host, static_cast<int64_t>(host_bytes),
                                            DeviceRuntime::HostAccess::kReadWrite));
    buffer.is_pinned = true;
  }
  return absl::OkStatus();
}

absl::Status NcclChannel::OrAbort(absl::Status status) {
  if (status.ok()) return status;
  if (communicator_ != nullptr) communicator_->Abort();
  communicator_ = nullptr;
  // Streams pass what was aborted; a device that is lost says so, and does nothing more either.
  if (movements_ != nullptr) with_.place.runtime->Wait(movements_).IgnoreError();
  if (copies_ != nullptr) with_.place.runtime->Wait(copies_).IgnoreError();
  return status;
}

absl::Status NcclChannel::WaitUntil(int64_t deadline_ns, CUstream_st* stream, const char* what) {
  absl::Duration pause = kPauseMin;
  while (true) {
    CERTKV_ASSIGN_OR_RETURN(const bool is_ready, communicator_->IsReady());
    bool is_done = is_ready;
    if (is_ready && stream != nullptr) {
      CERTKV_ASSIGN_OR_RETURN(is_done, with_.place.runtime->IsDone(stream));
    }
    if (is_done) return absl::OkStatus();
    if (with_.clock->MonotonicNs() >= deadline_ns) {
      return MakeError(absl::StatusCode::kUnavailable, "NCCL_TIMEOUT",
                       absl::StrCat("the other store did not ", what,
                                    " within kvstore.nccl_timeout; look at it and at the network "
                                    "between the GPUs, or raise it"));
    }
    if (with_.stop->WaitFor(pause)) {
      return MakeError(absl::StatusCode::kUnavailable, "STORE_STOPPING",
                       "the store is stopping; retry when it is back");
    }
    pause = std::min(2 * pause, kPauseMax);
  }
}

absl::Status NcclChannel::Join(const CommunicatorId& id, int32_t rank, int64_t deadline_ns) {
  CERTKV_RETURN_IF_ERROR(with_.place.runtime->Use(with_.place.device.device));
  CERTKV_ASSIGN_OR_RETURN(communicator_, with_.library->Join(id, rank));
  return OrAbort(WaitUntil(deadline_ns, nullptr, "join the communicator"));
}

absl::Status NcclChannel::Send(Spans spans, int64_t deadline_ns) {
  CERTKV_CHECK(communicator_ != nullptr, "a channel is used while it works");
  return OrAbort(SendAll(spans, deadline_ns));
}

absl::Status NcclChannel::Receive(Spans spans, int64_t deadline_ns) {
  CERTKV_CHECK(communicator_ != nullptr, "a channel is used while it works");
  return OrAbort(ReceiveAll(spans, deadline_ns));
}

absl::Status NcclChannel::SendAll(Spans spans, int64_t deadline_ns) {
  DeviceRuntime* const runtime = with_.place.runtime;
  SpanWalk walk(spans);
  const auto fill = [&](Buffer* buffer) -> absl::Status {
    buffer->used_bytes = std::min(walk.left_bytes(), movement_bytes_);
    uint8_t* to = buffer->host;
    walk.Next(buffer->used_bytes, [&to](const uint8_t* from, int64_t size_bytes) {
      std::memcpy(to, from, static_cast<size_t>(size_bytes));
      to += size_bytes;
    });
    CERTKV_RETURN_IF_ERROR(
        runtime->CopyToDevice(buffer->device, buffer->host, buffer->used_bytes, copies_));
    return runtime->Wait(copies_);
  };
  if (walk.left_bytes() == 0) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(fill(&buffers_[0]));
  for (size_t current = 0;; current ^= 1) {
    const Buffer& buffer = buffers_[current];
    CERTKV_RETURN_IF_ERROR(communicator_->Send(buffer.device, buffer.used_bytes, movements_));
    const bool is_last = walk.left_bytes() == 0;
    if (!is_last) CERTKV_RETURN_IF_ERROR(fill(&buffers_[current ^ 1]));
    CERTKV_RETURN_IF_ERROR(WaitUntil(deadline_ns, movements_, "take what was sent"));
    if (is_last) return absl::OkStatus();
  }
}

absl::Status NcclChannel::ReceiveAll(Spans spans, int64_t deadline_ns) {
  DeviceRuntime* const runtime = with_.place.runtime;
  SpanWalk walk(spans);
  int64_t to_come_bytes = walk.left_bytes();
  const auto begin = [&](Buffer* buffer) {
    buffer->used_bytes = std::min(to_come_bytes, movement_bytes_);
    to_come_bytes -= buffer->used_bytes;
    return communicator_->Receive(buffer->device, buffer->used_bytes, movements_);
  };
  if (to_come_bytes == 0) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(begin(&buffers_[0]));
  for (size_t current = 0;; current ^= 1) {
    const Buffer& buffer = buffers_[current];
    CERTKV_RETURN_IF_ERROR(WaitUntil(deadline_ns, movements_, "send what it was asked for"));
    const bool is_last = to_come_bytes == 0;
    if (!is_last) CERTKV_RETURN_IF_ERROR(begin(&buffers_[current ^ 1]));
    CERTKV_RETURN_IF_ERROR(
        runtime->CopyToHost(buffer.host, buffer.device, buffer.used_bytes, copies_));
    CERTKV_RETURN_IF_ERROR(runtime->Wait(copies_));
    const uint8_t* from = buffer.host;
    walk.Next(buffer.used_bytes, [&from](uint8_t* to, int64_t size_bytes) {
      std::memcpy(to, from, static_cast<size_t>(size_bytes));
      from += size_bytes;
    });
    if (is_last) return absl::OkStatus();
  }
}

}  // namespace certkv::kvstore
