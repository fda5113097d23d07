"""The client for asyncio: results, and a cancellation that leaves nothing behind."""

import asyncio
import threading
import time

import certkv
import numpy as np
import pytest
from certkv import aio
from conftest import MadeSequence, exact_attention, make_queries, make_spec


def test_calls_give_what_the_blocking_ones_give(server, request_id):
    made = MadeSequence(130, seed=70)
    queries = make_queries(1)

    async def run():
        async with await aio.connect(make_spec(), server.target) as client:
            sequence = await client.put_sequence(made.token_ids, made.layers)
            request = await client.open_request(request_id)
            attention = await client.attention(sequence, request)
            reads = await asyncio.gather(
                *(attention.attend(0, position, queries) for position in (60, 100, 129))
            )
            await request.flush()
            risk = await request.finish()
            found = await client.lookup(made.token_ids)
            return reads, risk, found.blocking.block_count

    reads, risk, blocks = asyncio.run(run())
    assert blocks == 2
    assert risk.read_count == 18
    for position, read in zip((60, 100, 129), reads):
        truth, _ = exact_attention(made.layers[0], position, queries)
        distance = np.linalg.norm(read.outputs - truth, axis=1)
        assert np.all(distance <= read.certificates["output_error_bound"] + 1e-12)


def test_pages_of_an_engine_are_put_as_their_rows_are(server):
    made = MadeSequence(128, seed=72)
    tensors = [np.ascontiguousarray(np.stack(layer).reshape(2, 8, 16, 2, 64)) for layer in made.layers]
    cache = certkv.PagedCache.from_tensors(make_spec(), "KBTHD", tensors)

    async def run():
        async with await aio.connect(make_spec(), server.target) as client:
            paged = await client.put_paged(made.token_ids, cache, list(range(8)))
            return paged.blocking.block_count, paged.blocking.originals(1, 1)[0].copy()

    blocks, keys = asyncio.run(run())
    assert blocks == 2
    np.testing.assert_array_equal(keys, made.layers[1][0][64:128].transpose(1, 0, 2))


def test_errors_are_those_of_the_blocking_calls(server, tmp_path):
    async def run():
        async with await aio.connect(make_spec(), server.target) as client:
            with pytest.raises(certkv.InvalidArgumentError):
                await client.put_sequence([1], [])
        with pytest.raises(certkv.UnavailableError):
            await aio.connect(make_spec(), f"unix:{tmp_path}/none.sock", rpc_timeout_ms=300)

    asyncio.run(run())


class Slow:
    """A blocking object whose call takes its time and makes something to close."""

    def __init__(self):
        self.started, self.go_on = threading.Event(), threading.Event()
        self.closed = []

    def call(self):
        self.started.set()
        assert self.go_on.wait(20)
        return self

    def close(self):
        self.closed.append(time.monotonic())


def test_a_cancelled_call_has_ended_and_closed_what_it_made():
    slow = Slow()

    async def run():
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as executor:
            task = asyncio.create_task(aio._call(executor, slow.call))
            await asyncio.to_thread(slow.started.wait, 20)
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done(), "the call runs on and the task says that it ended"
            task.cancel()  # a second cancellation changes nothing
            await asyncio.sleep(0.05)
            assert not task.done()
            slow.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(slow.closed) == 1

    asyncio.run(run())


def test_a_call_that_waits_for_a_thread_is_never_made():
    slow, waiting = Slow(), Slow()

    async def run():
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as executor:
            first = asyncio.create_task(aio._call(executor, slow.call))
            await asyncio.to_thread(slow.started.wait, 20)
            second = asyncio.create_task(aio._call(executor, waiting.call))
            await asyncio.sleep(0.05)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            slow.go_on.set()
            await first

    asyncio.run(run())
    assert not waiting.started.is_set()


def test_a_cancelled_put_leaves_no_lease(server):
    made = MadeSequence(2048, seed=71)

    async def run():
        async with await aio.connect(make_spec(), server.target) as client:
            task = asyncio.create_task(client.put_sequence(made.token_ids, made.layers))
            await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert all(
                child._native.is_closed
                for child in list(client.blocking._children)
                if isinstance(child, certkv.Sequence)
            )

    asyncio.run(run())
