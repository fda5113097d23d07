#!/usr/bin/env python3
"""What compressing blocks on their way would save: real planes and originals, as the bulk plane
sends them, through zstd and lz4.

usage: PYTHONPATH=build/release/python bench/services/compression_bench.py [RESULT_FILE]

Starts a certkvd of its own, puts the keys and values of tests/data's trace, fetches each block by
the protocol of docs/bulk.md, and compresses it in one piece on one thread.
"""
import ctypes
import json
import pathlib
import socket
import statistics
import struct
import sys
import time

import certkv
import numpy as np
from certkv import _native

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRACE = ROOT / "tests/data/smollm2-135m-4-layers.safetensors"
PARTS = {"planes": 1, "originals": 2}
ROUNDS = 5

_xxhash = ctypes.CDLL("libxxhash.so.0")
_xxhash.XXH3_64bits.restype = ctypes.c_uint64
_zstd = ctypes.CDLL("libzstd.so.1")
_zstd.ZSTD_compress.restype = _zstd.ZSTD_compressBound.restype = ctypes.c_size_t
_lz4 = ctypes.CDLL("liblz4.so.1")


def zstd(data, out):
    return _zstd.ZSTD_compress(
        out, ctypes.c_size_t(len(out)), data, ctypes.c_size_t(len(data)), 1)


def lz4(data, out):
    return _lz4.LZ4_compress_default(data, out, len(data), len(out))


def read_trace():
    """(metadata, name -> array) of the trace."""
    raw = TRACE.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    arrays = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        dtype = {"F16": np.float16, "I32": np.int32, "F32": np.float32}[about["dtype"]]
        arrays[name] = np.frombuffer(raw[8 + size + first:8 + size + last], dtype).reshape(
            about["shape"])
    return header["__metadata__"], arrays


def frame(kind, body, request=0):
    head = b"CKBF" + struct.pack("<HHIIQ", 1, kind, request, len(body), 0)
    return head + struct.pack("<Q", _xxhash.XXH3_64bits(head + body, len(head + body))) + body


class Peer:
    """A connection of the bulk plane."""

    def __init__(self, address, spec):
        host, port = address.split(":")
        self._file = socket.create_connection((host, int(port))).makefile("rwb")
        self._ask(frame(1, struct.pack("<HHHH", 1, 1, 0, 0) + _native.digest_spec(spec)), 2)

    def _ask(self, request, kind):
        self._file.write(request)
        self._file.flush()
        head = self._file.read(32)
        _, _, got, _, body_bytes, data_bytes = struct.unpack("<4sHHIIQ", head[:24])
        body = self._file.read(body_bytes)
        assert got == kind, body
        return self._file.read(data_bytes)

    def block(self, key, parts):
        return self._ask(frame(3, key + struct.pack("<IIQ", parts, 0, 0), 1), 4)


def measure(blocks, compress, name):
    sizes, seconds = [], []
    out = ctypes.create_string_buffer(_zstd.ZSTD_compressBound(max(map(len, blocks))))
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        sizes = [compress(block, out) for block in blocks]
        seconds.append(time.perf_counter() - begin)
    total = sum(map(len, blocks))
    return {"name": name, "bytes": total, "left": sum(sizes) / total,
            "megabytes_per_second": total / statistics.median(seconds) / 1e6}


def main():
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    metadata, arrays = read_trace()
    layers = metadata["layers"].split(",")
    spec = certkv.CacheSpec.uniform(
        metadata["model"], layer_count=len(layers), kv_head_count=int(metadata["kv_heads"]),
        group_size=int(metadata["query_heads"]) // int(metadata["kv_heads"]),
        head_dim=int(metadata["head_dim"]), key_format="K8", value_format="V4")
    tokens = arrays["token_ids"].tolist()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    config = f"server:\n  tcp_security: insecure\nkvstore:\n  bulk_address: {address}\n"
    rows = []
    with certkv.embedded(config) as server, certkv.Client(spec, server.target) as client:
        client.put_sequence(tokens, [(arrays[f"layers.{layer}.key"],
                                      arrays[f"layers.{layer}.value"]) for layer in layers])
        peer = Peer(address, spec)
        for part, number in PARTS.items():
            blocks = [peer.block(key, number) for key in client.block_keys(tokens)]
            for compress in (zstd, lz4):
                rows.append(measure(blocks, compress, f"{part}/{compress.__name__}"))
    report = {"version": certkv.__version__, "trace": TRACE.name, "block_count": len(blocks),
              "rows": rows}
    print(json.dumps(report, indent=2))
    if len(sys.argv) == 2:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
