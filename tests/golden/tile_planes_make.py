#!/usr/bin/env python3
"""Writes tile_planes.json beside itself: SHA-256 of the planes of one tile per format.

Encodes as docs/formats.md says, with numpy's float32 and nothing of the C++ code, so that the two
check each other. The header and the witness are left out: they hold upper bounds, which may differ
in their rounding. Run it only when a format version changes.
"""
import hashlib
import json
import pathlib
import struct

import numpy as np

F32 = np.float32


def originals(dtype, dim, salt):
    """[64][dim] numbers that the dtype holds exactly."""
    t, i = np.meshgrid(np.arange(64), np.arange(dim), indexing="ij")
    n = t * 131 + i * 71 + t * i * 17 + salt
    if dtype == "F16":
        return ((n % 2003 - 1001) / 256).astype(F32)
    return ((n % 255 - 127) / 16).astype(F32)


def bits16(x, dtype):
    if dtype == "F16":
        return x.astype(np.float16).view(np.uint16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def f16_up(x):
    y = np.float16(x)
    return np.nextafter(y, np.float16(np.inf)) if F32(y) < x else y


def f16_down(x):
    return -f16_up(-x)


def level_inverse(levels):
    return F32((1 + 2.0**-22) / levels)


def encode_affine(x, levels, low=None):
    """Codes of one group, and its scale and zero as fp16; `low` is x.min() where it isn't given."""
    zero = f16_down(x.min() if low is None else low) + np.float16(0)  # -0 + 0 is +0
    spread = F32(x.max() - F32(zero))
    scale = f16_up(F32(spread * level_inverse(levels))) if spread > 0 else np.float16(0)
    inverse = F32(1) / F32(scale) if scale > 0 else F32(0)
    codes = np.rint(((x - F32(zero)).astype(F32) * inverse).astype(F32)).astype(int)
    assert codes.min() >= 0 and codes.max() <= min(255, levels + 0.5)
    return codes, scale, zero


def encode_channel(x, key_format):
    """Codes, scale and zero of one channel of affine keys."""
    plain = encode_affine(x, 255)
    if key_format == "K8":
        return plain
    levels, centre = (252, 1.5) if key_format == "K6" else (240, 7.5)
    spread = F32(x.max() - F32(plain[2]))
    step = F32(spread * level_inverse(levels))
    low = F32(x.min() - F32(step * F32(centre)))
    zero = f16_down(low) + np.float16(0)
    wide = F32(x.max() - F32(zero))
    if not F32(wide * level_inverse(levels + centre)) <= F32(spread * level_inverse(levels - centre)):
        return plain
    return encode_affine(x, levels + centre, low)


def philox(counter, key):
    """Philox4x32-10."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


# Of every case of the conformance suite.
SECRET, TAG = 0x0123456789ABCDEF, 1000


def dither(d):
    """[64][d] u of a tile."""
    key = (SECRET & 0xFFFFFFFF, SECRET >> 32)
    words = [[philox((t << 16 | i // 4, TAG & 0xFFFFFFFF, TAG >> 32, 1), key)[i % 4]
              for i in range(d)] for t in range(64)]
    return ((np.array(words) >> 8) - 2.0**23 + 0.5) * 2.0**-24


def encode_dithered(x, u):
    _, scale, zero = encode_affine(x, 255)
    if scale == 0:
        return np.zeros(len(x), int), scale, zero
    codes = np.rint((x.astype(float) - float(zero)) / float(scale) + u).astype(int)
    assert codes.min() >= 0 and codes.max() <= 255
    return codes, scale, zero


def rotate(x):
    x = x.copy()
    begin = 0
    while begin < len(x):
        n = 1 << ((len(x) - begin).bit_length() - 1)
        block = x[begin:begin + n]
        h = 1
        while h < n:
            for j in range(n):
                if not j & h:
                    a, b = block[j], block[j + h]
                    block[j], block[j + h] = a + b, a - b
            h *= 2
        block *= F32(1 / np.sqrt(n))
        begin += n
    return x


def e4m3(x):
    """Nearest finite e4m3 code, ties to even, saturating."""
    table = []
    for code in range(0x7f):
        e, m = code >> 3, code & 7
        table.append(m * 2.0**-9 if e == 0 else (8 + m) * 2.0**(e - 10))
    out = []
    for value in x:
        distance = np.abs(np.array(table) - abs(float(value)))
        best = np.flatnonzero(distance == distance.min())
        code = min(best, key=lambda c: c & 1)
        out.append(int(code) | (0x80 if np.signbit(value) else 0))
    return np.array(out)


def padded(data):
    return data + bytes(-len(data) % 64)


def nibble_plane(nibbles):
    """[16][d] nibbles as [d/8][16 tokens] dwords."""
    out = b""
    for j in range(nibbles.shape[1] // 8):
        for t in range(16):
            out += struct.pack("<I", sum(int(nibbles[t, 8 * j + n]) << 4 * n for n in range(8)))
    return out


def pair_plane(pairs):
    """K6's fine plane: [16][d] 2-bit codes as [d/16][16 tokens] dwords."""
    out = b""
    for j in range(pairs.shape[1] // 16):
        for t in range(16):
            for b in range(4):
                c = [int(pairs[t, 16 * j + k]) for k in (2 * b, 8 + 2 * b, 2 * b + 1, 8 + 2 * b + 1)]
                out += bytes([c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6])
    return out


def value_scale(code):
    e, m = code >> 3, code & 7
    return m * 2.0**-21 if e == 0 else (8 + m) * 2.0**(e - 22)


def encode_value(y, levels):
    """Codes of one rotated row for codes 0 ... levels - 1, and its scale code and zero code."""
    low, high = min(y.min(), F32(0)), max(y.max(), F32(0))
    span = F32(high - low)
    assert span > 2.0**-10, "far from what is rounded to zeros"
    share = F32(255 / 256 * (1 - 2.0**-12))
    least = float(span) / float(levels * share)
    scale_code = next(c for c in range(256) if value_scale(c) >= least)
    assert abs(value_scale(scale_code) / least - 1) > 2.0**-20, "its rounding doesn't matter"
    inverse = F32(F32(1) / F32(value_scale(scale_code)))
    twice = F32(F32(levels) - F32(F32(low + high) * inverse))
    zero_code = int(np.rint(min(F32(twice * F32(128 / levels)), F32(255))))
    offset = F32(zero_code * levels / 256 - 0.5)
    codes = np.rint(((y * inverse).astype(F32) + offset).astype(F32)).astype(int)
    assert codes.min() >= 0 and codes.max() < levels
    return codes, scale_code, zero_code


def value_plane(codes, is_v4):
    """[16][d_v] codes as [8 pairs][zones][8 lanes] dwords."""
    zone, per_word, width = (32, 4, 4) if is_v4 else (16, 2, 8)
    zones = -(-codes.shape[1] // zone)
    full = np.zeros((16, zones * zone), int)
    full[:, :codes.shape[1]] = codes
    out = b""
    for p in range(8):
        for z in range(zones):
            for lane in range(8):
                for t in (2 * p, 2 * p + 1):
                    word = sum(int(full[t, zone * z + 8 * n + lane]) << width * n
                               for n in range(per_word))
                    out += struct.pack("<H", word)
    return out


def encode(key_format, value_format, dtype, d, dv):
    keys, values = originals(dtype, d, 5), originals(dtype, dv, 11)
    head, fine = b"", [b""] * 4
    if key_format in ("F16", "BF16"):
        words = bits16(keys, dtype)
        coarse = [words[16 * s:16 * s + 16].T.astype("<u2").tobytes() for s in range(4)]
    else:
        if key_format == "FP8_E4M3":
            codes = np.array([e4m3((row / F32(0.03)).astype(F32)) for row in keys])
        else:
            u = dither(d) if key_format == "K8D" else None
            columns = [encode_channel(keys[:, i], key_format) if u is None
                       else encode_dithered(keys[:, i], u[:, i]) for i in range(d)]
            codes = np.array([c[0] for c in columns]).T
            head = padded(np.array([c[1] for c in columns], "<f2").tobytes())
            head += padded(np.array([c[2] for c in columns], "<f2").tobytes())
        blocks = [codes[16 * s:16 * s + 16] for s in range(4)]
        coarse = [nibble_plane(b >> 4) for b in blocks]
        if key_format in ("K8", "K8D", "FP8_E4M3"):
            fine = [nibble_plane(b & 15) for b in blocks]
        elif key_format == "K6":
            fine = [pair_plane(b >> 2 & 3) for b in blocks]
    detail = scales = zeros = b""
    for s in range(4):
        rows = values[16 * s:16 * s + 16]
        detail += fine[s]
        if value_format in ("F16", "BF16"):
            detail += bits16(rows, dtype).astype("<u2").tobytes()
            continue
        tokens = [encode_value(rotate(row), 16 if value_format == "V4" else 256) for row in rows]
        detail += value_plane(np.array([t[0] for t in tokens]), value_format == "V4")
        scales += bytes(t[1] for t in tokens)
        zeros += bytes(t[2] for t in tokens)
    return head + b"".join(coarse), detail + scales + zeros


def main():
    cases = []
    for key, value, bands in (("K8", "V4", 0), ("K8", "V8", 1), ("K6", "V4", 1), ("K6", "V8", 4),
                              ("K4", "V4", 0), ("FP8_E4M3", "V8", 4), ("F16", "F16", 0),
                              ("BF16", "BF16", 0), ("K8D", "V8", 0)):
        for d, dv in ((64, 64), (80, 96), (96, 80), (128, 256), (256, 128)):
            for dtype in ("F16", "BF16"):
                if key in ("F16", "BF16") and key != dtype:
                    continue
                scan, detail = encode(key, value, dtype, d, dv)
                cases.append({
                    "key_format": key, "value_format": value, "witness_bands": bands,
                    "original_dtype": dtype, "head_dim": d, "value_dim": dv,
                    "scan_sha256": hashlib.sha256(scan).hexdigest(),
                    "detail_sha256": hashlib.sha256(detail).hexdigest(),
                })
    path = pathlib.Path(__file__).parent / "tile_planes.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


main()
