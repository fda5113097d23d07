"""Client and Sequence: putting keys and values into the store, and finding them again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence as AnySequence
from typing import Any, Optional

import numpy as np

from certkv import _native
from certkv._block_chain import BlockChain
from certkv._errors import error_of
from certkv._paged_cache import PagedCache, StagedBlocks
from certkv._reads import Attention, Read, ReadRequest, native_reads
from certkv._request import Request
from certkv._spec import CacheSpec

# What arrays may be: NumPy arrays, anything with the buffer protocol, or CPU tensors with
# __dlpack__ (PyTorch, JAX). They are borrowed for the call; nothing is converted.
ArrayLike = Any
# (keys, values) of one layer.
LayerKv = tuple[ArrayLike, ArrayLike]

# As the numbers of client::PullOrder.
_PULL_ORDERS = {"whole": 1, "originals-later": 2, "originals-only": 3}

_DEFAULTS = {
    "kvstore_target": "",
    "certifier_target": "",
    "gate_target": "",
    "worker_name": "python",
    "tenant": "",
    "ca_file": "",
    "certificate_file": "",
    "key_file": "",
    "token_file": "",
    "rpc_timeout_ms": 10_000,
    "seal_timeout_ms": 120_000,
    "lease_duration_ms": 30_000,
    "pressure_wait_ms": 5_000,
    "staging_slot_count": 0,
}


class Client:
    """A worker of one cache: registers the cache, maps its memory, puts and finds sequences.

    Calls block on servers without holding the interpreter lock, and are safe from several threads.
    A call that waits can't be interrupted (Ctrl-C is seen when it returns); every one has a
    deadline. Not usable in a forked child: make it after the fork.

    Args:
        spec: the cache. Clients of equal specs share blocks.
        target: gRPC target of the store, "unix:/path" or "host:port"; "" = certkvd's default
            socket. Also of certifier and gate, unless `options` names others.
        options: fields of the C++ client's Options, with their defaults: kvstore_target,
            certifier_target, gate_target, worker_name, tenant, ca_file, certificate_file,
            key_file, token_file ("" each, worker_name "python"), rpc_timeout_ms (10000),
            seal_timeout_ms (120000), lease_duration_ms (30000), pressure_wait_ms (5000),
            staging_slot_count (0 = the server's).

    Raises:
        UnavailableError: no store at the target.
        ResourceExhaustedError: [SESSION_LIMIT | CACHE_LIMIT | SLAB_TOO_SMALL].
        TypeError: an option that isn't one.
    """

    def __init__(self, spec: CacheSpec, target: str = "", **options: Any) -> None:
        unknown = sorted(set(options) - set(_DEFAULTS))
        if unknown:
            raise TypeError(f"Client has no option {unknown[0]!r}; it has {', '.join(_DEFAULTS)}")
        self.spec = spec
        self._options = {**_DEFAULTS, "kvstore_target": target, **options}
        self._native = _native.attach(spec, self._options)
        self._children: weakref.WeakSet[Any] = weakref.WeakSet()
        self._children_lock = threading.Lock()

    def put_sequence(
        self, token_ids: AnySequence[int] | ArrayLike, layers: AnySequence[LayerKv]
    ) -> Sequence:
        """Puts a whole sequence; blocks that the store has already are shared, not written.

        Args:
            token_ids: [tokens] integers, or an int32 array.
            layers: for each layer (keys, values): [tokens, kv_head_count, head_dim] and
                [tokens, kv_head_count, value_dim], C-contiguous, of the spec's original_dtype, or
                uint16 with the same bits. Keys are after RoPE.

        Returns:
            The sequence, leased until it is closed. Its last tokens % block_tokens tokens are an
            unsealed tail of this client.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | SEQUENCE_INVALID | NON_FINITE_KEY |
                NON_FINITE_VALUE].
            ResourceExhaustedError: [STORE_FULL | QUOTA_EXCEEDED | STAGING_FULL], after
                pressure_wait_ms; nothing stays reserved.
        """
        return self._sequence(self._native.put_sequence(token_ids, layers))

    def put_paged(
        self,
        token_ids: AnySequence[int] | ArrayLike,
        cache: PagedCache,
        pages: AnySequence[int] | np.ndarray,
    ) -> Sequence:
        """put_sequence() straight from an engine's pages, each number moved once.

        Args:
            token_ids: as put_sequence.
            cache: of this client's spec.
            pages: block table: tokens i * page_tokens and on are in page pages[i].

        Raises:
            As put_sequence; InvalidArgumentError: [BLOCK_TABLE_INVALID | PAGED_CACHE_INVALID].
        """
        return self._sequence(self._native.put_paged(token_ids, cache._native, pages))

    def stage_blocks(
        self,
        cache: PagedCache,
        pages: AnySequence[int] | np.ndarray,
        first_token: int,
        block_count: int,
    ) -> StagedBlocks:
        """Copies whole blocks into staging slots; the engine may reuse their pages afterwards.

        Args:
            cache, pages: as put_paged.
            first_token: of the table, where the first block begins.
            block_count: at least 1.

        Returns:
            What BlockChain.append_staged seals.

        Raises:
            ResourceExhaustedError: [STAGING_FULL], without waiting for slots.
            InvalidArgumentError: [BLOCK_TABLE_INVALID | PAGED_CACHE_INVALID | SEQUENCE_INVALID].
        """
        native = self._native.stage_blocks(cache._native, pages, first_token, block_count)
        return self._adopt(StagedBlocks(native))

    def lookup(self, token_ids: AnySequence[int] | ArrayLike) -> Sequence:
        """The longest prefix of whole blocks that the store has, leased; it may be empty."""
        return self._sequence(self._native.lookup(token_ids))

    def pull(
        self, peer: str, token_ids: AnySequence[int] | ArrayLike, order: str = "whole"
    ) -> Sequence:
        """Has the store fetch what it lacks of the prefix from another store, then as lookup().

        Args:
            peer: the other store's bulk address, "host:port", one of kvstore.bulk_peers of this
                store's config.
            token_ids: as put_sequence.
            order: when a block is found. "whole": once planes and originals are there.
                "originals-later": once planes are; a read that needs originals before they have
                followed is an error. "originals-only": once originals are and planes were made of
                them.

        Returns:
            The longest prefix of whole blocks that is here afterwards, leased; it may be empty.

        Raises:
            InvalidArgumentError: [BULK_PEER_UNKNOWN | PULL_ORDER_UNKNOWN].
            UnavailableError: [BULK_DISCONNECTED], after several attempts.
            DataLossError: [BULK_BLOCK_DAMAGED], twice.
            ResourceExhaustedError: [BULK_PULL_LIMIT | STORE_FULL | QUOTA_EXCEEDED].
            Others of docs/errors.md that begin with BULK_, and the peer's own. Blocks that came
            before the error stay.
        """
        if order not in _PULL_ORDERS:
            raise error_of(
                "INVALID_ARGUMENT",
                "PULL_ORDER_UNKNOWN",
                f"order is {order!r}, must be {', '.join(_PULL_ORDERS)}",
            )
        return self._sequence(self._native.pull(peer, token_ids, _PULL_ORDERS[order]))

    def block_keys(
        self,
        token_ids: AnySequence[int] | ArrayLike,
        extra_keys: AnySequence[bytes] = (),
        parent: bytes = b"",
        rank: int = 0,
    ) -> list[bytes]:
        """Keys of the whole blocks of `token_ids`, 32 bytes each; a rest makes no block.

        Args:
            token_ids: as put_sequence.
            extra_keys: what else each block's content depends on, such as an engine's own block
                hash, at most 1024 bytes each; () = nothing. Blocks of other extra keys, or none,
                are others.
            parent: key of the block before the first; b"" = the chain begins.
            rank: tensor-parallel rank whose KV heads the blocks hold, >= 0.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | BLOCK_KEYS_INVALID | DIGEST_SIZE].
        """
        return self._native.block_keys(token_ids, list(extra_keys), parent, rank)

    def lookup_blocks(self, keys: AnySequence[bytes]) -> BlockChain:
        """The longest prefix of this chain that the store has, leased; it may be empty."""
        return self._adopt(BlockChain(self._native.lookup_blocks(list(keys)), self.spec))

    def open_request(self, request_id: str, **terms: Any) -> Request:
        """Opens a request's account at gate, under whose tolerances its reads run.

        Args:
            request_id: unique among open requests.
            terms: those of Request: tv_tolerance, value_tolerance, output_tolerance,
                skip_tolerance, read_mode, label, tenant, model, traceparent.
        """
        terms.setdefault("model", self.spec.model)
        return self._adopt(Request(self._options, request_id, **terms))

    def attention(self, sequence: Sequence, request: Request) -> Attention:
        """Opens certified reads of `sequence` on behalf of `request`.

        If the certifier can't be reached, reads are exact in this process until it can.

        Raises:
            FailedPreconditionError: [LEASE_LOST].
            AbortedError: [BLOCK_REUSED].
        """
        return self._adopt(Attention(sequence._native, request._native))

    def close(self) -> None:
        """Closes what it made and ends the session. Idempotent."""
        with self._children_lock:
            children = list(self._children)
        for kind in (Attention, Request, Sequence, BlockChain, StagedBlocks):
            for child in children:
                if isinstance(child, kind):
                    child.close()
        self._native.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _adopt(self, child: Any) -> Any:
        with self._children_lock:
            self._children.add(child)
        return child

    def _sequence(self, native: Any) -> Sequence:
        return self._adopt(Sequence(native, self.spec))


class Sequence:
    """A sequence in the store: leased blocks, and a tail of tokens that fill no block yet.

    Its lease is renewed in the background until it is closed. Calls are safe from several threads,
    one runs at a time. Made by Client.put_sequence, lookup and pull.
    """

    def __init__(self, native: Any, spec: CacheSpec) -> None:
        self._native = native
        self.spec = spec

    @property
    def token_ids(self) -> list[int]:
        """Ids of all its tokens."""
        return self._native.token_ids()

    @property
    def token_count(self) -> int:
        """Tokens, the tail's included."""
        return self._native.token_count()

    @property
    def tail_count(self) -> int:
        """Tokens of the tail."""
        return self._native.tail_count()

    @property
    def block_count(self) -> int:
        """Whole blocks."""
        return self._native.block_count()

    @property
    def shared_block_count(self) -> int:
        """Blocks that were in the store already when the sequence was put or looked up."""
        return self._native.shared_block_count()

    def append(self, token_id: int, layers: AnySequence[LayerKv]) -> None:
        """Appends one token; a tail that becomes a whole block is sealed.

        Args:
            token_id: the new token's.
            layers: for each layer (keys, values) of that token: [kv_head_count, head_dim] and
                [kv_head_count, value_dim].

        Raises:
            As Client.put_sequence. When sealing fails, the sequence ends at its last whole block.
        """
        self._native.append(token_id, layers)

    def begin_token(self, token_id: int) -> None:
        """Begins the next token, for engines that compute its layers one after the other.

        begin_token(id), then for each layer in order write_layer(...) and its reads at that
        token, then finish_token(). Reads of the token at layers that aren't written are refused.

        Raises:
            InvalidArgumentError: [SEQUENCE_INVALID], the last token isn't finished.
            ResourceExhaustedError: [STAGING_FULL].
        """
        self._native.begin_token(token_id)

    def write_layer(self, layer: int, keys: ArrayLike, values: ArrayLike) -> None:
        """One layer of the token that began: [kv_head_count, head_dim] and [.., value_dim].

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | SEQUENCE_INVALID], not the next layer.
        """
        self._native.write_layer(layer, keys, values)

    def finish_token(self) -> None:
        """Ends the token; a tail that became a whole block is sealed. Errors as append()."""
        self._native.finish_token()

    def originals(self, layer: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one block as they were put: read-only views of mapped memory.

        Returns:
            [kv_head_count, block_tokens, head_dim] and [.., value_dim], float16 (for "bfloat16"
            uint16 with its bits). The views hold the lease, also after the sequence is closed;
            call check_lease() after using them to know that it held.

        Raises:
            InvalidArgumentError: [READ_INVALID], no such layer or block.
            FailedPreconditionError: [LEASE_LOST | ORIGINAL_MISSING].
        """
        return self._native.originals(layer, block)

    def attend_exact(
        self,
        layer: int,
        query_position: int,
        queries: ArrayLike,
        sink_logits: Optional[ArrayLike] = None,
    ) -> Read:
        """Exact attention of one read from the originals, in this process, without a certifier.

        Arguments and result as Attention.attend. Every tile is compared with its checksums first.

        Raises:
            FailedPreconditionError: [LEASE_LOST].
            AbortedError: [BLOCK_REUSED].
            DataLossError: stored bytes changed.
            InvalidArgumentError: [ARRAY_INVALID | READ_INVALID].
        """
        request = ReadRequest(layer, query_position, queries, sink_logits)
        return Read(_native.attend_exact(self._native, native_reads([request]))[0])

    def pin(self, ttl_ms: int = 0) -> None:
        """Keeps its whole blocks in memory for ttl_ms, 0 = until unpin(), also unleased.

        Raises:
            ResourceExhaustedError: [PIN_LIMIT].
            NotFoundError: [BLOCK_NOT_FOUND].
        """
        self._native.pin(True, ttl_ms)

    def unpin(self) -> None:
        """Lets pinned blocks go."""
        self._native.pin(False, 0)

    def check_lease(self) -> None:
        """Raises FailedPreconditionError [LEASE_LOST] unless the lease is held."""
        self._native.check_lease()

    def close(self) -> None:
        """Releases lease and tail, once no view of originals() is left. Idempotent."""
        self._native.close()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
