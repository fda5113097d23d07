// The CPU backend: the one header that ops includes. Contracts are in kernels/ops.
//
// Arguments were checked by ops; these functions do math and can't fail. `isa` is one of
// SupportedIsas(). Threads: concurrent calls are safe when their outputs and workspaces differ.
#ifndef CERTKV_KERNELS_CPU_CPU_H_
#define CERTKV_KERNELS_CPU_CPU_H_

#include <cstdint>
#include <vector>

#include "kernels/ops/attend.h"
#include "kernels/ops/backend.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::cpu {

// What this machine can run, ascending; always has kPortable. By cpuid and the state that the
// operating system saves, so that a listed instruction set can't fault.
std::vector<CpuIsa> SupportedIsas();

// Writes all of the scan and the detail record but scan_checksum, detail_checksum and
// original_checksum, which ops adds. Originals are finite; affine keys lie within +-65504.
void QuantizeTile(CpuIsa isa, const QuantizeTileArgs& args);

// Bytes of scratch for Attend; the same for every instruction set, or their maximum.
int64_t AttendWorkspaceBytes(const AttendArgs& args);

void Attend(CpuIsa isa, const AttendArgs& args, const AttendResult& result, void* workspace);

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_CPU_H_
