"""BlockChain: whole blocks by key, for engines that keep a cache of their own."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from typing import Any

import numpy as np

from certkv import _native
from certkv._paged_cache import PagedCache, StagedBlocks
from certkv._spec import CacheSpec


def block_elements(spec: CacheSpec) -> int:
    """16-bit elements of one block's keys and values: layers * KV heads * tokens * (d + d_v)."""
    return _native.block_elements(spec)


class BlockChain:
    """Blocks of a prefix in the store, leased. Made by Client.lookup_blocks.

    A block is a row of uint16 with the bits of its originals, in the order layer, KV head, (keys,
    values), token, channel: where d equals d_v, a row has the shape [layers, kv_head_count, 2,
    block_tokens, d]. Its lease is renewed in the background until it is closed. Calls are safe
    from several threads, one runs at a time.
    """

    def __init__(self, native: Any, spec: CacheSpec) -> None:
        self._native = native
        self.spec = spec

    @property
    def block_count(self) -> int:
        """Blocks that it has: those that were found, and those that were appended."""
        return self._native.block_count()

    @property
    def shared_block_count(self) -> int:
        """Of these, blocks that were in the store already."""
        return self._native.shared_block_count()

    def append(self, keys: AnySequence[bytes], blocks: np.ndarray) -> None:
        """Writes and seals blocks after the last; those that the store has already are shared.

        Args:
            keys: the next ones of the chain, as Client.block_keys makes them.
            blocks: [len(keys), block_elements(spec)] uint16, C-contiguous.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | SEQUENCE_INVALID | DIGEST_SIZE |
                NON_FINITE_KEY | NON_FINITE_VALUE | KEY_OUT_OF_RANGE].
            ResourceExhaustedError: [STORE_FULL | QUOTA_EXCEEDED | STAGING_FULL].
        """
        self._native.append(list(keys), blocks)

    def append_paged(
        self, keys: AnySequence[bytes], cache: PagedCache, pages: AnySequence[int] | np.ndarray
    ) -> None:
        """append() straight from an engine's pages, each number moved once.

        Args:
            keys: as append().
            cache: of this client's spec.
            pages: block table of the whole sequence: tokens i * page_tokens and on are in page
                pages[i]. What comes before the chain's end isn't read.

        Raises:
            As append(); InvalidArgumentError: [BLOCK_TABLE_INVALID | PAGED_CACHE_INVALID].
        """
        self._native.append_paged(list(keys), cache._native, pages)

    def append_staged(self, keys: AnySequence[bytes], staged: StagedBlocks) -> None:
        """Seals what Client.stage_blocks has copied; `staged` is closed, also when it fails.

        Args:
            keys: one for each block of `staged`.

        Raises:
            As append().
        """
        self._native.append_staged(list(keys), staged._native)

    def copy(self, first_block: int, out: np.ndarray, quantized: bool = False) -> None:
        """Copies blocks first_block, first_block + 1, ... into the rows of `out`.

        Every tile's checksums and identity are compared, those of originals over the copy. After
        an exception `out` holds nothing that may be used.

        Args:
            out: [blocks, block_elements(spec)] uint16, C-contiguous, writable.
            quantized: what the quantized planes decode to, rounded to original_dtype, in place of
                the originals. Within the formats' bounds of them, but what is computed from a copy
                has no certificate.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | READ_INVALID], no such block.
            FailedPreconditionError: [LEASE_LOST].
            AbortedError: [BLOCK_REUSED].
            DataLossError: stored bytes changed.
        """
        self._native.copy(first_block, out, quantized)

    def check_lease(self) -> None:
        """Raises FailedPreconditionError [LEASE_LOST] unless the lease is held."""
        self._native.check_lease()

    def close(self) -> None:
        """Releases the lease. Idempotent."""
        self._native.close()

    def __enter__(self) -> BlockChain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
