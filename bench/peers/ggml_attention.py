#!/usr/bin/env python3
"""Decode attention of ggml (llama.cpp's kernels) against ours, on one core: ggml_attention.py OPTIONS.

ggml is taken from the wheel of pywhispercpp, which carries its shared libraries, and is called
through its own graph API: flash_attn_ext of one query token with G query heads on one KV head.
Its results are checked against numpy in double precision before anything is timed. Each read is of
another head of a working set far larger than the caches. certkv-bench-kernels runs before and
after, on the same shape, and the ratios are to the mean of its two runs.

`./dev bench peers` installs the wheels (requirements.txt) into build/peers and runs this.
"""
import argparse
import ctypes
import glob
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8  # enum ggml_type
TYPE_NAMES = {F16: "F16", Q4_0: "Q4_0", Q8_0: "Q8_0"}
ROW_BYTES = {F16: lambda d: 2 * d, Q4_0: lambda d: d // 32 * 18, Q8_0: lambda d: d // 32 * 34}
VARIANTS = ((F16, F16), (Q8_0, Q8_0), (Q8_0, Q4_0))
FEATURES = ("avx", "avx2", "fma", "f16c", "avx512", "avx512_vnni")
# Of the largest output: ggml sums 16-bit values in 16 bits, and rounds queries to 8 for 8-bit keys.
CHECK_LIMIT = 0.03
CONTEXT_BYTES = 1 << 20  # tensors' headers and graph of one head


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p),
                ("no_alloc", ctypes.c_bool)]


class Ggml:
    """The entry points used, with their types."""

    def __init__(self):
        folder = str(importlib.metadata.distribution("pywhispercpp").locate_file("pywhispercpp.libs"))
        libraries = [self._load(folder, name) for name in ("libgomp", "libggml-base", "libggml-cpu")]
        _, self.base, self.cpu = libraries
        pointer, i64, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._type(self.base, "ggml_init", pointer, InitParams)
        self._type(self.base, "ggml_new_tensor_4d", pointer, pointer, ctypes.c_int, i64, i64, i64, i64)
        self._type(self.base, "ggml_flash_attn_ext", pointer, pointer, pointer, pointer, pointer,
                   pointer, f32, f32, f32)
        self._type(self.base, "ggml_new_graph", pointer, pointer)
        self._type(self.base, "ggml_build_forward_expand", None, pointer, pointer)
        self._type(self.base, "ggml_get_data", pointer, pointer)
        self._type(self.base, "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer,
                   i64, i64, i64, pointer)
        self._type(self.base, "ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
        self._type(self.base, "ggml_version", ctypes.c_char_p)
        self._type(self.cpu, "ggml_backend_cpu_init", pointer)
        self._type(self.cpu, "ggml_backend_cpu_set_n_threads", None, pointer, ctypes.c_int)
        self.backend = self.cpu.ggml_backend_cpu_init()
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, 1)

    @staticmethod
    def _load(folder, name):
        found = glob.glob(os.path.join(folder, name + "-*"))
        found = [path for path in found if os.path.basename(path).count("-") == name.count("-") + 1]
        if len(found) != 1:
            sys.exit(f"{folder} holds {len(found)} libraries {name}, not 1; is this the pinned wheel?")
        return ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)

    @staticmethod
    def _type(library, name, result, *arguments):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments

    def features(self):
        return [name for name in FEATURES if getattr(self.cpu, "ggml_cpu_has_" + name)()]


