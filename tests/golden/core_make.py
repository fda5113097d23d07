#!/usr/bin/env python3
"""Writes core_identities.json and core_tile_layout.json beside itself.

Computes what docs/formats.md defines from its text, with hashlib and struct and nothing of the C++
code, so that the two check each other. Run it only when a format version changes; a diff in the
JSON files otherwise means that stored caches have lost their identity.
"""
import hashlib
import json
import pathlib
import struct

FOLDER = pathlib.Path(__file__).parent
KEY_FORMATS = {"K8": 1, "K6": 2, "K4": 3, "FP8_E4M3": 4, "F16": 5, "BF16": 6, "K8D": 7}
VALUE_FORMATS = {"V4": 1, "V8": 2, "F16": 5, "BF16": 6}


def u32(*values):
    return b"".join(struct.pack("<I", value & 0xFFFFFFFF) for value in values)


def f32(*values):
    return b"".join(struct.pack("<f", value) for value in values)


def sized(data):
    return u32(len(data)) + data


def layer(key="K8", value="V4", bands=0, fp8_key_scale=1.0, window=0, weights=()):
    return {"key_format": KEY_FORMATS[key], "value_format": VALUE_FORMATS[value],
            "witness_bands": bands, "fp8_key_scale": fp8_key_scale, "sliding_window": window,
            "witness_weights": list(weights)}


SMOL = {"model": "SmolLM2-135M-Instruct@12fd25f", "kv_head_count": 3, "group_size": 3,
        "head_dim": 64, "value_dim": 64, "block_tokens": 64, "rope_pairing": 2, "rotary_dim": 64,
        "rope_theta": 100000.0, "logit_scale": 0.125, "soft_cap": 0.0, "original_dtype": 1,
        "layers": [layer()] * 4}
MIXED = {"model": "m\u00e9lange", "kv_head_count": 8, "group_size": 16, "head_dim": 80,
         "value_dim": 128, "block_tokens": 256, "rope_pairing": 3, "rotary_dim": 32,
         "rope_theta": 10000.0, "logit_scale": 0.0625, "soft_cap": 50.0, "original_dtype": 2,
         "layers": [layer("K6", "V8", 1, window=4096), layer("FP8_E4M3", "V4", 4, 0.375),
                    layer("K4", "V8", 4), layer("BF16", "BF16", 0, 2.0, 1)]}

WEIGHTED = {**SMOL, "layers": [layer("K6", bands=1, weights=[(1 + i % 64) / 32 for i in range(192)]),
                               layer("K8", bands=4)]}


def spec_digest(spec):
    weighted = any(one["witness_weights"] for one in spec["layers"])
    data = b"certkv.cache_spec.v2" if weighted else b"certkv.cache_spec.v1"
    data += sized(spec["model"].encode())
    data += u32(*(spec[name] for name in (
        "kv_head_count", "group_size", "head_dim", "value_dim", "block_tokens", "rope_pairing",
        "rotary_dim", "original_dtype")))
    data += f32(spec["rope_theta"], spec["logit_scale"], spec["soft_cap"])
    data += u32(len(spec["layers"]))
    for one in spec["layers"]:
        data += u32(one["key_format"], one["value_format"], one["witness_bands"])
        data += f32(one["fp8_key_scale"]) + u32(one["sliding_window"])
        if weighted:
            data += u32(len(one["witness_weights"])) + f32(*one["witness_weights"])
    return hashlib.sha256(data).digest()


def block_key(digest, rank, salt, extra, parent, tokens):
    data = b"certkv.block.v1" + parent + u32(len(tokens), *tokens) + digest + u32(rank)
    return hashlib.sha256(data + sized(salt) + sized(extra)).digest()


def mix(x):
    mask = (1 << 64) - 1
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def identity_tag(key, layer_index, kv_head, tile):
    head = struct.unpack("<Q", key[:8])[0]
    return mix(head ^ mix((layer_index << 40 | kv_head << 20 | tile) + 1))


def identities():
    digests = [spec_digest(SMOL), spec_digest(MIXED)]
    blocks = []
    for digest, rank, salt, extra, tokens in [
            (digests[0], 0, b"", b"", [1, 2, 3, 4]),
            (digests[0], 0, b"tenant-a", b"", [1, 2, 3, 4]),
            (digests[1], 7, b"s", b"lora:9\x00\xff", [0, -1, 2**31 - 1, 49151] * 16)]:
        parent = bytes(32)
        for step in range(2):
            key = block_key(digest, rank, salt, extra, parent, tokens)
            blocks.append({"spec_digest": digest.hex(), "rank": rank, "tenant_salt": salt.decode(),
                           "extra_keys": extra.hex(), "parent": parent.hex(), "tokens": tokens,
                           "key": key.hex(),
                           "tags": [{"place": list(place), "tag": f"{identity_tag(key, *place):016x}"}
                                    for place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1),
                                                  (255, 255, 15))]})
            parent = key
    return {"specs": [{"spec": spec, "digest": spec_digest(spec).hex()} for spec in (SMOL, MIXED, WEIGHTED)],
            "blocks": blocks}


def up64(size):
    return -(-size // 64) * 64


def tile_layout(key, value, head_dim, value_dim, bands):
    whole = key in ("F16", "BF16")
    affine = key in ("K8", "K8D", "K6", "K4")
    scale = 2 * head_dim if affine else 0
    coarse = 16 * head_dim * 2 if whole else 16 * head_dim // 2
    fine = {"K8": 16 * head_dim // 2, "K8D": 16 * head_dim // 2, "FP8_E4M3": 16 * head_dim // 2,
            "K6": 16 * head_dim // 4}.get(key, 0)
    channels = -(-value_dim // 32) * 32  # V4 pads to 32 channels
    values = {"V4": 16 * channels // 2, "V8": 16 * value_dim}.get(value, 16 * value_dim * 2)
    zero_offset = 64 + up64(scale)
    witness_offset = zero_offset + up64(scale)
    coarse_offset = witness_offset + 64 * bands
    sub_block = fine + values
    return {"key_format": KEY_FORMATS[key], "value_format": VALUE_FORMATS[value],
            "head_dim": head_dim, "value_dim": value_dim, "witness_bands": bands,
            "scale_offset": 64, "zero_offset": zero_offset, "scale_bytes": scale,
            "witness_offset": witness_offset, "coarse_offset": coarse_offset,
            "coarse_bytes": coarse, "scan_bytes": coarse_offset + 4 * coarse,
            "fine_bytes": fine, "value_offset": fine, "value_bytes": values,
            "sub_block_bytes": sub_block, "value_scale_offset": 4 * sub_block,
            "detail_bytes": 4 * sub_block + (0 if whole else 128)}


def tile_layouts():
    rows = []
    dims = (64, 80, 96, 128, 256)
    for key in KEY_FORMATS:
        for value in VALUE_FORMATS:
            if (key in ("F16", "BF16") or value in ("F16", "BF16")) and key != value:
                continue
            for bands in (0, 1, 4):
                if key == "FP8_E4M3" and bands != 4 or key in (value, "K8D") and bands != 0:
                    continue
                rows += [tile_layout(key, value, dim, dim, bands) for dim in dims]
                rows.append(tile_layout(key, value, 128, 80, bands))
    return rows


def write(name, content):
    text = json.dumps(content, indent=1) if isinstance(content, dict) else (
        "[\n" + ",\n".join(json.dumps(row) for row in content) + "\n]")
    (FOLDER / name).write_text(text + "\n")


if __name__ == "__main__":
    write("core_identities.json", identities())
    write("core_tile_layout.json", tile_layouts())
