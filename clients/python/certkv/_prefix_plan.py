"""PrefixPlan: what an engine's scheduler loads from the store and saves into it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any, Optional

from certkv import _errors
from certkv._block_chain import BlockChain
from certkv._block_io import Counters, LoadJob, SaveJob
from certkv._client import Client
from certkv._job_thread import JobThread
from certkv._store_link import StoreLink

# A lookup of blocks in memory takes a millisecond; one that brings blocks from disk, seconds.
_PATIENCE_SECONDS = 0.01


class _Lookup:
    """What the store has of a request, leased; found on another thread.

    Attributes:
        done: is set when `chains` is what was found, of each rank, or None after an error.
    """

    def __init__(self, client: Client, keys: list[list[bytes]]) -> None:
        self.client, self.keys = client, keys
        self.done = threading.Event()
        self.chains: Optional[list[BlockChain]] = None
        self.lock = threading.Lock()
        self.is_unwanted = False


@dataclasses.dataclass
class _Tracked:
    """One request of the engine.

    Attributes:
        request: the engine's object.
        keys: of each rank, as far as they were needed.
        lookup: the last one, until what it found is loaded.
        computed_tokens: that the engine had when it was last asked about.
        was_loaded: was a load begun? There is only one for each request: when it fails, the engine
            asks again, and the same answer would fail again.
        saved_blocks: store blocks that need no save; None = nobody has looked.
    """

    request: Any
    keys: list[list[bytes]]
    lookup: Optional[_Lookup] = None
    computed_tokens: int = 0
    was_loaded: bool = False
    saved_blocks: Optional[int] = None


class PrefixPlan:
    """Lookups, loads and saves of requests, by their engine's block hashes.

    Its methods are for the engine's thread alone, and wait for the store for 10 ms at most.

    A request is an object with request_id, num_tokens, num_computed_tokens, all_token_ids,
    block_hashes (bytes, each over all blocks before it), lora_request, mm_features, prompt_embeds
    and cache_salt; those with one of the three before the last are left alone, because their names
    don't say what they hold.

    Args:
        link: of a client whose blocks hold store_tokens tokens.
        engine_tokens, store_tokens: of a block; store_tokens is a multiple of engine_tokens.
        rank_count: tensor-parallel workers, each with blocks of its own.
        loads, saves: which of them to make.
        counters: gets lookups, lookups_without_store and requests_left_alone.
        has_plain_keys: keys are of token ids alone, as those of Client.put_sequence, and requests
            with a cache_salt are left alone too; otherwise they hold the engine's block hashes,
            which the salt is part of.
    """

    def __init__(
        self,
        link: StoreLink,
        engine_tokens: int,
        store_tokens: int,
        counters: Counters,
        rank_count: int = 1,
        loads: bool = True,
        saves: bool = True,
        has_plain_keys: bool = False,
    ) -> None:
        self._link, self._counters = link, counters
        self._engine_tokens, self._store_tokens = engine_tokens, store_tokens
        self._per_block = store_tokens // engine_tokens
        self._rank_count = rank_count
        self._loads, self._saves = loads, saves
        self._has_plain_keys = has_plain_keys
        self._tracked: dict[str, _Tracked] = {}
        self._pending: list[LoadJob] = []
        self._thread = JobThread("certkv-lookup", self._find)

    def add(self, request: Any) -> None:
        """Before anything else of the request. Idempotent."""
        is_salted = self._has_plain_keys and request.cache_salt
        is_other = request.lora_request or request.mm_features or request.prompt_embeds is not None
        if is_other or is_salted:
            self._counters.add("requests_left_alone")
            return
        self._tracked.setdefault(
            request.request_id, _Tracked(request, [[] for _ in range(self._rank_count)])
        )

    def match(self, request: Any, computed_tokens: int) -> Optional[int]:
        """Tokens after `computed_tokens` that the store has, whole engine blocks; leased.

        None while the store looks for them: ask again in a later step.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.was_loaded:
            return 0
        tracked.computed_tokens = computed_tokens
        blocks = self._hashed_blocks(request)
        if blocks == 0 or not self._has_lookup(tracked, blocks):
            return 0
        if not tracked.lookup.done.wait(_PATIENCE_SECONDS):
            return None
        if tracked.lookup.chains is None:
            tracked.lookup = None
            self._counters.add("lookups_without_store")
            return 0
        found = min(chain.block_count for chain in tracked.lookup.chains)
        tracked.saved_blocks = found
        # The last token is always computed: the engine samples from it.
        last = (request.num_tokens - 1) // self._engine_tokens * self._engine_tokens
        tokens = min(found * self._store_tokens, last) - computed_tokens
        if not self._loads or tokens <= 0:
            self._release(tracked)
            return 0
        return tokens

    def begin_load(self, request: Any, tokens: int, block_ids: list[int]) -> None:
        """The engine has room for the `tokens` that match() gave; `block_ids` are all it has."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if tokens <= 0:
            self._release(tracked)
            return
        first = tracked.computed_tokens // self._engine_tokens
        count = tokens // self._engine_tokens
        needed = -(-(tracked.computed_tokens + tokens) // self._store_tokens)
        tracked.was_loaded = True
        self._pending.append(
            LoadJob(
                request.request_id,
                [keys[:needed] for keys in tracked.keys],
                first,
                list(block_ids[first : first + count]),
            )
        )

    def end_loads(self, request_ids: Iterable[str]) -> None:
        """Their loads have ended: what was leased for them is released."""
        for request_id in request_ids:
            if request_id in self._tracked:
                self._release(self._tracked[request_id])

    def take_loads(self) -> list[LoadJob]:
        """Loads that began since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def request(self, request_id: str) -> Optional[Any]:
        """The engine's object; None for one that is left alone."""
        tracked = self._tracked.get(request_id)
        return None if tracked is None else tracked.request

    def take_saves(self, scheduled: Iterable[tuple[str, int, list[int]]]) -> list[SaveJob]:
        """Saves of a step.

        Args:
            scheduled: of each request of the step: its id, its tokens that are computed when the
                step has run, and its engine blocks.
        """
        if not self._saves or self._link.client() is None:
            return []
        jobs = []
        for request_id, computed_tokens, block_ids in scheduled:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            last = min(
                computed_tokens // self._store_tokens, self._hashed_blocks(tracked.request)
            )
            first = tracked.saved_blocks or 0
            if last <= first or not self._extend_keys(tracked, last):
                continue
            tracked.saved_blocks = last
            jobs.append(
                SaveJob(
                    [keys[:last] for keys in tracked.keys],
                    first,
                    list(block_ids[first * self._per_block : last * self._per_block]),
                )
            )
        return jobs

    def close(self) -> None:
        """Ends the thread of lookups, after the one that runs."""
        self._thread.close()

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._release(tracked)

    def _hashed_blocks(self, request: Any) -> int:
        """Whole store blocks whose tokens are all known."""
        return min(
            len(request.block_hashes) // self._per_block,
            request.num_tokens // self._store_tokens,
        )

    def _has_lookup(self, tracked: _Tracked, blocks: int) -> bool:
        """Begins one where there is none; False when the store is away."""
        lookup = tracked.lookup
        if lookup is not None and lookup.done.is_set() and lookup.chains is not None:
            try:
                for chain in lookup.chains:
                    chain.check_lease()
            except _errors.Error:
                self._release(tracked)
        if tracked.lookup is None:
            client = self._link.client()
            if client is None or not self._extend_keys(tracked, blocks):
                self._counters.add("lookups_without_store")
                return False
            tracked.lookup = _Lookup(client, [keys[:blocks] for keys in tracked.keys])
            self._counters.add("lookups")
            self._thread.put(tracked.lookup)
        return True

    def _find(self, lookup: _Lookup) -> None:
        """On the thread of lookups."""
        chains: list[BlockChain] = []
        is_found = False
        try:
            for keys in lookup.keys:
                chains.append(lookup.client.lookup_blocks(keys))
            is_found = True
        except _errors.Error as error:
            self._link.report(lookup.client, error)
        with lookup.lock:
            is_found = is_found and not lookup.is_unwanted
            lookup.chains = chains if is_found else None
            lookup.done.set()
        if not is_found:
            for chain in chains:
                self._link.discard(chain)

    def _extend_keys(self, tracked: _Tracked, blocks: int) -> bool:
        """Has keys of so many blocks; False when the store is away."""
        client = self._link.client()
        if client is None:
            return False
        request, have = tracked.request, len(tracked.keys[0])
        if have >= blocks:
            return True
        ids = list(request.all_token_ids[have * self._store_tokens : blocks * self._store_tokens])
        hashes = [
            bytes(request.block_hashes[(block + 1) * self._per_block - 1])
            for block in range(have, blocks)
            if not self._has_plain_keys
        ]
        try:
            new = [
                client.block_keys(ids, hashes, keys[-1] if keys else b"", rank)
                for rank, keys in enumerate(tracked.keys)
            ]
        except _errors.Error as error:  # closed meanwhile
            self._link.report(client, error)
            return False
        for keys, more in zip(tracked.keys, new):
            keys.extend(more)
        return True

    def _release(self, tracked: _Tracked) -> None:
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is None:
            return
        with lookup.lock:
            lookup.is_unwanted = True
            chains = lookup.chains or []
        for chain in chains:
            self._link.discard(chain)