class Head:
    """One KV head in ggml's memory, and the graph that reads it."""

    def __init__(self, ggml, key_type, value_type, keys, values, queries):
        tokens, dim = keys.shape
        group_size = queries.shape[0]
        size = CONTEXT_BYTES + tokens * (ROW_BYTES[key_type](dim) + ROW_BYTES[value_type](dim))
        self.ggml = ggml
        context = ggml.base.ggml_init(InitParams(size + 8 * queries.nbytes, None, False))
        if not context:
            sys.exit(f"ggml_init found no {size} bytes of memory")
        query = ggml.base.ggml_new_tensor_4d(context, F32, dim, 1, group_size, 1)
        ctypes.memmove(ggml.base.ggml_get_data(query), queries.ctypes.data, queries.nbytes)
        key = self._store(context, key_type, keys)
        value = self._store(context, value_type, values)
        result = ggml.base.ggml_flash_attn_ext(context, query, key, value, None,
                                               1 / math.sqrt(dim), 0.0, 0.0)
        self.graph = ggml.base.ggml_new_graph(context)
        ggml.base.ggml_build_forward_expand(self.graph, result)
        self.result_data = ggml.base.ggml_get_data(result)
        self.key_data, self.value_data = (ggml.base.ggml_get_data(t) for t in (key, value))
        self.result_shape = (group_size, dim)

    def _store(self, context, kind, rows):
        tokens, dim = rows.shape
        tensor = self.ggml.base.ggml_new_tensor_4d(context, kind, dim, tokens, 1, 1)
        data = self.ggml.base.ggml_get_data(tensor)
        if kind == F16:
            half = rows.astype(np.float16)
            ctypes.memmove(data, half.ctypes.data, half.nbytes)
        else:
            self.ggml.base.ggml_quantize_chunk(kind, rows.ctypes.data, data, 0, tokens, dim, None)
        return tensor

    def read(self):
        """Returns the thread's nanoseconds."""
        begin = time.thread_time_ns()
        status = self.ggml.base.ggml_backend_graph_compute(self.ggml.backend, self.graph)
        spent = time.thread_time_ns() - begin
        if status != 0:
            sys.exit(f"ggml_backend_graph_compute failed with status {status}")
        return spent

    def result(self):
        flat = np.ctypeslib.as_array(
            ctypes.cast(self.result_data, ctypes.POINTER(ctypes.c_float)), (math.prod(self.result_shape),))
        return flat.reshape(self.result_shape).copy()


def decode_rows(data, kind, tokens, dim):
    """Rows as ggml stores them, in double precision."""
    raw = np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_uint8)),
                                (tokens * ROW_BYTES[kind](dim),))
    if kind == F16:
        return raw.view(np.float16).reshape(tokens, dim).astype(np.float64)
    blocks = raw.reshape(-1, ROW_BYTES[kind](32))
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    if kind == Q8_0:
        codes = blocks[:, 2:].view(np.int8).astype(np.float64)
    else:
        codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float64) - 8
    return (codes * scale).reshape(tokens, dim)


