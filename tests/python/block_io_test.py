"""BlockLoader, BlockSaver and PrefixPlan: an engine's blocks, without an engine."""

import hashlib
import logging
import threading
import time
import types

import certkv
import numpy as np
import pytest
from certkv._block_io import BlockLoader, BlockSaver, Counters, EngineBlocks, LoadJob, SaveJob
from certkv._kv_layout import BlockLayout
from certkv._prefix_plan import PrefixPlan
from certkv._store_link import StoreLink
from conftest import DIM, KV_HEADS, LAYERS, make_spec
from restartable_store import RestartableStore, wait_until

_log = logging.getLogger("certkv.block_io_test")
BLOCKS = 24


def make_engine_spec(engine_tokens, **others):
    others.setdefault("original_dtype", "bfloat16")
    return make_spec(block_tokens=max(64, engine_tokens), **others)


class Engine:
    """A cache of random bfloat16 numbers, keys channel by channel, and what serves it."""

    def __init__(self, target, seed, engine_tokens=128, queue_bytes=64 << 20, rank=0, **spec):
        self.spec = make_engine_spec(engine_tokens, **spec)
        self.tokens, self.store_tokens = engine_tokens, self.spec.block_tokens
        places = np.arange(engine_tokens * DIM).reshape(engine_tokens, DIM).T.reshape(-1)
        layout = BlockLayout(np.argsort(places), np.arange(engine_tokens * DIM), engine_tokens)
        random = np.random.default_rng(seed)
        numbers = random.standard_normal((LAYERS, BLOCKS, KV_HEADS, 2, engine_tokens * DIM))
        self.cache = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.blocks = EngineBlocks(list(self.cache), layout, self.store_tokens // engine_tokens)
        self.counters = Counters()
        self.link = StoreLink(
            self.spec,
            target,
            {"rpc_timeout_ms": 500, "pressure_wait_ms": 0},
            _log,
            retry_seconds=0.1,
        )
        common = (self.link, self.blocks, self.counters, _log, rank)
        self.loader = BlockLoader(*common, quantized=False)
        self.saver = BlockSaver(*common, queue_bytes=queue_bytes)

    def keys(self, seed, count, rank=0):
        """Of `count` store blocks of some sequence."""
        ids = [seed * 10_000 + i for i in range(count * self.store_tokens)]
        return self.link.client().block_keys(ids, rank=rank)

    def save(self, keys, first, block_ids):
        self.saver.save(SaveJob([keys], first, block_ids))
        assert self.saver.wait(20)

    def load(self, job):
        """Failed engine blocks."""
        self.loader.start(job)
        assert wait_until(lambda: job.request_id in self.loader.take_finished())
        return self.loader.take_failed()

    def close(self):
        self.saver.close()
        self.loader.close()
        self.link.close()


@pytest.fixture()
def engines(server):
    made = []

    def make(*arguments, target=server.target, **others):
        made.append(Engine(target, *arguments, **others))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("engine_tokens", [32, 64, 128])
def test_blocks_of_one_engine_are_those_of_another(engines, engine_tokens):
    one, two = engines(1, engine_tokens=engine_tokens), engines(2, engine_tokens=engine_tokens)
    parts = one.store_tokens // engine_tokens
    keys = one.keys(engine_tokens, 3)
    one.save(keys, 0, list(range(5, 5 + 3 * parts)))
    assert one.counters.total["saved_blocks"] == 3
    before = two.cache.copy()
    # Not from the beginning of a store block where it has several of the engine's.
    first = parts - 1
    wanted = [20 - i for i in range(3 * parts - first)]
    assert two.load(LoadJob("r", [keys], first, wanted)) == set()
    sources = [5 + first + i for i in range(len(wanted))]
    np.testing.assert_array_equal(two.cache[:, wanted], one.cache[:, sources])
    others = [block for block in range(BLOCKS) if block not in wanted]
    np.testing.assert_array_equal(two.cache[:, others], before[:, others])
    assert two.counters.take() == {"loaded_blocks": len(wanted)}


def test_another_layout_of_the_same_model_shares_blocks(engines):
    one, two = engines(3), engines(4)
    two.blocks.layout = BlockLayout(np.arange(128 * DIM), np.arange(128 * DIM), 128)
    keys = one.keys(300, 1)
    one.save(keys, 0, [3])
    assert two.load(LoadJob("r", [keys], 0, [9])) == set()
    channel_major = one.cache[:, 3, :, 0].reshape(LAYERS, KV_HEADS, DIM, 128)
    token_major = two.cache[:, 9, :, 0].reshape(LAYERS, KV_HEADS, 128, DIM)
    np.testing.assert_array_equal(token_major, channel_major.transpose(0, 1, 3, 2))
    np.testing.assert_array_equal(two.cache[:, 9, :, 1], one.cache[:, 3, :, 1])


def test_what_is_saved_is_a_copy_of_the_moment(engines):
    one, two = engines(5), engines(6)
    keys = one.keys(500, 1)
    truth = one.cache[:, 2].copy()
    holding = threading.Event()
    append = one.saver._append
    one.saver._append = lambda *a: holding.wait(20) and append(*a)
    one.saver.save(SaveJob([keys], 0, [2]))
    one.cache[:, 2] = 0x4000  # the engine reuses the block
    holding.set()
    assert one.saver.wait(20)
    two.load(LoadJob("r", [keys], 0, [2]))
    np.testing.assert_array_equal(two.cache[:, 2], truth)


def test_blocks_that_the_store_lacks_are_failed_from_there_on(engines):
    one, two = engines(7), engines(8)
    keys = one.keys(700, 4)
    one.save(keys[:2], 0, [1, 2])
    before = two.cache.copy()
    assert two.load(LoadJob("r", [keys], 0, [4, 5, 6, 7])) == {6, 7}
    np.testing.assert_array_equal(two.cache[:, [4, 5]], one.cache[:, [1, 2]])
    np.testing.assert_array_equal(two.cache[:, [6, 7]], before[:, [6, 7]])
    assert two.counters.take() == {"loaded_blocks": 2, "failed_blocks": 2}


def test_a_store_killed_before_a_load_fails_its_blocks(engines, tmp_path, caplog):
    with RestartableStore(tmp_path) as store:
        engine = engines(9, target=store.target)
        keys = engine.keys(900, 2)
        engine.save(keys, 0, [1, 2])
        store.kill()
        assert engine.load(LoadJob("r-dead", [keys], 0, [4, 5])) == {4, 5}
        assert "2 of 2 blocks of request r-dead" in caplog.text
        # It is away now: no waiting, and saves are dropped and counted.
        assert engine.load(LoadJob("r-away", [keys], 0, [4, 5])) == {4, 5}
        engine.save(keys, 0, [1, 2])
        assert engine.counters.total["dropped_blocks"] == 2
        store.start()
        assert wait_until(lambda: engine.link.client() is not None)
        engine.save(keys, 0, [1, 2])
        assert engine.load(LoadJob("r-back", [keys], 0, [4, 5])) == set()


def test_a_store_killed_between_blocks_gives_right_blocks_or_failed_ones(engines, tmp_path):
    with RestartableStore(tmp_path) as store:
        one, two = engines(10, target=store.target), engines(11, target=store.target)
        keys = one.keys(1000, 6)
        one.save(keys, 0, list(range(6)))
        write_row, written = two.blocks.write_row, []

        def kill_after_two(row, block_ids):
            write_row(row, block_ids)
            written.append(block_ids)
            if len(written) == 2:
                store.kill()

        two.blocks.write_row = kill_after_two
        wanted = list(range(10, 16))
        failed = two.load(LoadJob("r", [keys], 0, wanted))
        loaded = [block for block in wanted if block not in failed]
        assert loaded[:2] == [10, 11]
        sources = [block - 10 for block in loaded]
        np.testing.assert_array_equal(two.cache[:, loaded], one.cache[:, sources])


def test_a_full_queue_drops_what_is_beyond_it(engines, caplog):
    engine = engines(12, queue_bytes=2 * 2 * LAYERS * KV_HEADS * 2 * 128 * DIM)
    keys = engine.keys(1200, 5)
    holding = threading.Event()
    append = engine.saver._append
    engine.saver._append = lambda *a: holding.wait(20) and append(*a)
    engine.saver.save(SaveJob([keys], 0, [0, 1, 2, 3]))
    engine.saver.save(SaveJob([keys], 4, [4]))
    holding.set()
    assert engine.saver.wait(20)
    assert engine.counters.take() == {"saved_blocks": 2, "dropped_blocks": 3}
    assert caplog.text.count("[queue full]") == 1
    # The next save of that prefix fills the gap, and one beyond a gap is dropped.
    engine.save(keys, 4, [4])
    assert engine.counters.take() == {"dropped_blocks": 1}
    engine.save(keys[:4], 2, [2, 3])
    engine.save(keys, 4, [4])
    assert engine.counters.take() == {"saved_blocks": 3}
    engine.save(keys[:2], 0, [0, 1])
    assert engine.counters.take() == {"shared_blocks": 2}


def test_numbers_that_the_format_cannot_hold_are_refused_and_counted(engines, caplog):
    engine = engines(13)
    engine.cache[1, 6, 0, 0, 7] = 0x4780  # 65536, beyond the affine formats
    keys = engine.keys(1300, 3)
    engine.save(keys, 0, [5, 6, 7])
    assert engine.counters.take() == {"saved_blocks": 1, "refused_blocks": 1, "dropped_blocks": 1}
    assert "KEY_OUT_OF_RANGE" in caplog.text
    wide = engines(14, key_format="BF16", value_format="BF16")
    wide.cache[1, 6, 0, 0, 7] = 0x7F00  # 1.7e38
    keys = wide.keys(1300, 3)
    wide.save(keys, 0, [5, 6, 7])
    assert wide.counters.take() == {"saved_blocks": 3}
    other = engines(15, key_format="BF16", value_format="BF16")
    assert other.load(LoadJob("r", [keys], 0, [1, 2, 3])) == set()
    np.testing.assert_array_equal(other.cache[:, [1, 2, 3]], wide.cache[:, [5, 6, 7]])


def test_quantized_loads_are_near_the_originals_and_not_them(engines):
    one, two = engines(16), engines(17)
    two.loader._quantized = True
    keys = one.keys(1600, 1)
    one.save(keys, 0, [0])
    assert two.load(LoadJob("r", [keys], 0, [0])) == set()
    truth, seen = (
        (engine.cache[:, 0].astype(np.uint32) << 16).view(np.float32) for engine in (one, two)
    )
    difference = np.abs(truth - seen)
    assert 0 < difference[:, :, 0].max() < 0.05 and 0.05 < difference[:, :, 1].max() < 2


class Request(types.SimpleNamespace):
    """As vLLM's: block hashes are chained SHA-256."""

    def __init__(self, name, count, seed=0, salt=b"", **others):
        ids = [seed * 10_000 + i for i in range(count)]
        hashes, last = [], salt
        for first in range(0, count - count % 32, 32):
            last = hashlib.sha256(last + repr(ids[first : first + 32]).encode()).digest()
            hashes.append(last)
        super().__init__(
            request_id=name,
            num_tokens=count,
            num_computed_tokens=0,
            all_token_ids=ids,
            block_hashes=hashes,
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
        )
        self.__dict__.update(others)


def make_plan(engine, **others):
    return PrefixPlan(engine.link, engine.tokens, engine.store_tokens, engine.counters, **others)


def match(plan, request, computed_tokens=0):
    """PrefixPlan.match, asked again while the store looks."""
    found = [plan.match(request, computed_tokens)]
    while found[-1] is None:
        assert len(found) < 1000
        found.append(plan.match(request, computed_tokens))
    return found[-1]


def run_once(plan, engine, request, block_ids):
    """Plans all of a request as one step without a hit, and saves it."""
    plan.add(request)
    found = match(plan, request, 0)
    plan.begin_load(request, 0, block_ids)
    for job in plan.take_saves([(request.request_id, request.num_tokens, block_ids)]):
        engine.saver.save(job)
    assert engine.saver.wait(20)
    plan.forget(request.request_id)
    return found


def test_a_prefix_is_matched_loaded_and_not_saved_again(engines):
    one, two = engines(20, engine_tokens=32), engines(21, engine_tokens=32)
    assert run_once(make_plan(one), one, Request("a", 200, seed=20), [1, 2, 3, 4, 5, 6, 7]) == 0
    assert one.counters.total["saved_blocks"] == 3
    plan = make_plan(two)
    request = Request("b", 200, seed=20)
    plan.add(request)
    # 32 tokens are in the engine's own cache: 3 blocks of 64 tokens are 6 of the engine's.
    assert match(plan, request, 32) == 160
    assert match(plan, request, 32) == 160  # asked again while there is no room
    plan.begin_load(request, 160, [9, 10, 11, 12, 13, 14, 15])
    (job,) = plan.take_loads()
    assert (job.first, job.block_ids, len(job.keys[0])) == (1, [10, 11, 12, 13, 14], 3)
    assert two.load(job) == set()
    np.testing.assert_array_equal(two.cache[:, [10, 11, 12, 13, 14]], one.cache[:, [2, 3, 4, 5, 6]])
    plan.end_loads(["b", "unknown"])
    assert plan.take_loads() == [] and match(plan, request, 0) == 0  # a load is tried once
    assert plan.take_saves([("b", 200, [9, 10, 11, 12, 13, 14, 15])]) == []
    plan.forget("b")


def test_the_last_token_is_left_to_the_engine(engines):
    engine = engines(22, engine_tokens=64)
    plan = make_plan(engine)
    run_once(plan, engine, Request("a", 128, seed=22), [0, 1])
    for count, matched in ((128, 64), (129, 128), (64, 0), (65, 64), (63, 0)):
        request = Request(f"r{count}", count, seed=22)
        plan.add(request)
        assert match(plan, request, 0) == matched, count


def test_another_salt_tokens_or_rank_match_nothing(engines):
    engine = engines(23, engine_tokens=64)
    plan = make_plan(engine)
    run_once(plan, engine, Request("a", 130, seed=23), [0, 1])
    for name, other in (
        ("salt", Request("salt", 130, seed=23, salt=b"tenant")),
        ("tokens", Request("tokens", 130, seed=24)),
    ):
        plan.add(other)
        assert match(plan, other, 0) == 0, name
    # Equal hashes with other tokens: a collision of the engine's hash is no collision here.
    forged = Request("forged", 130, seed=25, block_hashes=Request("x", 130, seed=23).block_hashes)
    plan.add(forged)
    assert match(plan, forged, 0) == 0
    two_ranks = make_plan(engine, rank_count=2)
    request = Request("b", 130, seed=23)
    two_ranks.add(request)
    assert match(two_ranks, request, 0) == 0  # rank 1 has saved nothing


def test_saves_follow_the_chunks_of_a_prefill(engines):
    engine = engines(26, engine_tokens=64)
    plan = make_plan(engine)
    request = Request("a", 300, seed=26)
    plan.add(request)
    assert match(plan, request, 0) == 0
    firsts = []
    for computed in (100, 130, 140, 256, 300):
        jobs = plan.take_saves([("a", computed, [7, 8, 9, 10, 11])])
        firsts += [(job.first, job.block_ids, len(job.keys[0])) for job in jobs]
    assert firsts == [(0, [7], 1), (1, [8], 2), (2, [9, 10], 4)]


def test_roles_that_only_load_or_only_save(engines):
    engine = engines(27, engine_tokens=64)
    assert run_once(make_plan(engine, saves=False), engine, Request("a", 130, seed=27), [0, 1]) == 0
    assert engine.counters.total["saved_blocks"] == 0
    assert run_once(make_plan(engine, loads=False), engine, Request("b", 130, seed=27), [0, 1]) == 0
    assert engine.counters.total["saved_blocks"] == 2
    only_saves = make_plan(engine, loads=False)
    assert run_once(only_saves, engine, Request("c", 130, seed=27), [0, 1]) == 0
    assert run_once(make_plan(engine), engine, Request("d", 130, seed=27), [0, 1]) == 128


@pytest.mark.parametrize(
    "what", [{"lora_request": object()}, {"mm_features": [1]}, {"prompt_embeds": np.zeros(1)}]
)
def test_requests_whose_names_do_not_say_what_they_hold_are_left_alone(engines, what):
    engine = engines(28, engine_tokens=64)
    plan = make_plan(engine)
    request = Request("a", 130, seed=28, **what)
    assert run_once(plan, engine, request, [0, 1]) == 0
    assert engine.counters.take() == {"requests_left_alone": 1}
    assert plan.request("a") is None


def test_a_scheduler_goes_on_while_the_store_is_away(engines, tmp_path):
    store = RestartableStore(tmp_path)
    engine = engines(29, engine_tokens=64, target=store.target)
    plan = make_plan(engine)
    assert run_once(plan, engine, Request("a", 130, seed=29), [0, 1]) == 0
    assert engine.counters.take() == {"lookups_without_store": 1}
    with store:
        assert wait_until(lambda: engine.link.client() is not None)
        assert run_once(plan, engine, Request("b", 130, seed=29), [0, 1]) == 0
        request = Request("c", 130, seed=29)
        plan.add(request)
        assert match(plan, request, 0) == 128
        store.kill()
        # Its lease is lost at some time, and then nothing is matched.
        assert wait_until(lambda: match(plan, Request("d", 130, seed=29), 0) == 0)
        plan.forget("c")
        other = Request("e", 130, seed=29)
        plan.add(other)
        assert match(plan, other, 0) == 0
        assert engine.counters.total["lookups_without_store"] == 2


def test_engines_of_different_specs_share_a_store_and_no_block(engines):
    one = engines(30)
    others = [
        engines(31, key_format="K6"),
        engines(32, original_dtype="float16"),
        engines(33, model="another"),
        engines(34, engine_tokens=64),
    ]
    assert run_once(make_plan(one), one, Request("a", 260, seed=30), [0, 1]) == 0
    for other in others:
        other.cache &= 0x3FFF  # finite as float16 too
        assert run_once(make_plan(other), other, Request("a", 260, seed=30), [0, 1, 2, 3]) == 0
    for engine in (one, *others):
        request = Request("b", 260, seed=30)
        plan = make_plan(engine)
        plan.add(request)
        assert match(plan, request, 0) == 256
        plan.begin_load(request, 256, [8, 9, 10, 11])
        (job,) = plan.take_loads()
        assert engine.load(job) == set()
        count = 256 // engine.tokens
        np.testing.assert_array_equal(engine.cache[:, 8 : 8 + count], engine.cache[:, :count])


def test_a_slow_lookup_keeps_nobody_waiting(engines, monkeypatch):
    engine = engines(40, engine_tokens=64)
    plan = make_plan(engine)
    run_once(plan, engine, Request("a", 130, seed=40), [0, 1])
    client, gate, found = engine.link.client(), threading.Event(), []
    look_up = client.lookup_blocks

    def slow(keys):
        assert gate.wait(20)
        found.append(look_up(keys))
        return found[-1]

    monkeypatch.setattr(client, "lookup_blocks", slow)
    wanted, gone = Request("wanted", 130, seed=40), Request("gone", 130, seed=40)
    for request in (wanted, gone):
        plan.add(request)
        began = time.monotonic()
        assert plan.match(request, 0) is None
        assert time.monotonic() - began < 1
    plan.forget("gone")
    assert plan.take_saves([("wanted", 130, [0, 1])]) != []  # the step goes on without it
    gate.set()
    assert match(plan, wanted, 0) == 128
    # What was found for a request that has ended is released.
    assert wait_until(lambda: len(found) == 2 and found[1]._native.is_closed)
    assert not found[0]._native.is_closed
    plan.close()
