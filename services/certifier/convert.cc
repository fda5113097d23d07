#include "services/certifier/convert.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"

namespace certkv::certifier {
namespace {

absl::Status QueriesFromProto(const std::string& bytes, std::vector<float>* queries) {
  if (bytes.size() % sizeof(float) != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "QUERY_SIZE",
                     absl::StrCat("queries have ", bytes.size(),
                                  " bytes, must be [query_head_count][head_dim] float32"));
  }
  queries->resize(bytes.size() / sizeof(float));
  // Little-endian as the host: tile_layout.h checks that at build time.
  std::memcpy(queries->data(), bytes.data(), bytes.size());
  return absl::OkStatus();
}

std::string FloatBytes(const std::vector<float>& floats) {
  return std::string(reinterpret_cast<const char*>(floats.data()), floats.size() * sizeof(float));
}

}  // namespace

absl::StatusOr<std::vector<BlockHandle>> BlockHandlesFromProto(
    const google::protobuf::RepeatedPtrField<type::BlockHandle>& protos) {
  if (protos.size() > kBlocksPerCallMax) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "BATCH_SIZE",
        absl::StrCat("the call has ", protos.size(), " blocks, at most ", kBlocksPerCallMax,
                     " are taken; append the rest with UpdateView"));
  }
  std::vector<BlockHandle> blocks;
  blocks.reserve(protos.size());
  for (int i = 0; i < protos.size(); ++i) {
    const absl::StatusOr<BlockHandle> block = BlockHandleFromProto(protos[i]);
    if (!block.ok()) return WithContext(block.status(), absl::StrCat("block ", i));
    blocks.push_back(*block);
  }
  return blocks;
}

absl::StatusOr<std::vector<BatchRead>> ReadsFromProto(
    const google::protobuf::RepeatedPtrField<v1::Read>& protos) {
  if (protos.size() > kReadsPerAttendMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BATCH_SIZE",
                     absl::StrCat("the message has ", protos.size(), " reads, at most ",
                                  kReadsPerAttendMax, " are taken; send several messages"));
  }
  std::vector<BatchRead> reads(protos.size());
  for (int i = 0; i < protos.size(); ++i) {
    const v1::Read& proto = protos[i];
    BatchRead& read = reads[i];
    read.view_id = ViewId{proto.view_id()};
    read.layer = proto.layer();
    read.query_position = proto.query_position();
    read.sink_logits.assign(proto.sink_logits().begin(), proto.sink_logits().end());
    read.status = QueriesFromProto(proto.queries(), &read.queries);
  }
  return reads;
}

void ReadsToProto(const std::vector<BatchRead>& reads,
                  google::protobuf::RepeatedPtrField<v1::ReadResult>* protos) {
  protos->Reserve(static_cast<int>(reads.size()));
  for (const BatchRead& read : reads) {
    v1::ReadResult* proto = protos->Add();
    proto->set_read_time_ns(read.read_time_ns);
    if (!read.status.ok()) {
      const absl::string_view message = read.status.message();
      proto->set_code(static_cast<int32_t>(read.status.code()));
      proto->set_message(std::string(message.substr(0, kErrorMessageBytesMax)));
      proto->set_reason(ReasonOf(read.status));
      continue;
    }
    for (const ReadCertificate& certificate : read.certificates) {
      *proto->add_certificates() = ReadCertificateToProto(certificate);
    }
    proto->set_outputs(FloatBytes(read.outputs));
    proto->set_tile_sources(std::string(read.tile_sources.begin(), read.tile_sources.end()));
    if (!read.tile_sources.empty()) proto->set_first_tile(read.first_tile);
  }
}

}  // namespace certkv::certifier
