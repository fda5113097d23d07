"""BlockLoader and BlockSaver: blocks between the store and an engine's cache, beside the engine."""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from typing import Any, Optional

import numpy as np

from certkv import _errors
from certkv._block_chain import block_elements
from certkv._job_thread import JobThread
from certkv._kv_layout import BlockLayout
from certkv._paged_cache import PagedCache
from certkv._spec import CacheSpec
from certkv._store_link import StoreLink


@dataclasses.dataclass
class LoadJob:
    """Engine blocks to fill from the store.

    Attributes:
        request_id: of the engine.
        keys: of each rank, the chain's keys up to the last block that is needed.
        first: engine block of the sequence that block_ids[0] is.
        block_ids: the engine's, one after the other in the sequence.
    """

    request_id: str
    keys: list[list[bytes]]
    first: int
    block_ids: list[int]


@dataclasses.dataclass
class SaveJob:
    """Store blocks to write from the engine's cache.

    Attributes:
        keys: of each rank, the chain's keys up to the last block that is saved.
        first: store block of the sequence that the first of block_ids begin.
        block_ids: the engine's, all of each store block.
    """

    keys: list[list[bytes]]
    first: int
    block_ids: list[int]


class EngineBlocks:
    """An engine's cache as arrays of blocks, and their order.

    Args:
        layers: for each layer, a view of the engine's memory: [blocks, KV heads, (keys, values),
            block tokens * channels] uint16.
        layout: of one block.
        per_store_block: engine blocks of a store block.
    """

    def __init__(
        self, layers: list[np.ndarray], layout: BlockLayout, per_store_block: int
    ) -> None:
        self.layers, self.layout, self.per_store_block = layers, layout, per_store_block
        kv_heads, _, elements = layers[0].shape[1:]
        self.row_shape = (len(layers), kv_heads, 2, per_store_block, elements)
        self.row_bytes = 2 * int(np.prod(self.row_shape))

    def copy_out(self, block_ids: list[int]) -> np.ndarray:
        """The bits of blocks in the engine's order: [blocks, layers, heads, 2, elements]."""
        _, heads, _, _, elements = self.row_shape
        out = np.empty((len(block_ids), len(self.layers), heads, 2, elements), np.uint16)
        for index, layer in enumerate(self.layers):
            for place, block_id in enumerate(block_ids):
                out[place, index] = layer[block_id]
        return out

    def paged(self, spec: CacheSpec, copies: Optional[np.ndarray] = None) -> PagedCache:
        """The engine's cache, or what copy_out() gave, whose pages are then its rows.

        Raises:
            InvalidArgumentError: [ENGINE_UNSUPPORTED], the layout is no order that it takes.
        """
        return PagedCache.from_tensors(
            spec,
            "BHKE" if copies is None else "BLHKE",
            self.layers if copies is None else [copies],
            key_order=self.layout.key_order,
            value_order=self.layout.value_order,
        )

    def write_row(self, row: np.ndarray, block_ids: dict[int, int]) -> None:
        """Writes parts of a store block into the engine's cache.

        Args:
            row: [1, elements].
            block_ids: the engine's block of each part that is wanted.
        """
        shaped = row.reshape(self.row_shape)
        for part, block_id in block_ids.items():
            for index, layer in enumerate(self.layers):
                self.layout.unpack(shaped[index, :, :, part], layer[block_id])


class Counters:
    """Counts by name, taken and set to zero together. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self.total: collections.Counter[str] = collections.Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count
            self.total[name] += count

    def take(self) -> dict[str, int]:
        """Counts since the last call, without zeros."""
        with self._lock:
            taken, self._counts = self._counts, collections.Counter()
        return {name: count for name, count in taken.items() if count}


class BlockLoader:
    """Fills engine blocks from the store, on a thread of its own.

    A block is in the engine's cache as it was put, or its id is among the failed ones: nothing in
    between. A load never waits longer than the client's deadlines.

    Args:
        link, blocks, counters: shared with the others.
        rank: of this worker, which of a job's keys are its own.
        quantized: load what the quantized planes decode to, in place of the originals.
        log: gets one line for each job that failed.
    """

    def __init__(
        self,
        link: StoreLink,
        blocks: EngineBlocks,
        counters: Counters,
        log: logging.Logger,
        rank: int = 0,
        quantized: bool = False,
    ) -> None:
        self._link, self._blocks, self._counters, self._log = link, blocks, counters, log
        self._rank, self._quantized = rank, quantized
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._row = np.empty((1, block_elements(link.spec)), np.uint16)
        self._thread = JobThread("certkv-load", self._load)

    def start(self, job: LoadJob) -> None:
        self._thread.put(job)

    def take_finished(self) -> set[str]:
        """Ids of requests whose load has ended since the last call, well or not."""
        with self._lock:
            finished, self._finished = self._finished, set()
        return finished

    def take_failed(self) -> set[int]:
        """Ids of engine blocks that hold nothing of use. Ask after take_finished()."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        self._thread.close()

    def _load(self, job: LoadJob) -> None:
        loaded, why = 0, "the store is away"
        try:
            client = self._link.client()
            if client is not None:
                loaded, why = self._fill(client, job)
        except Exception as error:  # a block that isn't loaded is computed, whatever happened
            why = f"{type(error).__name__}: {error}"
        failed = job.block_ids[loaded:]
        self._counters.add("loaded_blocks", loaded)
        self._counters.add("failed_blocks", len(failed))
        if failed:
            self._log.warning(
                "CertKV: %d of %d blocks of request %s were not loaded and are computed: %s",
                len(failed),
                len(job.block_ids),
                job.request_id,
                why,
            )
        with self._lock:
            self._failed.update(failed)
            self._finished.add(job.request_id)

    def _fill(self, client: Any, job: LoadJob) -> tuple[int, str]:
        """Engine blocks that were loaded, and why not more."""
        per_row = self._blocks.per_store_block
        loaded = 0
        try:
            chain = client.lookup_blocks(job.keys[self._rank])
        except _errors.Error as error:
            self._link.report(client, error)
            return 0, str(error)
        try:
            while loaded < len(job.block_ids):
                block, part = divmod(job.first + loaded, per_row)
                if block >= chain.block_count:
                    return loaded, f"the store has {chain.block_count} blocks of it now"
                chain.copy(block, self._row, self._quantized)
                wanted = job.block_ids[loaded : loaded + per_row - part]
                self._blocks.write_row(self._row, dict(enumerate(wanted, part)))
                loaded += len(wanted)
        except _errors.Error as error:
            self._link.report(client, error)
            return loaded, str(error)
        finally:
            self._link.discard(chain)
        return loaded, ""


