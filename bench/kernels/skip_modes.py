#!/usr/bin/env python3
"""How much of a sequence each way to skip reads in full: what decision 0028 chose between.

usage: skip_modes.py TRACE [--copies N] [--json FILE]

For reads of the last positions of every layer and head of a recorded trace (docs/formats.md, section 8),
K8 keys, skip tolerance 0.1, in numpy: coarse scans with a query of one or of two signed bytes per channel,
and sub-blocks chosen in a second pass, when every bound is known, or at once in one pass, against the lower
mass of what was read before. Needs numpy.
"""
import argparse
import json
import struct
import sys

import numpy as np

TILE, SUB_BLOCK, SKIP_TOLERANCE, POSITIONS = 64, 16, 0.1, (-8, -5, -2)
RATIO = SKIP_TOLERANCE / (1 - SKIP_TOLERANCE)  # of what is skipped to what is read


def load(path):
    """Metadata and fp16 tensors of a safetensors file."""
    raw = open(path, "rb").read()
    size, = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    tensors = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F16":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(raw[begin:end], np.float16).reshape(entry["shape"])
    return header["__metadata__"], tensors


def coarse_keys(keys):
    """[T, 64, d] originals: scales [T, d], and keys at the middle of their coarse step with nibbles."""
    low, high = keys.min(1), keys.max(1)
    scale = np.maximum((high - low) / 255, 1e-9)
    codes = np.clip(np.rint((keys - low[:, None]) / scale[:, None]), 0, 255).astype(int)
    nibbles = codes >> 4
    return scale, nibbles, low[:, None] + scale[:, None] * (16 * nibbles + 7.5)


def bounds(query, keys, coarse, byte_terms):
    """Upper bounds on the masses of sub-blocks from the scan, and lower ones of reads in full."""
    scale, nibbles, middle = coarse
    x = query * scale
    unit = np.abs(x).max(1, keepdims=True) / 127
    if byte_terms == 2:
        unit /= 256
    left = x - unit * np.rint(x / unit)
    magnitude = np.abs(x).sum(1, keepdims=True)
    half_width = 8 * magnitude + 120 * np.abs(left).sum(1, keepdims=True)
    logits = middle @ query - 16 * ((nibbles - 7.5) * left[:, None]).sum(2)
    exact = keys @ query
    top = max((logits + half_width).max(), exact.max())

    def masses(exponents):
        return np.exp(exponents - top).reshape(-1, SUB_BLOCK).sum(1)

    return masses(logits + half_width), masses(exact - magnitude / 2)


def read_in_two_passes(upper, lower):
    order = np.argsort(upper)
    kept = lower.sum() - np.cumsum(lower[order])
    skipped = np.cumsum(upper[order]) <= RATIO * kept
    return 1 - np.argmin(np.append(skipped, False)) / len(upper)


def read_in_one_pass(upper, lower):
    skipped = kept = 0.0
    read = 0
    for above, below in zip(upper, lower):
        if skipped + above <= RATIO * kept:
            skipped += above
        else:
            kept += below
            read += 1
    return read / len(upper)


def shares_of_layer(keys, queries, group_size):
    """Mean share of sub-blocks that are read, by mode. keys [n, H, d], queries [n, H G, d]."""
    shares = {}
    for head in range(keys.shape[1]):
        tiles = keys[:, head].reshape(-1, TILE, keys.shape[2])
        coarse = coarse_keys(tiles)
        for position in POSITIONS:
            for query in queries[position, head * group_size:(head + 1) * group_size]:
                query = query / np.sqrt(keys.shape[2])
                for terms in (1, 2):
                    upper, lower = bounds(query, tiles, coarse, terms)
                    for mode, share in (("two_passes", read_in_two_passes(upper, lower)),
                                        ("one_pass_oldest_first", read_in_one_pass(upper, lower)),
                                        ("one_pass_newest_first",
                                         read_in_one_pass(upper[::-1], lower[::-1]))):
                        shares.setdefault(f"{mode}/{terms}", []).append(share)
    return {mode: float(np.mean(values)) for mode, values in shares.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("trace")
    parser.add_argument("--copies", type=int, default=1,
                        help="the trace's keys so many times, with fresh noise on every copy")
    parser.add_argument("--json", help="file to write the shares to")
    options = parser.parse_args()
    metadata, tensors = load(options.trace)
    random = np.random.default_rng(5)
    rows = []
    for layer in metadata["layers"].split(","):
        keys, queries = (tensors[f"layers.{layer}.{name}"].astype(np.float32)
                         for name in ("key", "query"))
        dim = int(metadata["head_dim"])
        keys = keys.reshape(len(keys), -1, dim)
        keys = keys[:len(keys) // TILE * TILE]
        noise = 0.1 * keys.std(0)
        copies = [keys + noise * random.normal(size=keys.shape).astype(np.float32)
                  for _ in range(options.copies - 1)]
        keys = np.concatenate([keys] + copies)
        queries = queries.reshape(len(queries), -1, dim)
        shares = shares_of_layer(keys, queries, queries.shape[1] // keys.shape[1])
        rows.append({"name": f"skip_modes/layer{layer}/n{len(keys)}", "share_read": shares})
        print(rows[-1]["name"], {mode: round(share, 3) for mode, share in shares.items()},
              file=sys.stderr)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"skip_tolerance": SKIP_TOLERANCE, "rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
