"""CertKVStorage through SGLang's factory, between its host pools and its controller's functions.

The hierarchical cache as a whole needs a GPU: SGLang moves pages between device and host with
kernels that it has for GPUs alone.
"""

import dataclasses
import json
import sys
import threading
import types

import certkv
import pytest
import torch
from certkv import sglang as plugin
from conftest import ROOT
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

sys.path.insert(0, str(ROOT / "tests" / "python"))

from restartable_store import RestartableStore, wait_until  # noqa: E402

PAGE, LAYERS, HEADS, CHANNELS = 64, 4, 3, 64
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def make_pool(layout="layer_first", dtype=torch.bfloat16, page=PAGE, pages=8):
    device = MHATokenToKVPool(
        page * 2, page, dtype, HEADS, CHANNELS, LAYERS, "cpu", enable_memory_saver=False
    )
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=page,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=page * 2,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=page * pages,
    )


def make_storage(pool, target, model="smol@1", ranks=(0, 1), extra=None, **changes):
    config = HiCacheStorageConfig(
        tp_rank=ranks[0],
        tp_size=ranks[1],
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout == "page_first",
        model_name="served",
        extra_config={
            "backend_name": "certkv",
            "module_path": "certkv.sglang",
            "class_name": "CertKVStorage",
            "certkv": {"target": target, "model_name": model, "rpc_timeout_ms": 500},
            **(extra or {}),
        },
    )
    config = dataclasses.replace(config, **changes)
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


class Controller:
    """SGLang's own way of moving pages between a host pool and a storage."""

    def __init__(self, pool, storage):
        self._self = types.SimpleNamespace(
            storage_host_pool=pool, storage_backend=storage, page_size=pool.page_size
        )
        self._pool = pool

    def _indices(self, pages):
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    def save(self, hashes, pages):
        return HiCacheController._generic_page_set(self._self, hashes, self._indices(pages))

    def load(self, hashes, pages):
        """Pages that came."""
        operation = types.SimpleNamespace(request_id="r", is_terminated=lambda: False)
        indices = self._indices(pages)
        return HiCacheController._generic_page_get(self._self, operation, hashes, indices)

    def page(self, page):
        return self._pool.get_data_page(page * PAGE).view(torch.int16)


def fill(pool, seed):
    torch.manual_seed(seed)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(pool.dtype))