class BlockSaver:
    """Writes engine blocks into the store, on a thread of its own, from copies.

    save() copies and returns; what is copied and not yet stored is at most `queue_bytes`, beyond
    which blocks are dropped: a save that isn't made is a prefix that is computed once more.

    Args:
        link, blocks, counters, rank, log: as of BlockLoader.
        queue_bytes: the limit.
    """

    def __init__(
        self,
        link: StoreLink,
        blocks: EngineBlocks,
        counters: Counters,
        log: logging.Logger,
        rank: int = 0,
        queue_bytes: int = 256 << 20,
    ) -> None:
        self._link, self._blocks, self._counters, self._log = link, blocks, counters, log
        self._rank, self._queue_bytes = rank, queue_bytes
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._told: set[str] = set()
        self._thread = JobThread("certkv-save", self._save)

    def save(self, job: SaveJob) -> None:
        """Copies the job's blocks; the engine may reuse them when this returns."""
        per_row, row_bytes = self._blocks.per_store_block, self._blocks.row_bytes
        wanted = len(job.block_ids) // per_row
        if self._link.client() is None:
            self._counters.add("dropped_blocks", wanted)
            return
        with self._lock:
            taken = min(wanted, (self._queue_bytes - self._queued_bytes) // row_bytes)
            self._queued_bytes += taken * row_bytes
        if taken < wanted:
            self._drop(wanted - taken, "queue full", f"{self._queue_bytes} bytes wait to be saved")
        if taken > 0:
            copies = self._blocks.copy_out(job.block_ids[: taken * per_row])
            keys = job.keys[self._rank][: job.first + taken]
            self._thread.put((keys, job.first, copies))

    def wait(self, seconds: float) -> bool:
        """Until all is stored or dropped, at most `seconds`; whether that is so."""
        return self._thread.wait(seconds)

    def close(self) -> None:
        self._thread.close()

    def _save(self, item: tuple[list[bytes], int, np.ndarray]) -> None:
        keys, first, copies = item
        done = first
        try:
            client = self._link.client()
            if client is None:
                self._counters.add("dropped_blocks", len(keys) - done)
                return
            done = self._append(client, keys, first, copies)
        except Exception as error:  # saves are best effort, and the thread has others to make
            self._drop(len(keys) - done, type(error).__name__, str(error))
        finally:
            with self._lock:
                self._queued_bytes -= copies.nbytes

    def _append(
        self, client: Any, keys: list[bytes], first: int, copies: np.ndarray
    ) -> int:
        """The block after the last that is in the store or was given up."""
        per_row = self._blocks.per_store_block
        cache = self._blocks.paged(self._link.spec, copies)
        # The copies are of the sequence's blocks from `first` on; what is before isn't read.
        pages = np.arange(-first * per_row, len(copies), dtype=np.int32)
        done, chain = first, None
        try:
            chain = client.lookup_blocks(keys)
            if chain.block_count < first:
                self._drop(len(keys) - first, "chain hole", "the store lost what comes before them")
                return len(keys)
            done = chain.block_count
            self._counters.add("shared_blocks", done - first)
            while done < len(keys):
                chain.append_paged(keys[done : done + 1], cache, pages)
                self._counters.add("saved_blocks")
                done += 1
        except _errors.InvalidArgumentError as error:
            self._counters.add("refused_blocks")
            self._tell(error.reason, 1, str(error))
            self._drop(len(keys) - done - 1, error.reason, "a block before them was refused")
            done = len(keys)
        except _errors.Error as error:
            self._link.report(client, error)
            self._drop(len(keys) - done, error.reason or error.code, str(error))
            done = len(keys)
        finally:
            if chain is not None:
                self._link.discard(chain)
        return done

    def _drop(self, count: int, reason: str, why: str) -> None:
        if count > 0:
            self._counters.add("dropped_blocks", count)
            self._tell(reason, count, why)

    def _tell(self, reason: str, count: int, why: str) -> None:
        """One line for each reason; the counters have the rest."""
        if reason not in self._told:
            self._told.add(reason)
            self._log.warning(
                "CertKV: %d blocks were not saved [%s], later ones are only counted: %s",
                count,
                reason,
                why,
            )
