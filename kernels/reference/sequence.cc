#include "kernels/reference/sequence.h"

#include <algorithm>

#include "kernels/core/half.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {
namespace {

bool SourceHas(const AttendArgs& args, int g, int64_t token, uint8_t bit) {
  const int32_t tile = TileOf(args, token);
  if (tile < 0) return true;
  if (args.tile_sources == nullptr) return false;
  return (args.tile_sources[int64_t{g} * args.tile_count + tile] & bit) != 0;
}

}  // namespace

TokenRange AtomTokens(const AttendArgs& args, int32_t atom) {
  const int32_t tile_atoms = args.tile_count * args.layout->atoms_per_tile();
  const int64_t tail_begin = int64_t{args.tile_count} * kTileTokens;
  const int64_t sequence_end = tail_begin + args.tail_count;
  TokenRange range;
  if (atom < tile_atoms) {
    range.begin = int64_t{atom} * args.layout->atom_tokens();
    range.end = range.begin + args.layout->atom_tokens();
  } else {
    range.begin = tail_begin + int64_t{atom - tile_atoms} * kTileTokens;
    range.end = std::min(range.begin + kTileTokens, sequence_end);
  }
  return {std::max(range.begin, args.token_begin), std::min(range.end, args.token_end)};
}

bool ReadsOriginalKey(const AttendArgs& args, int g, int64_t token) {
  return SourceHas(args, g, token, kSourceOriginalKeys);
}

bool ReadsOriginalValue(const AttendArgs& args, int g, int64_t token) {
  return SourceHas(args, g, token, kSourceOriginalValues);
}

bool KeyIsExact(const AttendArgs& args, int g, int64_t token) {
  return IsOriginal(args.layout->key_format) || ReadsOriginalKey(args, g, token);
}

void ReadKey(const AttendArgs& args, int g, int64_t token, double* key) {
  const TileLayout& layout = *args.layout;
  const int32_t tile = TileOf(args, token);
  const int64_t tail_row = token - int64_t{args.tile_count} * kTileTokens;
  const int row = static_cast<int>(token % kTileTokens);
  for (int i = 0; i < layout.head_dim; ++i) {
    if (tile < 0) {
      key[i] =
          OriginalToFloat(args.original_dtype, args.tail_keys[tail_row * args.tail_key_stride + i]);
    } else if (ReadsOriginalKey(args, g, token)) {
      key[i] = OriginalToFloat(args.original_dtype,
                               args.tiles[tile].original_keys[row * layout.head_dim + i]);
    } else {
      key[i] = DecodeKey(layout, args.tiles[tile].scan, args.tiles[tile].detail, row, i);
    }
  }
}

bool ReadValue(const AttendArgs& args, int g, int64_t token, double* value) {
  const TileLayout& layout = *args.layout;
  const int32_t tile = TileOf(args, token);
  const int64_t tail_row = token - int64_t{args.tile_count} * kTileTokens;
  const int row = static_cast<int>(token % kTileTokens);
  for (int i = 0; i < layout.value_dim; ++i) {
    if (tile < 0) {
      value[i] = OriginalToFloat(args.original_dtype,
                                 args.tail_values[tail_row * args.tail_value_stride + i]);
    } else if (ReadsOriginalValue(args, g, token)) {
      value[i] = OriginalToFloat(args.original_dtype,
                                 args.tiles[tile].original_values[row * layout.value_dim + i]);
    } else {
      value[i] = DecodeStoredValue(layout, args.tiles[tile].detail, row, i);
    }
  }
  return !ReadsOriginalValue(args, g, token) && ValuesAreRotated(layout);
}

double ValueErrorBound(const AttendArgs& args, int g, int64_t token) {
  if (ReadsOriginalValue(args, g, token) || !ValuesAreRotated(*args.layout)) return 0;
  const TileHeader header = ReadHeader(args.tiles[TileOf(args, token)].scan);
  return F16ToFloat(header.value_error_bound[token % kTileTokens / kSubBlockTokens]);
}

}  // namespace certkv::reference
