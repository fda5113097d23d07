"""Time per MiB of saving blocks out of an engine's paged cache, three ways in one run.

    PYTHONPATH=build/release/python python3 bench/paged_save.py [--json FILE]

copied rows   vLLM's connector as it was: blocks are copied out on the engine's thread; a second
              thread takes each number to its place (numpy.take), and copies rows into the slot.
paged copies  as it is: the copy on the engine's thread is the same, and its numbers go from there to
              the slot at once (BlockChain.append_paged).
paged         straight from the engine's pages (Client.stage_blocks, BlockChain.append_staged).

"engine" is what the engine's thread does, "thread" what another does until blocks can be sealed, and
"put" is what the store takes to seal blocks from rows that are in order, which is in all of them.
Each is the best of several rounds of other blocks.
"""

import argparse
import json
import platform
import time

import certkv
import numpy as np
from certkv._block_io import EngineBlocks
from certkv._kv_layout import BlockLayout

LAYERS, HEADS, DIM, TOKENS = 30, 3, 64, 128  # SmolLM2-135M in vLLM's CPU build
PAGES, BLOCKS, ROUNDS = 64, 8, 7


def make_engine(spec, is_turned):
    """Keys channel by channel, as vLLM's CPU attention has them, or token by token."""
    places = np.arange(TOKENS * DIM)
    keys = places.reshape(DIM, TOKENS).T.reshape(-1) if is_turned else places
    random = np.random.default_rng(1)
    shape = (LAYERS, PAGES, HEADS, 2, TOKENS * DIM)
    numbers = random.standard_normal(shape, np.float32).astype(np.float16).view(np.uint16)
    return EngineBlocks(list(numbers), BlockLayout(keys, places, TOKENS), 1)


def pack(engine, copies):
    """What EngineBlocks.make_row was."""
    row = np.empty(engine.row_shape, np.uint16)
    for part, places in enumerate((engine.layout.key_places, engine.layout.value_places)):
        numbers = np.ascontiguousarray(copies[..., part, :])
        row[:, :, part, 0] = np.take(numbers, places, axis=-1, mode="clip")
    return row.reshape(1, -1)


class Clock:
    """Seconds by part of one round."""

    def __init__(self):
        self.parts = {}

    def time(self, part, call):
        begin = time.perf_counter()
        result = call()
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - begin
        return result


def save_copied_rows(client, engine, pages, keys, clock):
    copies = clock.time("engine", lambda: engine.copy_out(pages))
    rows = [clock.time("thread", lambda block=block: pack(engine, block)) for block in copies]
    with client.lookup_blocks(keys) as chain:
        for key, row in zip(keys, rows):
            clock.time("put", lambda: chain.append([key], row))


def save_paged_copies(client, engine, pages, keys, clock):
    copies = clock.time("engine", lambda: engine.copy_out(pages))
    cache = clock.time("thread", lambda: engine.paged(client.spec, copies))
    table = np.arange(len(pages), dtype=np.int32)
    with client.lookup_blocks(keys) as chain:
        for key in keys:
            clock.time("put", lambda: chain.append_paged([key], cache, table))


def save_paged(client, engine, pages, keys, clock):
    cache = engine.paged(client.spec)
    staged = clock.time("engine", lambda: client.stage_blocks(cache, pages, 0, len(pages)))
    with client.lookup_blocks(keys) as chain:
        clock.time("put", lambda: chain.append_staged(keys, staged))


WAYS = {"copied rows": save_copied_rows, "paged copies": save_paged_copies, "paged": save_paged}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    spec = certkv.CacheSpec.uniform(
        "paged-save", layer_count=LAYERS, kv_head_count=HEADS, group_size=3, head_dim=DIM,
        block_tokens=TOKENS,
    )
    results = {"machine": platform.processor() or platform.machine(), "ms_per_mib": {}}
    with certkv.embedded() as server, certkv.Client(spec, server.target) as client:
        mib = BLOCKS * 2 * certkv.block_elements(spec) / 2**20
        seed = 0
        for order, is_turned in (("keys by channel", True), ("keys by token", False)):
            engine = make_engine(spec, is_turned)
            rounds = {name: [] for name in WAYS}
            for index in range(ROUNDS):
                for name, way in WAYS.items():
                    seed += 1
                    ids = [seed * 10_000 + i for i in range(BLOCKS * TOKENS)]
                    pages = [int(p) for p in np.random.default_rng(seed).permutation(PAGES)[:BLOCKS]]
                    clock = Clock()
                    way(client, engine, pages, client.block_keys(ids), clock)
                    rounds[name].append(clock.parts)
            for name, parts in rounds.items():
                best = {p: min(r[p] for r in parts) * 1e3 / mib for p in parts[0]}
                best["all"] = min(sum(r.values()) for r in parts) * 1e3 / mib
                results["ms_per_mib"][f"{order}, {name}"] = {p: round(v, 3) for p, v in best.items()}
                shown = "  ".join(f"{p} {v:.3f}" for p, v in best.items())
                print(f"{order:16s} {name:13s} ms/MiB: {shown}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
