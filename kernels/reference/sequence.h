// The sequence of a read, one token at a time: where a head reads a token from, and what it reads.
#ifndef CERTKV_KERNELS_REFERENCE_SEQUENCE_H_
#define CERTKV_KERNELS_REFERENCE_SEQUENCE_H_

#include <cstdint>

#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend.h"

namespace certkv::reference {

// Tokens begin <= t < end of the sequence. Empty when begin >= end.
struct TokenRange {
  int64_t begin;
  int64_t end;
};

// Tokens of atom `atom` that the read covers; the sink's atom has none.
TokenRange AtomTokens(const AttendArgs& args, int32_t atom);

// Tile of a token, or -1 in the tail.
inline int32_t TileOf(const AttendArgs& args, int64_t token) {
  const int64_t tile = token / kTileTokens;
  return tile < args.tile_count ? static_cast<int32_t>(tile) : -1;
}

// True when head g reads the originals: in the tail, and where its source says so.
bool ReadsOriginalKey(const AttendArgs& args, int g, int64_t token);
bool ReadsOriginalValue(const AttendArgs& args, int g, int64_t token);
// True when k^ is the original bit for bit: an original, or a tile of a 16-bit format.
bool KeyIsExact(const AttendArgs& args, int g, int64_t token);

// key[d]: k^ of the token as head g reads it, exact in double.
void ReadKey(const AttendArgs& args, int g, int64_t token, double* key);

// value[d_v]: v^ as head g reads it, exact in double; returns true when it is still rotated.
bool ReadValue(const AttendArgs& args, int g, int64_t token, double* value);

// eta of the token: an upper bound on ||v - v^||_2; 0 for originals.
double ValueErrorBound(const AttendArgs& args, int g, int64_t token);

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_SEQUENCE_H_
