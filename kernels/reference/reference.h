// The reference backend: the one header that ops includes. Contracts are in kernels/ops.
//
// It is the definition of every operation: double where a format doesn't ask for float, one loop
// per index. Arguments were checked by ops; these functions do math and can't fail.
// Threads: concurrent calls are safe when their outputs differ.
#ifndef CERTKV_KERNELS_REFERENCE_REFERENCE_H_
#define CERTKV_KERNELS_REFERENCE_REFERENCE_H_

#include <cstdint>

#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/finish_certificate.h"
#include "kernels/ops/paged_rows.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::reference {

// Writes all of the scan and the detail record but the header's three checksums, which ops adds.
// Originals are finite; affine keys lie within +-65504.
void QuantizeTile(const QuantizeTileArgs& args);

// The tile was checked by CheckTile.
void DequantizeTile(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
                    float* keys, float* values);

int64_t AttendWorkspaceBytes(const AttendArgs& args);

void Attend(const AttendArgs& args, const AttendResult& result, void* workspace);

// Definition of kernels/ops/attend_progressive.h.
void AttendProgressive(const ProgressiveArgs& args, const ProgressiveResult& result);

// Upper bound on TV(p, p^) of the tokens that were read, tightened until it is within
// args.tv_tolerance, or as far as it can; 0 = as far as it can. Doesn't allocate once `workspace`
// has seen a read of that size.
double BoundTv(const FinishArgs& args, FinishWorkspace* workspace);

// Upper bound on the exact probability of what the read skipped; 0 when it skipped nothing.
double SkippedShareOf(const FinishArgs& args);

// False when the masses say nothing: a block_lse is NaN or +infinity, or every atom is empty.
bool MassesAreKnown(const FinishArgs& args);

// The certificate that follows from `tv`, a bound on TV(p, p^) with skipping. Its
// output_error_bound is +infinity where the masses are not known.
void CompleteCertificate(const FinishArgs& args, bool masses_known, double skipped_share, double tv,
                         Certificate* certificate);

// Definition of kernels/ops/paged_rows.h.
void CopyPagedRows(const PagedRows& rows);

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_REFERENCE_H_
