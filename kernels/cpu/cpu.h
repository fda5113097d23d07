// The CPU backend: the one header that ops includes. Contracts are in kernels/ops.
//
// Arguments were checked by ops; these functions do math and can't fail. `isa` is one of
// SupportedIsas(). Threads: concurrent calls are safe when their outputs and workspaces differ.
#ifndef CERTKV_KERNELS_CPU_CPU_H_
#define CERTKV_KERNELS_CPU_CPU_H_

#include <cstdint>
#include <vector>

#include "kernels/ops/attend.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/backend.h"
#include "kernels/ops/finish_certificate.h"
#include "kernels/ops/paged_rows.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::cpu {

// What this machine can run, ascending; always has kPortable. By cpuid and the state that the
// operating system saves, so that a listed instruction set can't fault.
std::vector<CpuIsa> SupportedIsas();

// Writes all of the scan and the detail record but scan_checksum, detail_checksum and
// original_checksum, which ops adds. False when a key of an affine format is beyond AffineKeyLimit
// or a value of a rotated format isn't finite: nothing may be said of the records then. Keys and
// values of other formats are finite.
bool QuantizeTile(CpuIsa isa, const QuantizeTileArgs& args);

// Bytes of scratch for Attend; the same for every instruction set, or their maximum.
int64_t AttendWorkspaceBytes(const AttendArgs& args);

void Attend(CpuIsa isa, const AttendArgs& args, const AttendResult& result, void* workspace);

int64_t ProgressiveWorkspaceBytes(const AttendArgs& args);

void AttendProgressive(CpuIsa isa, const ProgressiveArgs& args, const ProgressiveResult& result,
                       void* workspace);

// Upper bound on TV(p, p^) of a read, in [0, 1], tightened until it is within args.tv_tolerance or
// as far as it can; -1 when the numbers are beyond floats and the reference has to be asked.
// Doesn't allocate once `workspace` has seen a read of that size.
double BoundTv(CpuIsa isa, const FinishArgs& args, FinishWorkspace* workspace);

void CopyPagedRows(const PagedRows& rows);

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_CPU_H_
