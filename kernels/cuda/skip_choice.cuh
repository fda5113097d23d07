// Which sub-blocks a head reads, from the bounds of the scan: as many of the smallest bounds are
// skipped as the skip tolerance allows (docs/bounds.md, section 9). A block does one head.
//
// As on the CPU there are two choices. The first counts on what the coarse logits, without their
// half-widths, say of the sub-blocks that it reads. The second knows what they came out to; it
// reads more where that is less, and counts on nothing that it hasn't seen, so that it is the last.
//
// Sub-blocks are in buckets of an eighth of an octave of their bound, 32 octaves; everything below
// is in the last. Sums are integers in units of 2^-42 of the largest bound, each rounded up, so
// that no order of theirs matters and U is never too small.
#ifndef CERTKV_KERNELS_CUDA_SKIP_CHOICE_CUH_
#define CERTKV_KERNELS_CUDA_SKIP_CHOICE_CUH_

#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/progressive.h"

namespace certkv::cuda {

inline constexpr int kBuckets = 256;
inline constexpr float kBucketsPerNat = 8 * kLog2E;
inline constexpr double kUnitsPerBound = 0x1p42;
// What the half-widths of a full read may take from the coarse masses; when they take more, more is
// read.
inline constexpr double kFirstChoiceMargin = 0.85;
// exp, log and sums in double, of at most 2^20 terms.
inline constexpr double kUpperInflation = 1 + 0x1p-24;
// What the finishing step may find less of what was kept, beside the slack of what is reported.
inline constexpr double kKeptShare = 1 - 0x1p-10;

struct ChoiceMemory {
  unsigned long long upper[kBuckets];  // units
  unsigned long long mass[kBuckets];   // of the coarse logits as they are
  float floats[kBlockThreads];
  double doubles[kBlockThreads];
  int cut;
  double skipped;  // sum of the bounds below the cut, relative to e^top
};

// The bucket of a finite bound. Monotone, so that a cut separates bounds.
__device__ inline int BucketOf(float upper_lse, float top) {
  const float below = (top - upper_lse) * kBucketsPerNat;
  return below < kBuckets - 1 ? kBuckets - 1 - static_cast<int>(below) : 0;
}

// One head of the read.
struct HeadChoice {
  const AttendRead& read;  // kPartAll
  const SkipState& skip;
  int g;
  int first;  // sub-blocks of the tiles that the range touches: first <= n < end
  int end;
  const float* upper;     // [B]
  const float* coarse;    // [B]
  uint8_t* reading;       // [T]
  uint8_t* read_in_full;  // [T]
  int64_t row;            // of the head's atoms