def attend_exactly(queries, keys, values):
    logits = queries.astype(np.float64) @ keys.T / math.sqrt(keys.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights @ values / weights.sum(axis=1, keepdims=True)


def make_numbers(tokens, dim, group_size, seed):
    """Keys with channels of different centres and spreads, as after RoPE; logits a few nats apart."""
    random = np.random.default_rng(seed)
    keys = random.normal(size=(tokens, dim)) * random.uniform(0.3, 2, dim) + random.normal(size=dim)
    values = random.normal(size=(tokens, dim))
    queries = random.normal(size=(group_size, dim)) * 1.5
    return (np.ascontiguousarray(array, dtype=np.float32) for array in (keys, values, queries))


def check(ggml, dim):
    """Every variant against numpy, on what it stores."""
    keys, values, queries = make_numbers(1000, dim, 4, seed=7)
    for key_type, value_type in VARIANTS:
        head = Head(ggml, key_type, value_type, keys, values, queries)
        head.read()
        exact = attend_exactly(queries, decode_rows(head.key_data, key_type, 1000, dim),
                               decode_rows(head.value_data, value_type, 1000, dim))
        error = np.abs(head.result() - exact).max() / np.abs(exact).max()
        print(f"{TYPE_NAMES[key_type]}/{TYPE_NAMES[value_type]}: differs from numpy by {error:.1e} "
              f"of the largest output (limit {CHECK_LIMIT})", file=sys.stderr)
        if not error < CHECK_LIMIT:
            sys.exit("ggml's result is wrong or called wrongly; nothing was timed")


def time_variants(ggml, tokens, dim, group_size, rounds, working_set):
    """Median thread nanoseconds per token of each variant; heads alternate between variants."""
    keys, values, queries = make_numbers(tokens, dim, group_size, seed=1)
    heads = []
    for key_type, value_type in VARIANTS:
        head_bytes = tokens * (ROW_BYTES[key_type](dim) + ROW_BYTES[value_type](dim))
        count = max(2, -(-working_set // head_bytes))
        heads.append([Head(ggml, key_type, value_type, keys, values, queries) for _ in range(count)])
    spent = [[] for _ in VARIANTS]
    for step in range(4 * (rounds + 1)):
        for variant, of_variant in enumerate(heads):
            nanoseconds = of_variant[step % len(of_variant)].read()
            if step >= 4:  # the first round warms up
                spent[variant].append(nanoseconds / tokens)
    return [statistics.median(times) for times in spent]


def run_ours(program, tokens, dim, group_sizes):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([program, f"--tokens={tokens}", f"--dims={dim}", "--steps=false",
                        "--progressive=false",
                        "--groups=" + ",".join(map(str, group_sizes)), f"--json={file.name}"],
                       check=True, stdout=sys.stderr)
        return json.load(open(file.name, encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ours", required=True, help="the program certkv-bench-kernels")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="file to write the results to")
    options = parser.parse_args()

    ggml = Ggml()
    check(ggml, options.dim)
    before = run_ours(options.ours, options.tokens, options.dim, options.groups)
    peers = {group: time_variants(ggml, options.tokens, options.dim, group, options.rounds,
                                  8 * before["last_level_cache_bytes"]) for group in options.groups}
    after = run_ours(options.ours, options.tokens, options.dim, options.groups)

    rows = []
    suffix = "" if options.dim == 128 else f"/d{options.dim}"
    suffix += "" if options.tokens == 32768 else f"/n{options.tokens}"
    for group in options.groups:
        ours = {}
        for name in ("F16", "K8V4", "K8V8"):
            found = [row for run in (before, after) for row in run["rows"]
                     if row["name"] == f"attend/{name}/G{group}{suffix}"]
            ours[name] = statistics.mean(row["ns_per_token"] for row in found)
            rows.append({"name": f"attend/{name}/G{group}{suffix}", "ns_per_token": ours[name],
                         "ns_per_token_of_runs": [row["ns_per_token"] for row in found],
                         "bytes_per_token": found[0]["bytes_per_token"]})
        for (key_type, value_type), nanoseconds in zip(VARIANTS, peers[group]):
            formats = f"{TYPE_NAMES[key_type]}-{TYPE_NAMES[value_type]}"
            row_bytes = ROW_BYTES[key_type](options.dim) + ROW_BYTES[value_type](options.dim)
            rows.append({"name": f"peer/ggml/{formats}/G{group}{suffix}",
                         "ns_per_token": nanoseconds, "bytes_per_token": row_bytes,
                         "ratio_of_k8v4_to_it": nanoseconds / ours["K8V4"]})
    report = {key: value for key, value in before.items() if key not in ("rows", "rounds")}
    report.update({"peer": f"ggml {ggml.base.ggml_version().decode()}, from the wheel pywhispercpp "
                           f"{importlib.metadata.version('pywhispercpp')}",
                   "peer_instruction_sets": ggml.features(), "rounds": options.rounds, "rows": rows})
    print(f"\n{'read':<32} {'B/token':>8} {'ns/token':>9} {'K8V4 is faster by':>18}")
    for row in rows:
        ratio = f"{row['ratio_of_k8v4_to_it']:.2f}" if "ratio_of_k8v4_to_it" in row else ""
        print(f"{row['name']:<32} {row['bytes_per_token']:>8.0f} {row['ns_per_token']:>9.1f} {ratio:>18}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, sort_keys=True)
            file.write("\n")


if __name__ == "__main__":
    main()
