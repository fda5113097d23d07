// One code, scale or decoded element of a tile at a time: kernels/core/tile_layout.h as functions.
//
// t is a token in [0, 64), i a channel in [0, d) or [0, d_v). Records are whole and writable ones
// start as zeros.
#ifndef CERTKV_KERNELS_REFERENCE_TILE_CODEC_H_
#define CERTKV_KERNELS_REFERENCE_TILE_CODEC_H_

#include <cstdint>

#include "kernels/core/tile_layout.h"

namespace certkv::reference {

bool IsOriginal(KeyFormat format);  // F16, BF16

TileHeader ReadHeader(const uint8_t* scan);

// The 8-bit code (K6 and K4: without the bits that the format drops), or the 16 original bits.
uint32_t ReadKeyCode(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail, int t,
                     int i);
void WriteKeyCode(const TileLayout& layout, uint8_t* scan, uint8_t* detail, int t, int i,
                  uint32_t code);

// Of rotated channel i; 16-bit formats: the original bits of channel i.
uint32_t ReadValueCode(const TileLayout& layout, const uint8_t* detail, int t, int i);
void WriteValueCode(const TileLayout& layout, uint8_t* detail, int t, int i, uint32_t code);

// fp16 bits. Affine formats only.
uint16_t ReadKeyScale(const TileLayout& layout, const uint8_t* scan, int i);
uint16_t ReadKeyZero(const TileLayout& layout, const uint8_t* scan, int i);
void WriteKeyScaleAndZero(const TileLayout& layout, uint8_t* scan, int i, uint16_t scale,
                          uint16_t zero);

// fp16 bits. V4 and V8 only.
uint8_t ReadValueScale(const TileLayout& layout, const uint8_t* detail, int t);
uint8_t ReadValueZero(const TileLayout& layout, const uint8_t* detail, int t);
void WriteValueScaleAndZero(const TileLayout& layout, uint8_t* detail, int t, uint8_t scale,
                            uint8_t zero);

// Witness code of token t in band b. Only where layout.witness_bands > 0.
uint8_t ReadWitness(const TileLayout& layout, const uint8_t* scan, int t, int band);
void WriteWitness(const TileLayout& layout, uint8_t* scan, int t, int band, uint8_t code);

// The dither of one channel of a K8D key, in units of its scale.
double ReadDither(const TileLayout& layout, const uint8_t* scan, int t, int i);

// k^ of an affine code read at a depth; exact in double (8-bit code times 11-bit scale plus fp16).
double DecodeAffineKey(const AffineDepth& depth, uint32_t code, uint16_t scale, uint16_t zero);

// k^[t, i], exact in double; K8D: but for the last addition, which rounds.
double DecodeKey(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail, int t,
                 int i);
// Element i of v^[t], rotated (V4, V8) or not (16-bit formats); exact in double.
double DecodeStoredValue(const TileLayout& layout, const uint8_t* detail, int t, int i);
inline bool ValuesAreRotated(const TileLayout& layout) { return IsRotated(layout.value_format); }

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_TILE_CODEC_H_
