"""LMCache: an L2 adapter of its multi-process server that keeps objects in the store.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "certkv.lmcache",
        "class_name": "CertKVL2", "adapter_params": {"target": "unix:/run/certkv/certkvd.sock"}}'

Objects outlive the server and are shared by all servers on one store. An object is LMCache's own
arrangement of keys and values, so it is kept bit by bit and not quantized; every load compares its
checksums. Objects without a 16-bit dtype, or whose size fits no block, are refused by name, and
what can't be stored or loaded is a miss.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import math
import platform
import threading
from typing import Any, Callable, Optional

import numpy as np
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from certkv import _engine, _errors
from certkv._block_chain import BlockChain
from certkv._job_thread import JobThread
from certkv._engine import read_options, unsupported
from certkv._objects import find_object, object_keys, object_spec
from certkv._spec import CacheSpec
from certkv._store_link import StoreLink

TESTED_VERSIONS = "0.5"
"""Versions of LMCache that this was tested with: 0.5.x. CERTKV_ANY_VERSION=1 tries others."""

_log = init_logger("lmcache.certkv")


@dataclasses.dataclass(frozen=True)
class L2Options:
    """What adapter_params may hold.

    Attributes:
        target: of the store, as for certkv.Client; "" = certkvd's default socket.
        rpc_timeout_ms: the longest that one question to the store may take.
        client: other options of certkv.Client: tenant, ca_file, token_file, ...
    """

    target: str = ""
    rpc_timeout_ms: int = 10_000
    client: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_version() -> None:
    _engine.check_version("lmcache", importlib.metadata.version("lmcache"), TESTED_VERSIONS)


def spec_of(shapes: list[torch.Size], dtypes: list[torch.dtype]) -> CacheSpec:
    """The cache of objects of this layout, made by this version of LMCache on such a machine.

    Both may arrange the same keys and values differently: vLLM orders a block's keys by whether
    the processor has AMX, and LMCache keeps its order.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED].
    """
    if len(set(dtypes)) != 1:
        raise unsupported(f"objects hold {', '.join(map(str, dtypes))}; only one dtype is stored")
    return object_spec(
        f"lmcache {importlib.metadata.version('lmcache')} {platform.machine()} "
        f"amx={torch.cpu._is_amx_tile_supported()} shapes={[tuple(shape) for shape in shapes]}",
        sum(math.prod(shape) for shape in shapes),
        str(dtypes[0]).removeprefix("torch."),
        "choose another chunk size",
    )


def name_of(key: ObjectKey) -> bytes:
    """All that tells an object from others, as a block's extra keys."""
    return json.dumps(
        [
            key.chunk_hash.hex(),
            key.model_name,
            key.kv_rank,
            key.object_group_id,
            key.cache_salt,
        ]
    ).encode()


