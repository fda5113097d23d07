// Between the wire vocabulary (proto/certkv/type) and the core types.
//
// XFromProto checks what came over the wire and returns InvalidArgument with a reason; what it
// returns is valid. XToProto takes a valid value and can't fail.
#ifndef CERTKV_SERVICES_COMMON_CONVERT_H_
#define CERTKV_SERVICES_COMMON_CONVERT_H_

#include "absl/status/statusor.h"
#include "certkv/type/cache.pb.h"
#include "certkv/type/certificate.pb.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "kernels/core/policy.h"

namespace certkv {

// Errors: [CACHE_SPEC_INVALID]. Fields whose 0 means a default get it here.
absl::StatusOr<CacheSpec> CacheSpecFromProto(const type::CacheSpec& proto);
type::CacheSpec CacheSpecToProto(const CacheSpec& spec);

// Errors: [DIGEST_SIZE], a key that isn't 32 bytes; [HANDLE_INVALID], a slot below -1 or a
// generation that is negative or, where a slot is named, odd.
absl::StatusOr<BlockHandle> BlockHandleFromProto(const type::BlockHandle& proto);
type::BlockHandle BlockHandleToProto(const BlockHandle& handle);

// Errors: [TOLERANCE_INVALID].
absl::StatusOr<Tolerances> TolerancesFromProto(const type::Tolerances& proto);
type::Tolerances TolerancesToProto(const Tolerances& tolerances);

// Errors: [READ_MODE_INVALID] and [RISK_MODE_INVALID], unspecified or unknown.
absl::StatusOr<ReadMode> ReadModeFromProto(type::ReadMode proto);
type::ReadMode ReadModeToProto(ReadMode mode);
absl::StatusOr<RiskMode> RiskModeFromProto(type::RiskMode proto);
type::RiskMode RiskModeToProto(RiskMode mode);
type::Rung RungToProto(Rung rung);

// `now_ms` is of the sender's clock. `asked_ms` is when the lease was asked for, or came with a
// call, by the clock of the reader: expire_time_ms of the result is by that one. Clocks of two
// machines may be minutes apart.
// Errors: [POLICY_LEASE_INVALID], [TOLERANCE_INVALID]. Whether it has expired is not asked here.
absl::StatusOr<PolicyLease> PolicyLeaseFromProto(const type::PolicyLease& proto, int64_t asked_ms);
type::PolicyLease PolicyLeaseToProto(const PolicyLease& lease, int64_t now_ms);

// Errors: [CERTIFICATE_INVALID], a field out of its range; a NaN is out of every range.
absl::StatusOr<ReadCertificate> ReadCertificateFromProto(const type::Certificate& proto);
type::Certificate ReadCertificateToProto(const ReadCertificate& certificate);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CONVERT_H_