def hashes(name, count):
    return [f"{name}{index}".encode().hex().ljust(64, "0") for index in range(count)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_outlive_the_engine_bit_by_bit(server, layout):
    first, second = make_pool(layout), make_pool(layout)
    fill(first, 1)
    first.kv_buffer.view(-1)[:2] = torch.tensor([3e38, -0.0])  # more than float16 or K8 can hold
    names = hashes(f"outlive-{layout}", 3)
    storage = make_storage(first, server.target)
    assert storage.batch_exists(names) == 0
    assert Controller(first, storage).save(names, [0, 1, 2])
    storage.close()

    storage = make_storage(second, server.target)
    assert storage.batch_exists(names + hashes("absent", 1)) == 3
    assert storage.batch_exists(hashes("absent", 1) + names) == 0, "of a prefix alone"
    # To other places of the pool.
    assert Controller(second, storage).load(names, [5, 6, 2]) == 3
    for page, place in ((0, 5), (1, 6), (2, 2)):
        assert torch.equal(Controller(first, None).page(page), Controller(second, None).page(place))
    assert not torch.equal(Controller(first, None).page(3), Controller(second, None).page(3))
    storage.close()


def test_a_load_ends_at_the_first_page_that_is_missing(server):
    pool = make_pool()
    fill(pool, 2)
    storage = make_storage(pool, server.target)
    names = hashes("hole", 4)
    control = Controller(pool, storage)
    assert control.save(names[:1], [0]) and control.save(names[2:], [2, 3])
    assert storage.batch_exists(names) == 1
    assert control.load(names, [4, 5, 6, 7]) == 1
    assert storage.exists(names[2]) and not storage.exists(names[1])
    storage.close()


@pytest.mark.parametrize(
    "other",
    [
        {"pool": {"layout": "page_first"}},
        {"pool": {"dtype": torch.float16}},
        {"model": "smol@2"},
        {"ranks": (1, 2)},
        {"ranks": (0, 2)},
    ],
)
def test_pages_of_another_model_layout_or_rank_are_others(server, other):
    pool = make_pool()
    fill(pool, 3)
    names = hashes(f"other-{sorted(other.items())}", 1)
    storage = make_storage(pool, server.target)
    assert Controller(pool, storage).save(names, [0])
    apart = make_storage(make_pool(**other.pop("pool", {})), server.target, **other)
    assert storage.exists(names[0]) and not apart.exists(names[0])
    storage.close(), apart.close()


def test_a_model_is_named_by_its_weights(server, tmp_path):
    pool = make_pool()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights of one")
    one = make_storage(pool, server.target, model="", model_name=str(folder))
    spec = one.spec_of(pool)
    assert spec == make_storage(pool, server.target, model="", model_name=str(folder)).spec_of(pool)
    (folder / "model.safetensors").write_bytes(b"weights of two")
    two = make_storage(pool, server.target, model="", model_name=str(folder))
    assert two.spec_of(pool) != spec
    with pytest.raises(certkv.InvalidArgumentError, match="set model_name in hicache"):
        make_storage(pool, server.target, model="", model_name="org/model")


def test_numbers_that_are_none_fail_a_save_and_the_next_goes_on(server):
    pool = make_pool()
    fill(pool, 4)
    pool.kv_buffer[0, 1, 3] = float("nan")
    storage = make_storage(pool, server.target)
    names = hashes("nan", 2)
    assert not Controller(pool, storage).save(names[:1], [0])
    assert Controller(pool, storage).save(names[1:], [1])
    assert [storage.exists(name) for name in names] == [False, True]
    storage.close()


def test_threads_save_and_load_at_once(server):
    pool = make_pool(pages=16)
    fill(pool, 5)
    storage = make_storage(pool, server.target)
    control, came = Controller(pool, storage), []

    def work(thread):
        for turn in range(8):
            name = hashes(f"threads-{thread}-{turn}", 1)
            assert control.save(name, [thread])
            came.append(control.load(name, [8 + thread]) == 1)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [True] * 32
    for thread in range(4):
        assert torch.equal(control.page(thread), control.page(8 + thread))
    storage.close()


def test_a_store_that_dies_is_a_miss_until_it_is_back(tmp_path):
    pool = make_pool()
    fill(pool, 6)
    names = hashes("dies", 1)
    with RestartableStore(tmp_path) as store:
        store.kill()  # not there at start: SGLang starts, and computes
        storage = make_storage(pool, store.target)
        control = Controller(pool, storage)
        assert storage.batch_exists(names) == 0 and not control.save(names, [0])
        store.start()
        assert wait_until(lambda: control.save(names, [0]), 20)
        store.kill()
        assert control.load(names, [1]) == 0 and storage.batch_exists(names) == 0
        assert not control.save(names, [0])
        store.start()
        assert wait_until(lambda: control.save(names, [0]), 20)
        assert control.load(names, [1]) == 1
        assert torch.equal(control.page(0), control.page(1))
        storage.close()


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"pp_size": 2}, "pipeline parallelism is 2"),
        ({"attn_cp_size": 2}, "context parallelism is 2"),
        ({"is_mla_model": True}, "MLA is True"),
        ({"should_split_heads": True}, "page_head is True"),
        ({"extra": {"interface_v1": 1}}, "interface_v1 is True"),
        ({"extra": {"certkv": {"taget": "x"}}}, "has 'taget'; known are target"),
        ({"extra": {"certkv": {"rpc_timeout_ms": "1"}}}, "must be a int"),
    ],
)
def test_what_was_not_tested_is_refused_by_name(server, changes, match):
    with pytest.raises(certkv.InvalidArgumentError, match=match) as raised:
        make_storage(make_pool(), server.target, **changes)
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


def test_pools_that_are_not_stored_are_refused(server):
    for pool, match in (
        (make_pool(dtype=torch.float8_e4m3fn), "hold (uint8|float8)"),
        (make_pool(page=1), "choose another --page-size"),
    ):
        with pytest.raises(certkv.InvalidArgumentError, match=match):
            make_storage(pool, server.target)
    storage = make_storage(make_pool(), server.target)
    storage.register_mem_host_pool_v2(make_pool(), PoolName.KV)
    with pytest.raises(certkv.InvalidArgumentError, match="pool 'mamba' beside"):
        storage.register_mem_host_pool_v2(make_pool(), PoolName.MAMBA)


def test_another_version_is_refused(server, monkeypatch):
    monkeypatch.setattr(plugin.sglang, "__version__", "0.5.24")
    with pytest.raises(certkv.InvalidArgumentError, match="sglang is 0.5.24, tested is 0.5.23"):
        make_storage(make_pool(), server.target)
    monkeypatch.setenv("CERTKV_ANY_VERSION", "1")
    make_storage(make_pool(), server.target).close()


def test_the_page_says_what_to_set():
    """The JSON of the documentation is what the factory takes."""
    page = (ROOT / "docs" / "engines" / "sglang.md").read_text()
    text = page.split("--hicache-storage-backend-extra-config '", 1)[1].split("'", 1)[0]
    options = json.loads(text)
    assert options["class_name"] == plugin.CertKVStorage.__name__
    assert set(options["certkv"]) <= {f.name for f in dataclasses.fields(plugin.StorageOptions)}
