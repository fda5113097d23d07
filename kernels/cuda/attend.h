// Attention on a GPU, with everything that its certificates need: kernels/ops/attend.h says what is
// computed, here is how it is launched. Needs no CUDA to include.
//
// One launch serves many reads (sequences and KV heads of one layer). Every read is split over its
// sequence: block (s, r) of the first kernel reads the s-th run of units of read r, where a unit is
// a tile or 64 tokens of the tail, for all query heads of the KV head together. The second kernel
// combines the splits of each head. Tiles are found by their addresses, so they may lie in any
// order and in several slabs.
//
// Nothing is allocated and nothing waits, so the launches may be captured into a CUDA graph: what
// changes from step to step is in device memory (the AttendRead records and what they point to).
#ifndef CERTKV_KERNELS_CUDA_ATTEND_H_
#define CERTKV_KERNELS_CUDA_ATTEND_H_

#include <cstdint>

#include "kernels/ops/attend.h"

struct CUstream_st;

namespace certkv::cuda {

// Units of one split, at most: their sums are float.
inline constexpr int32_t kUnitsPerSplitMax = 512;

// Queries as an engine has them, [G][d]: float, or 16-bit and widened as they are read, which is
// exact, so that no bound knows of it. A head whose query isn't finite is reported as unknown:
// block_lse +infinity, half-widths and terms +infinity, output 0.
struct QueryRows {
  const uint16_t* bits = nullptr;  // null: AttendArgs::queries
  OriginalDtype dtype = OriginalDtype::kF16;
};

// One read, in device memory. Made by PlanRead.
struct AttendRead {
  // As in kernels/ops/attend.h, with device addresses. layout is null: it is below.
  AttendArgs args;
  AttendResult result;
  QueryRows queries;
  TileLayout layout;
  AffineDepth depth;  // of the key format; zeros where it isn't affine
  int32_t atom_count;
  int32_t first_tail_atom;
  int32_t first_tile_atom;   // above 0: of a progressive read, which reports no error by tile
  bool has_sub_block_atoms;  // sub-blocks of a tile are atoms of their own
  // [G][T] bit b: the head reads the tile's sub-block b; null: all. Progressive reads alone.
  const uint8_t* sub_blocks;
  int32_t tile_begin;  // tiles that the range touches: tile_begin <= t < tile_end
  int32_t tile_end;
  int32_t chunk_begin;  // and runs of 64 tokens of the tail
  int32_t chunk_end;
  int32_t units_per_split;
  int32_t split_count;
  int32_t radius_count;  // of split_radius
  // Scratch, S = split_count, G = group_size, T = tile_count. Sums are relative to 2^ref.
  float* split_ref;      // [S][G] log2 units, integers
  float* split_mass;     // [S][G] sum of weights; +infinity: a logit is unknown
  float* split_eta;      // [S][G] sum of weight * eta, rounded up
  float* split_reach;    // [S][G] sum of weight * bound on ||v^||, rounded up
  float* split_radius;   // [radius_count] largest bound on ||v||
  float* split_norm;     // [S] largest bound on ||v^||
  float* split_rotated;  // [S][G][d_v] sum of weight * v^, of rotated values
  float* split_plain;    // [S][G][d_v] the same of values that aren't rotated
  float* tile_ref;       // [G][T] reference of the sum in result.tile_value_error
};

// How a launch is shaped.
struct AttendPlan {
  int32_t read_count;
  int32_t split_count;   // of the read that has most
  int32_t group_size;    // the same for all reads
  int64_t shared_bytes;  // dynamic shared memory of a block
};

// Splits a read into runs of about 1 / block_target of its units, at least one of them, and finds
// the scratch's places. `args` and `result` hold device addresses but args.layout, which is a host
// address; `scratch` is a device address, aligned to 4 bytes, of ScratchBytes. Aborts on K8D keys,
// which kernels/ops refuses for a device.
AttendRead PlanRead(const AttendArgs& args, const AttendResult& result, int32_t block_target,
                    void* scratch, const QueryRows& queries = {});
int64_t ScratchBytes(const AttendArgs& args, int32_t block_target);
// The same for the units that the read has; then split_count may be set, and the scratch placed
// again. PlaceScratch returns its size, and with null does nothing else.
void PlanSplits(int32_t block_target, AttendRead* read);
int64_t PlaceScratch(void* scratch, AttendRead* read);
// Of reads with the same group_size and dimensions. `reads` are host addresses.
AttendPlan PlanLaunch(const AttendRead* reads, int32_t read_count);

// Queues both kernels. `reads` is a device address. 0, or the number of a cudaError_t; then nothing
// was written by what failed. The arguments were checked as kernels/ops does.
int LaunchAttend(const AttendPlan& plan, const AttendRead* reads, CUstream_st* stream);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_H_
