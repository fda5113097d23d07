"""CertKVL2 in LMCache's storage manager and by its interface; with vLLM, see --all."""

import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time

import certkv
import numpy as np
import pytest
import torch
from certkv import lmcache as plugin
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    get_l2_adapter_config_class,
)
from lmcache.v1.distributed.storage_manager import StorageManager
from vllm_test import BLOCK, ROOT, Engine, RestartableStore, wait_until

SHAPE = torch.Size([2, 4, 256, 192])  # keys and values, layers, tokens, KV heads * channels
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])


def make_keys(name, count, **others):
    return [ObjectKey(f"{name}-{i}".encode().ljust(32), "smol", 0, **others) for i in range(count)]


def make_manager(target):
    config = get_l2_adapter_config_class("plugin").from_dict(
        {
            "type": "plugin",
            "module_path": "certkv.lmcache",
            "class_name": "CertKVL2",
            "adapter_params": {"target": target, "rpc_timeout_ms": 500},
        }
    )
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(L1MemoryManagerConfig(64 << 20, False)),
            EvictionConfig("LRU"),
            L2AdaptersConfig([config]),
        )
    )


def prefetch(manager, keys):
    """Objects of level 2 that came."""
    group = GroupedObjectKeys(object_group_id=0, keys=keys, layout_desc=LAYOUT)
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([group]))
    found = []

    def ended():
        found.append(manager.query_prefetch_status(handle))
        return found[-1] is not None

    assert wait_until(ended, 30)
    return found[-1].l2_hit_count


def test_objects_outlive_the_server_bit_by_bit(server):
    keys = make_keys("outlive", 3)
    torch.manual_seed(1)
    truth = [torch.randn(SHAPE).to(torch.bfloat16) for _ in keys]
    truth[1][0, 0, 0, :2] = torch.tensor([3e38, -0.0])  # more than float16 or K8 can hold
    manager = make_manager(server.target)
    objects = manager.reserve_write(keys, LAYOUT)
    for key, tensor in zip(keys, truth):
        objects[key].tensor.copy_(tensor)
    manager.finish_write(keys)
    with certkv.Client(plugin.spec_of([SHAPE], [torch.bfloat16]), server.target) as client:
        names = [client.block_keys([0] * 64, [plugin.name_of(key)]) for key in keys]
        assert wait_until(lambda: all(client.lookup_blocks(n).block_count for n in names))
    manager.close()
    again = make_manager(server.target)
    assert prefetch(again, keys + make_keys("absent", 1)) == 3
    with again.read_prefetched_results(keys) as loaded:
        for thing, tensor in zip(loaded, truth):
            assert torch.equal(thing.tensor.view(torch.int16), tensor.view(torch.int16))
    again.finish_read_prefetched(keys)
    again.close()


class MadeObject:
    """What the adapter asks of a MemoryObj."""

    def __init__(self, tensor):
        self.tensor = tensor.contiguous()

    def get_shapes(self):
        return [self.tensor.shape]

    def get_dtypes(self):
        return [self.tensor.dtype]

    def get_size(self):
        return self.tensor.nbytes

    @property
    def byte_array(self):
        return memoryview(self.tensor.view(torch.int16).numpy()).cast("B")


class Adapter:
    """A CertKVL2 whose tasks are waited for by their event descriptors."""

    def __init__(self, target):
        self.l2 = plugin.CertKVL2({"target": target, "rpc_timeout_ms": 500})

    def store(self, keys, objects):
        task = self.l2.submit_store_task(keys, objects)
        self._wait(self.l2.get_store_event_fd())
        return self.l2.pop_completed_store_tasks()[task].is_successful()

    def look_up(self, keys, layout=LAYOUT):
        task = self.l2.submit_lookup_and_lock_task(keys, {0: layout})
        self._wait(self.l2.get_lookup_and_lock_event_fd())
        found = self.l2.query_lookup_and_lock_result(task)
        assert self.l2.query_lookup_and_lock_result(task) is None
        return found.get_indices_list()

    def load(self, keys, objects):
        task = self.l2.submit_load_task(keys, objects)
        self._wait(self.l2.get_load_event_fd())
        return self.l2.query_load_result(task).get_indices_list()

    @staticmethod
    def _wait(descriptor):
        assert select.select([descriptor], [], [], 30)[0]
        os.read(descriptor, 8)


@pytest.fixture()
def adapters(server):
    made = []

    def make(target=server.target):
        made.append(Adapter(target))
        return made[-1]

    yield make
    for adapter in made:
        adapter.l2.close()


def random_object(seed):
    torch.manual_seed(seed)
    return MadeObject(torch.randn(SHAPE).to(torch.bfloat16))


def test_each_part_of_a_key_tells_objects_apart(adapters):
    adapter = adapters()
    (key,) = make_keys("parts", 1)
    assert adapter.store([key], [random_object(2)])
    changes = dict(chunk_hash=b"y" * 32, model_name="other", kv_rank=1, cache_salt="tenant")
    others = [dataclasses.replace(key, **{name: value}) for name, value in changes.items()]
    assert adapter.look_up([*others, key]) == [len(others)]
    assert adapter.look_up([key], MemoryLayoutDesc([SHAPE], [torch.float16])) == []
    other_shape = torch.Size([2, 4, 192, 256])  # as many bytes, arranged otherwise
    assert adapter.look_up([key], MemoryLayoutDesc([other_shape], [torch.bfloat16])) == []