class _Results:
    """Results of tasks by id, and the notifier that says that there are some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: dict[int, Any] = {}
        self.notifier = create_event_notifier()

    def put(self, task: int, result: Any) -> None:
        with self._lock:
            self._results[task] = result
        self.notifier.notify()

    def pop(self, task: int) -> Optional[Any]:
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results


class CertKVL2(L2AdapterInterface):
    """LMCache makes one from adapter_params. Its methods say what LMCache's interface says."""

    def __init__(self, config: dict[str, Any], **_: Any) -> None:
        super().__init__()
        check_version()
        self._options = read_options(L2Options, config, "adapter_params")
        self._stores, self._lookups, self._loads = _Results(), _Results(), _Results()
        self._lock = threading.Lock()
        self._next_task = 0
        self._links_lock = threading.Lock()  # held while a link connects
        self._links: dict[bytes, StoreLink] = {}  # by the spec's digest
        # By name_of, one for each lock; of the reader's thread alone.
        self._locked: dict[bytes, list[tuple[StoreLink, BlockChain]]]
        self._locked = collections.defaultdict(list)
        self._told: set[str] = set()
        # Saves don't wait for lookups, nor those for saves.
        self._writer = JobThread("certkv-l2-write", self._run)
        self._reader = JobThread("certkv-l2-read", self._run)

    def get_store_event_fd(self) -> int:
        return self._stores.notifier.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.notifier.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.notifier.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        failed = L2StoreResult(False, 0)
        return self._submit(self._writer, self._stores, failed, lambda: self._store(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._submit(
            self._reader,
            self._lookups,
            Bitmap(len(keys)),
            lambda: self._look_up(keys, group_layout_descs),
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Optional[Bitmap]:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._reader.put(lambda: self._unlock(keys))

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._submit(
            self._reader, self._loads, Bitmap(len(keys)), lambda: self._load(keys, objects)
        )

    def query_load_result(self, task_id: int) -> Optional[Bitmap]:
        return self._loads.pop(task_id)

    def close(self) -> None:
        self._writer.wait(10.0)
        self._writer.close()
        self._reader.close()
        for link in self._links.values():
            link.close()
        for results in (self._stores, self._lookups, self._loads):
            results.notifier.close()

    def report_status(self) -> dict[str, Any]:
        links = list(self._links.values())
        return {
            "is_healthy": all(link.client() is not None for link in links),
            "layouts": [str(link.spec) for link in links],
        }

    def _submit(
        self, thread: JobThread, results: _Results, failed: Any, work: Callable[[], Any]
    ) -> int:
        """Has `thread` do the work; its result is `failed` when that raises."""
        with self._lock:
            task = self._next_task
            self._next_task += 1

        def run() -> None:
            result = failed
            try:
                result = work()
            finally:
                results.put(task, result)

        thread.put(run)
        return task

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # LMCache was told, or needs no answer; others have work here
            _log.exception("CertKV: a task of LMCache failed")

    def _link(self, shapes: list[torch.Size], dtypes: list[torch.dtype]) -> Optional[StoreLink]:
        """None for a layout that isn't stored; what is wrong is logged once."""
        try:
            spec = spec_of(list(shapes), list(dtypes))
            with self._links_lock:
                link = self._links.get(spec.digest)
                if link is None:
                    link = self._links[spec.digest] = StoreLink(
                        spec,
                        self._options.target,
                        {
                            "rpc_timeout_ms": self._options.rpc_timeout_ms,
                            "worker_name": "lmcache",
                            **self._options.client,
                        },
                        _log,
                    )
                return link
        except _errors.Error as error:
            self._tell(error)
            return None

    def _tell(self, error: _errors.Error) -> None:
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.warning("CertKV: %s", error)

    def _find(self, link: StoreLink, key: ObjectKey) -> tuple[list[bytes], Optional[BlockChain]]:
        """The block's key, and the chain of it, empty when the store hasn't got it."""
        client = link.client()
        if client is None:
            return [], None
        try:
            keys = object_keys(client, name_of(key))
            return keys, find_object(client, keys)
        except _errors.Error as error:
            if not link.report(client, error):
                self._tell(error)
            return [], None

    def _store(self, keys: list[ObjectKey], objects: list[Any]) -> L2StoreResult:
        stored = 0
        for key, thing in zip(keys, objects):
            link = self._link(thing.get_shapes(), thing.get_dtypes())
            block_keys, chain = ([], None) if link is None else self._find(link, key)
            if chain is None:
                return L2StoreResult(False, 0)
            try:
                if chain.block_count == 0:
                    size = thing.get_size()
                    chain.append(block_keys, _bits(thing)[None, : size // 2])
                    self._notify_keys_stored([key], [size])
                    stored += size
            except _errors.Error as error:
                self._tell(error)
                return L2StoreResult(False, 0)
            finally:
                link.discard(chain)
        return L2StoreResult(True, stored)

    def _look_up(self, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> Bitmap:
        found = Bitmap(len(keys))
        for index, key in enumerate(keys):
            layout = layouts.get(key.object_group_id)
            link = None if layout is None else self._link(layout.shapes, layout.dtypes)
            chain = None if link is None else self._find(link, key)[1]
            if chain is None:
                continue
            if chain.block_count:
                self._locked[name_of(key)].append((link, chain))
                found.set(index)
            else:
                link.discard(chain)
        return found

    def _unlock(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            locks = self._locked.get(name_of(key))
            if locks:
                link, chain = locks.pop()
                link.discard(chain)
            if not locks:
                self._locked.pop(name_of(key), None)

    def _load(self, keys: list[ObjectKey], objects: list[Any]) -> Bitmap:
        loaded = Bitmap(len(keys))
        for index, (key, thing) in enumerate(zip(keys, objects)):
            locks = self._locked.get(name_of(key))
            if not locks:
                continue
            try:
                locks[-1][1].copy(0, _bits(thing)[None, : thing.get_size() // 2])
            except _errors.Error as error:
                self._tell(error)
                continue
            loaded.set(index)
            self._notify_keys_accessed([key])
        return loaded


def _bits(thing: Any) -> np.ndarray:
    """A MemoryObj's memory."""
    return np.frombuffer(memoryview(thing.byte_array).cast("B"), np.uint16)
