"""The client for asyncio: the same calls, each in a thread, so that the event loop goes on.

    client = await aio.connect(spec, target)
    sequence = await client.put_sequence(token_ids, layers)
    request = await client.open_request("request-7")
    attention = await client.attention(sequence, request)
    read = await attention.attend(layer, position, queries)

Cancellation is honest: a call that a server works on can't be taken back, so a cancelled await
ends when its call has ended (every call has a deadline), closes what the call made, and then raises
CancelledError. Nothing runs behind your back, and borrowed arrays are free again. A call that waits
for a thread when it is cancelled is never made.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any, Callable, Optional, TypeVar

from certkv import _client, _reads, _request, _spec
from certkv._paged_cache import PagedCache

_T = TypeVar("_T")


async def _call(
    executor: concurrent.futures.Executor,
    function: Callable[..., _T],
    *arguments: Any,
    **named: Any,
) -> _T:
    running = executor.submit(function, *arguments, **named)
    waiting = asyncio.wrap_future(running)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        if not running.cancel():
            await _end(waiting)
            await _discard(executor, running)
        raise


async def _end(waiting: asyncio.Future[Any]) -> None:
    """Waits until the call has ended, however often this task is cancelled meanwhile."""
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            pass
    if not waiting.cancelled():
        waiting.exception()  # seen


async def _discard(
    executor: concurrent.futures.Executor, ended: concurrent.futures.Future[Any]
) -> None:
    """Closes what a call made that nobody waits for any more."""
    if ended.cancelled() or ended.exception() is not None:
        return
    close = getattr(ended.result(), "close", None)
    if close is not None:
        await _end(asyncio.wrap_future(executor.submit(close)))


class _Async:
    """A blocking object and the threads that its calls run in."""

    def __init__(self, executor: concurrent.futures.Executor, blocking: Any) -> None:
        self._executor = executor
        self.blocking = blocking

    async def _run(self, name: str, *arguments: Any, **named: Any) -> Any:
        return await _call(self._executor, getattr(self.blocking, name), *arguments, **named)

    async def close(self) -> None:
        """As the blocking close()."""
        await self._run("close")

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Sequence(_Async):
    """certkv.Sequence, its calls as coroutines; `blocking` has the properties."""

    blocking: _client.Sequence

    async def append(self, token_id: int, layers: Any) -> None:
        """As certkv.Sequence.append."""
        await self._run("append", token_id, layers)

    async def attend_exact(
        self, layer: int, query_position: int, queries: Any, sink_logits: Any = None
    ) -> _reads.Read:
        """As certkv.Sequence.attend_exact."""
        return await self._run("attend_exact", layer, query_position, queries, sink_logits)


class Request(_Async):
    """certkv.Request, its calls as coroutines."""

    blocking: _request.Request

    async def risk(self) -> _request.RiskSummary:
        """As certkv.Request.risk."""
        return await self._run("risk")

    async def flush(self) -> None:
        """As certkv.Request.flush."""
        await self._run("flush")

    async def finish(self) -> _request.RiskSummary:
        """As certkv.Request.finish."""
        return await self._run("finish")


class Attention(_Async):
    """certkv.Attention, its calls as coroutines."""

    blocking: _reads.Attention

    async def attend(
        self, layer: int, query_position: int, queries: Any, sink_logits: Any = None
    ) -> _reads.Read:
        """As certkv.Attention.attend."""
        return await self._run("attend", layer, query_position, queries, sink_logits)

    async def attend_many(self, reads: Any) -> list[_reads.Read]:
        """As certkv.Attention.attend_many."""
        return await self._run("attend_many", reads)

    async def refresh(self) -> None:
        """As certkv.Attention.refresh."""
        await self._run("refresh")


class Client(_Async):
    """certkv.Client, its calls as coroutines. Made by connect()."""

    blocking: _client.Client

    async def put_sequence(self, token_ids: Any, layers: Any) -> Sequence:
        """As certkv.Client.put_sequence."""
        return Sequence(self._executor, await self._run("put_sequence", token_ids, layers))

    async def put_paged(self, token_ids: Any, cache: PagedCache, pages: Any) -> Sequence:
        """As certkv.Client.put_paged; the engine leaves the pages as they are until it returns."""
        return Sequence(self._executor, await self._run("put_paged", token_ids, cache, pages))

    async def lookup(self, token_ids: Any) -> Sequence:
        """As certkv.Client.lookup."""
        return Sequence(self._executor, await self._run("lookup", token_ids))

    async def pull(self, peer: str, token_ids: Any, order: str = "whole") -> Sequence:
        """As certkv.Client.pull."""
        return Sequence(self._executor, await self._run("pull", peer, token_ids, order))

    async def open_request(self, request_id: str, **terms: Any) -> Request:
        """As certkv.Client.open_request."""
        return Request(self._executor, await self._run("open_request", request_id, **terms))

    async def attention(self, sequence: Sequence, request: Request) -> Attention:
        """As certkv.Client.attention."""
        opened = await self._run("attention", sequence.blocking, request.blocking)
        return Attention(self._executor, opened)

    async def close(self) -> None:
        """As certkv.Client.close; its threads end too."""
        try:
            await super().close()
        finally:
            self._executor.shutdown(wait=False)


async def connect(
    spec: _spec.CacheSpec,
    target: str = "",
    *,
    thread_count: Optional[int] = None,
    **options: Any,
) -> Client:
    """Makes a Client; arguments as certkv.Client.

    Args:
        thread_count: calls that may run at the same time; None = 8.
    """
    executor = concurrent.futures.ThreadPoolExecutor(thread_count or 8, "certkv")
    try:
        blocking = await _call(executor, _client.Client, spec, target, **options)
    except BaseException:
        executor.shutdown(wait=False)
        raise
    return Client(executor, blocking)
