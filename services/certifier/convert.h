// Between the wire and the certifier's engine.
#ifndef CERTKV_SERVICES_CERTIFIER_CONVERT_H_
#define CERTKV_SERVICES_CERTIFIER_CONVERT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "certkv/certifier/v1/certifier.pb.h"
#include "kernels/core/ids.h"
#include "services/certifier/read_batch.h"

namespace certkv::certifier {

// Errors: InvalidArgument [BATCH_SIZE], more than kBlocksPerCallMax; as BlockHandleFromProto,
//         naming the block.
absl::StatusOr<std::vector<BlockHandle>> BlockHandlesFromProto(
    const google::protobuf::RepeatedPtrField<type::BlockHandle>& protos);

// Errors: InvalidArgument [BATCH_SIZE], more than kReadsPerAttendMax reads. A read that can't be
// understood has its own error in `status`: InvalidArgument [QUERY_SIZE], its bytes are no floats.
absl::StatusOr<std::vector<BatchRead>> ReadsFromProto(
    const google::protobuf::RepeatedPtrField<v1::Read>& protos);

void ReadsToProto(const std::vector<BatchRead>& reads,
                  google::protobuf::RepeatedPtrField<v1::ReadResult>* protos);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_CONVERT_H_