def test_locks_hold_until_they_are_unlocked(adapters):
    adapter = adapters()
    keys = make_keys("locks", 2)
    objects = [random_object(seed) for seed in (3, 4)]
    assert adapter.store(keys, objects)
    out = [random_object(seed) for seed in (5, 6)]
    assert adapter.load(keys, out) == []  # not locked
    assert adapter.look_up(keys) == [0, 1] and adapter.look_up(keys[:1]) == [0]
    adapter.l2.submit_unlock(keys)
    assert adapter.load(keys, out) == [0]  # locked twice
    assert torch.equal(out[0].tensor, objects[0].tensor)
    assert not torch.equal(out[1].tensor, objects[1].tensor)
    adapter.l2.submit_unlock(keys)
    assert adapter.load(keys, out) == []


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        (SHAPE, torch.float32, "only float16 or bfloat16"),
        (SHAPE, torch.uint8, "only float16 or bfloat16"),
        (torch.Size([2, 4, 10, 192]), torch.bfloat16, "choose another chunk size"),
        (torch.Size([257 * 2, 257, 64, 64]), torch.bfloat16, "choose another chunk size"),
    ],
)
def test_objects_that_are_refused_by_name(shape, dtype, message):
    with pytest.raises(certkv.InvalidArgumentError, match=message) as raised:
        plugin.spec_of([shape], [dtype])
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


def test_numbers_that_are_none_fail_a_store_and_the_next_goes_on(adapters):
    adapter = adapters()
    keys = make_keys("nan", 2)
    broken = random_object(7)
    broken.tensor[0, 0, 0, 0] = float("nan")
    assert not adapter.store(keys[:1], [broken])
    assert adapter.store(keys[1:], [random_object(8)])
    assert adapter.look_up(keys) == [1]


def test_a_store_that_dies_is_a_miss_until_it_is_back(adapters, tmp_path):
    with RestartableStore(tmp_path) as store:
        adapter = adapters(store.target)
        keys = make_keys("dies", 1)
        assert adapter.store(keys, [random_object(9)]) and adapter.look_up(keys) == [0]
        assert adapter.l2.report_status()["is_healthy"]
        store.kill()
        assert adapter.look_up(make_keys("other", 1)) == []
        assert not adapter.store(make_keys("other", 1), [random_object(10)])
        assert not adapter.l2.report_status()["is_healthy"]
        store.start()
        assert wait_until(lambda: adapter.l2.report_status()["is_healthy"], 20)
        assert adapter.look_up(keys) == []  # a new store, without a disk
        assert adapter.store(keys, [random_object(9)]) and adapter.look_up(keys) == [0]


def test_another_version_or_option_is_refused(monkeypatch):
    with pytest.raises(certkv.InvalidArgumentError, match="has 'taget'; known are target"):
        plugin.CertKVL2({"taget": "x"})
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(certkv.InvalidArgumentError, match="tested is 0.5.x") as raised:
        plugin.CertKVL2({})
    assert "CERTKV_ANY_VERSION=1" in raised.value.message
    monkeypatch.setenv("CERTKV_ANY_VERSION", "1")
    plugin.CertKVL2({}).close()


class Server:
    """An `lmcache server` process."""

    def __init__(self, folder, name, store, port):
        adapter = {
            "type": "plugin",
            "module_path": "certkv.lmcache",
            "class_name": "CertKVL2",
            "adapter_params": {"target": store.target},
        }
        options = {
            "host": "127.0.0.1",
            "port": port,
            "http-host": "127.0.0.1",
            "http-port": port + 1,
            "chunk-size": BLOCK,
            "l1-size-gb": 0.5,
            "eviction-policy": "LRU",
            "supported-transfer-mode": "auto",
            "l2-adapter": json.dumps(adapter),
        }
        program = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
        command = [sys.executable, "-c", program, "server", "--no-l1-use-lazy"]
        command += ["--disable-observability"]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        self._log = folder / f"{name}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}
            )
        started = wait_until(lambda: "cache server is running..." in self.log(), 120)
        assert started, self.log()[-3000:]

    def log(self):
        return self._log.read_text()

    def end(self):
        self._process.terminate()
        self._process.wait(60)


ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "build/release/python"),
    "PYTHONHASHSEED": "0",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
}


def free_ports():
    """The first of two neighbours that are free now."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            try:
                two.bind(("127.0.0.1", one.getsockname()[1] + 1))
            except OSError:
                continue
            return one.getsockname()[1]


@pytest.mark.long
def test_vllm_hits_what_a_server_before_this_one_stored(
    model_folder, tokenizer, tmp_path, monkeypatch
):
    for name, value in ENVIRONMENT.items():
        if name != "PYTHONPATH":
            monkeypatch.setenv(name, value)
    prompt = tokenizer((ROOT / "LICENSE").read_text())["input_ids"][: 2 * BLOCK + 20]
    answers = []
    with RestartableStore(tmp_path) as store:
        for run in ("first", "second"):
            port = free_ports()
            server = Server(tmp_path, f"server-{run}", store, port)
            transfer = {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                },
            }
            engine = Engine(tmp_path, model_folder, f"engine-{run}", transfer, "several")
            try:
                engine.wait()
                answers.append(engine.ask(prompt))
                time.sleep(2)
                engine.end()
            finally:
                engine.kill()
                server.end()
    first, second = answers
    assert (first.cached, second.cached) == (0, 2 * BLOCK)
    assert first.token_ids == second.token_ids