  __device__ HeadChoice(const AttendRead& read, const SkipState& skip, int g)
      : read(read), skip(skip), g(g) {
    const int64_t tiles = read.args.tile_count;
    first = kSubBlocksPerTile * read.tile_begin;
    end = kSubBlocksPerTile * read.tile_end;
    upper = skip.upper_lse + g * kSubBlocksPerTile * tiles;
    coarse = skip.coarse_lse + g * kSubBlocksPerTile * tiles;
    reading = skip.reading + g * tiles;
    read_in_full = skip.sub_blocks_read + g * tiles;
    row = int64_t{g} * read.atom_count;
  }
  __device__ int sink_atom() const { return read.first_tile_atom - 1; }
};

__device__ inline void WriteAtom(const AttendRead& read, int64_t place, float logit) {
  read.result.block_lse[place] = logit;
  read.result.block_max_logit[place] = logit;
  read.result.logit_half_width[place] = 0;
}

// Atoms that nobody else writes: of chunks outside the range, of the sink, of all sub-blocks until
// they are read.
__device__ inline void BeginAtoms(const HeadChoice& head) {
  const AttendRead& read = head.read;
  const float* const sinks = read.args.sink_logits;
  const int sink_atom = head.sink_atom();
  for (int atom = ThreadIndex(); atom < read.atom_count; atom += kBlockThreads) {
    if (atom >= read.chunk_begin && atom < read.chunk_end && atom < sink_atom) continue;
    const bool has_logit = atom == sink_atom && sinks != nullptr;
    WriteAtom(read, head.row + atom, has_logit ? sinks[head.g] : -kInfinity);
  }
  if (ThreadIndex() == 0) {
    head.skip.atom_count[head.g] = read.first_tile_atom + kSubBlocksPerTile * read.args.tile_count;
  }
}

// A lower bound on the mass of what was read, relative to e^top; `atom_count` atoms of it.
__device__ inline double KeptMass(const HeadChoice& head, int atom_count, float top,
                                  ChoiceMemory* memory) {
  double kept = 0;
  for (int atom = ThreadIndex(); atom < atom_count; atom += kBlockThreads) {
    const float lse = head.read.result.block_lse[head.row + atom];
    // Unknown and empty ones add nothing; NaN neither.
    if (!(lse > -kInfinity && lse < kInfinity)) continue;
    const float size = fmaxf(fabsf(lse), fabsf(head.read.result.block_max_logit[head.row + atom]));
    const float slack = __fmaf_ru(size, 0x1p-22f, 0x1p-14f);
    const float width = __fadd_ru(head.read.result.logit_half_width[head.row + atom], slack);
    kept += exp(static_cast<double>(lse) - width - top);
  }
  return kKeptShare * BlockReduce(memory->doubles, kept, [](double a, double b) { return a + b; });
}

__device__ inline void FillBuckets(const HeadChoice& head, float top, ChoiceMemory* memory) {
  for (int n = ThreadIndex(); n < kBuckets; n += kBlockThreads) {
    memory->upper[n] = memory->mass[n] = 0;
  }
  __syncthreads();
  for (int n = head.first + ThreadIndex(); n < head.end; n += kBlockThreads) {
    const float upper = head.upper[n];
    if (!(upper < kInfinity) || upper == -kInfinity) continue;
    const int bucket = BucketOf(upper, top);
    const double bound = exp(static_cast<double>(upper) - top) * (1 + 0x1p-40);
    const double mass = exp(static_cast<double>(head.coarse[n]) - top);
    atomicAdd(&memory->upper[bucket],
              static_cast<unsigned long long>(ceil(bound * kUnitsPerBound)));
    atomicAdd(&memory->mass[bucket], static_cast<unsigned long long>(mass * kUnitsPerBound));
  }
  __syncthreads();
}

// The first bucket that is read, at most `end`. By one thread.
__device__ inline void Cut(int end, double kept, double ratio, bool is_first,
                           ChoiceMemory* memory) {
  double left = 0;  // coarse masses of buckets that would be read
  for (int n = 0; is_first && n < kBuckets; ++n) left += static_cast<double>(memory->mass[n]);
  int cut = 0;
  double skipped = 0;
  for (; cut < end; ++cut) {
    const double upper =
        skipped + static_cast<double>(memory->upper[cut]) / kUnitsPerBound * kUpperInflation;
    left -= static_cast<double>(memory->mass[cut]);
    const double guess = is_first ? kFirstChoiceMargin * fmax(left, 0.0) / kUnitsPerBound : 0;
    if (!(upper <= ratio * (kept + guess))) break;
    skipped = upper;
  }
  memory->cut = cut;
  memory->skipped = skipped;
}

// Sub-blocks of buckets from the cut to below `end`, and, where is_first, those without a bound.
__device__ inline void WriteMasks(const HeadChoice& head, float top, int cut, int end,
                                  bool is_first) {
  for (int tile = ThreadIndex(); tile < head.read.args.tile_count; tile += kBlockThreads) {
    const bool is_touched = tile >= head.read.tile_begin && tile < head.read.tile_end;
    uint32_t bits = 0;
    for (int b = 0; is_touched && b < kSubBlocksPerTile; ++b) {
      const float upper = head.upper[kSubBlocksPerTile * tile + b];
      if (upper == -kInfinity) continue;  // no token of the range
      const bool is_bounded = upper < kInfinity;
      const int bucket = is_bounded ? BucketOf(upper, top) : 0;
      const bool is_read = is_bounded ? bucket >= cut && bucket < end : is_first;
      if (is_read) bits |= 1u << b;
    }
    head.reading[tile] = static_cast<uint8_t>(bits);
    head.read_in_full[tile] =
        static_cast<uint8_t>(is_first ? bits : head.read_in_full[tile] | bits);
  }
}

__device__ inline void ChooseHead(const AttendRead& read, const SkipState& skip, int g,
                                  bool is_first, ChoiceMemory* memory) {
  const HeadChoice head(read, skip, g);
  if (is_first) {
    BeginAtoms(head);
    float top = -kInfinity;
    for (int n = head.first + ThreadIndex(); n < head.end; n += kBlockThreads) {
      if (head.upper[n] < kInfinity) top = fmaxf(top, head.upper[n]);
    }
    top = BlockReduce(memory->floats, top, [](float a, float b) { return fmaxf(a, b); });
    if (ThreadIndex() == 0) skip.top[g] = top == -kInfinity ? 0.0f : top;
  }
  __syncthreads();
  const float top = skip.top[g];
  const int end = is_first ? kBuckets : skip.cut[g];
  // The first choice knows the tail and the sink.
  const double kept =
      KeptMass(head, is_first ? read.first_tile_atom : read.atom_count, top, memory);
  FillBuckets(head, top, memory);
  const float tolerance = skip.skip_tolerance[g];
  // SkipRatio of kernels/bounds/skipping.h.
  const double ratio =
      tolerance > 0 && tolerance < 1 ? tolerance / (1.0 - tolerance) * (1 - 0x1p-40) : 0.0;
  if (ThreadIndex() == 0) Cut(end, kept, ratio, is_first, memory);
  __syncthreads();
  WriteMasks(head, top, memory->cut, end, is_first);
  if (ThreadIndex() != 0) return;
  skip.cut[g] = memory->cut;
  float skipped_lse = -kInfinity;
  if (memory->skipped > 0) {
    const double lse = top + log(memory->skipped * kUpperInflation);
    skipped_lse = __double2float_ru(lse + fabs(lse) * 0x1p-40);
  }
  skip.skipped_lse_nat[g] = skipped_lse;
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_SKIP_CHOICE_CUH_
