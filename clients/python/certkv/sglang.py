"""SGLang: a storage back end of its hierarchical cache (HiCache), which keeps pages in the store.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "certkv",
        "module_path": "certkv.sglang", "class_name": "CertKVStorage",
        "certkv": {"target": "unix:/run/certkv/certkvd.sock"}}'

Pages outlive the engine and are shared by all engines of the same model and page layout on one
store. They are SGLang's own arrangement of keys and values, so they are kept bit by bit and not
quantized; every load compares its checksums. What isn't known is refused by name when the engine
starts, and what can't be stored or loaded is a miss.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import threading
from typing import Any, Optional

import numpy as np
import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from certkv import _engine, _errors
from certkv._engine import read_options, unsupported, weights_fingerprint
from certkv._objects import find_object, object_keys, object_spec
from certkv._spec import CacheSpec
from certkv._store_link import StoreLink

TESTED_VERSIONS = "0.5.23"
"""The version of SGLang that this was tested with. CERTKV_ANY_VERSION=1 tries others."""

_log = logging.getLogger("sglang.certkv")
_OPTIONS = "hicache_storage_backend_extra_config.certkv"
_KV_POOL = "kv"


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """What "certkv" in the extra config may hold.

    Attributes:
        target: of the store, as for certkv.Client; "" = certkvd's default socket.
        model_name: under which pages are shared; "" = a fingerprint of config and weights, of a
            model that is a local folder.
        rpc_timeout_ms: the longest that one question to the store may take.
        client: other options of certkv.Client: tenant, ca_file, token_file, ...
    """

    target: str = ""
    model_name: str = ""
    rpc_timeout_ms: int = 10_000
    client: dict[str, Any] = dataclasses.field(default_factory=dict)


def _name_of_model(options: StorageOptions, config: HiCacheStorageConfig) -> str:
    if options.model_name:
        return options.model_name
    path = pathlib.Path(config.model_name or "") / "config.json"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return weights_fingerprint(config.model_name or "", text, f"model_name in {_OPTIONS}")


def _check_config(config: HiCacheStorageConfig) -> None:
    """Refuses arrangements of pages that were not tested."""
    for what, given, plain in (
        ("pipeline parallelism", config.pp_size, 1),
        ("context parallelism", config.attn_cp_size, 1),
        ("decode context parallelism", config.dcp_size, 1),
        ("MLA", config.is_mla_model, False),
        ("tp_lcm_size with layout page_head", config.should_split_heads, False),
        ("interface_v1", bool((config.extra_config or {}).get("interface_v1")), False),
    ):
        if given != plain:
            raise unsupported(f"{what} is {given}, must be {plain}")


class CertKVStorage(HiCacheStorage):
    """SGLang makes one for each rank. Its methods say what HiCacheStorage says.

    Calls are safe from several threads.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED].
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Optional[dict[str, Any]] = None
    ) -> None:
        _engine.check_version("sglang", sglang.__version__, TESTED_VERSIONS)
        _check_config(storage_config)
        given = (storage_config.extra_config or {}).get("certkv", {})
        self._options = read_options(StorageOptions, given, _OPTIONS)
        self._config = storage_config
        self._model = _name_of_model(self._options, storage_config)
        self._link: Optional[StoreLink] = None
        self._elements = 0
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def spec_of(self, pool: Any) -> CacheSpec:
        """The cache of a host pool's pages."""
        page = pool.get_dummy_flat_data_page()
        name = (
            f"sglang {self._model} {pool.layout} page={pool.page_size} layers={pool.layer_num} "
            f"heads={pool.head_num} channels={pool.head_dim} {pool.storage_format_tag or ''} "
            f"rank={self._config.tp_rank}/{self._config.tp_size}"
        )
        dtype = str(page.dtype).removeprefix("torch.")
        return object_spec(name, page.numel(), dtype, "choose another --page-size")

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        spec = self.spec_of(mem_pool_host)
        self._elements = mem_pool_host.get_dummy_flat_data_page().numel()
        options = {
            "rpc_timeout_ms": self._options.rpc_timeout_ms,
            "worker_name": "sglang",
            **self._options.client,
        }
        self._link = StoreLink(spec, self._options.target, options, _log)
        _log.info("CertKV: pages are kept as %s", spec)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if str(host_pool_name) != _KV_POOL:
            raise unsupported(
                f"the model has a pool '{host_pool_name}' beside keys and values, as for sliding "
                "windows, state spaces or draft models; use another storage back end for it"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        for index, key in enumerate(keys):
            if not self._use(key, lambda chain, _: chain.block_count > 0):
                return index
        return len(keys)

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> Optional[torch.Tensor]:
        bits = self._bits(target_location)

        def copy(chain: Any, _: Any) -> bool:
            if chain.block_count == 0:
                return False
            chain.copy(0, bits)
            return True

        return target_location if self._use(key, copy) else None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Optional[torch.Tensor]]:
        return [self.get(key, target) for key, target in zip(keys, target_locations)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        bits = self._bits(value)

        def append(chain: Any, keys: list[bytes]) -> bool:
            if chain.block_count == 0:
                chain.append(keys, bits)
            return True

        return self._use(key, append)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(self.set(key, value) for key, value in zip(keys, values))

    def clear(self) -> None:
        _log.info("CertKV: pages are shared, so they are not cleared; the store evicts by itself")

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _bits(self, page: torch.Tensor) -> np.ndarray:
        """[1, elements] of a flat page on the CPU, without a copy."""
        if page is None or page.numel() != self._elements or not page.is_contiguous():
            shape = None if page is None else tuple(page.shape)
            raise unsupported(f"a page is {shape}, must be flat, of {self._elements} numbers")
        return page.view(torch.int16).numpy().view(np.uint16).reshape(1, -1)

    def _use(self, key: str, work: Any) -> bool:
        """work(chain, keys) with the page's chain, leased meanwhile. False when anything fails."""
        link = self._link
        client = None if link is None else link.client()
        if client is None:
            return False
        chain = None
        try:
            keys = object_keys(client, key.encode())
            chain = find_object(client, keys)
            return work(chain, keys)
        except _errors.Error as error:
            if not link.report(client, error):
                self._tell(error)
            return False
        finally:
            if chain is not None:
                link.discard(chain)

    def _tell(self, error: _errors.Error) -> None:
        with self._lock:
            is_new = str(error) not in self._told
            self._told.add(str(error))
        if is_new:
            _log.warning("CertKV: %s", error)
