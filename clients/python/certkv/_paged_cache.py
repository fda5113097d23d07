"""PagedCache: an engine's own cache, from which blocks are sealed by block table."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from typing import Any, Optional

from certkv import _native
from certkv._spec import CacheSpec

PageOrder = tuple[Any, Any]
"""(token places [page tokens], channel places [channels]), int32 arrays: element (token, channel) of
a page and KV head is element token_places[token] + channel_places[channel] of its axis E."""


class PagedCache:
    """A cache that an engine owns and keeps in pages, described once; see from_tensors().

    It borrows the tensors' memory, which stays where it is as long as they do, and holds them. The
    engine may write to pages while it lives, but not to those that a call copies.
    """

    def __init__(self, native: Any, spec: CacheSpec, tensors: AnySequence[Any]) -> None:
        self._native = native
        self._tensors = list(tensors)
        self.spec = spec

    @staticmethod
    def from_tensors(
        spec: CacheSpec,
        axes: str,
        tensors: AnySequence[Any],
        *,
        dtype: str = "",
        key_scales: AnySequence[float] = (),
        value_scales: AnySequence[float] = (),
        key_order: Optional[PageOrder] = None,
        value_order: Optional[PageOrder] = None,
    ) -> PagedCache:
        """Describes a cache. Nothing is copied, and strides may be any.

        Args:
            spec: of the client that it is used with.
            axes: a letter for each axis of a tensor, the outermost first. B pages, H KV heads, T
                tokens of a page, D channels; K keys and values, L layers, where a tensor has both
                or all. T and D may come several times, as digits of token or channel, the highest
                first. vLLM's [2, blocks, block_size, heads, dim] is "KBTHD". E stands for T and D
                together, in the orders that are given.
            tensors: layer by layer; without K keys of a layer, then its values; with L one for all
                layers, or, without K, two. NumPy arrays or what has __dlpack__ (PyTorch), in host
                memory: of `dtype`, uint16 with its bits, or uint8 with FP8 codes.
            dtype: "float16", "bfloat16" or "float8_e4m3"; "" = the spec's original_dtype.
            key_scales, value_scales: FP8: one for each layer, or one for all. The originals are
                code * scale, which must be exact: powers of two always are.
            key_order, value_order: with E.

        Raises:
            InvalidArgumentError: [ARRAY_INVALID | PAGED_CACHE_INVALID | FP8_SCALE_INVALID |
                FP8_SCALE_INEXACT].
        """
        native = _native.paged_cache(
            spec,
            axes,
            dtype or spec.original_dtype,
            list(tensors),
            list(key_scales),
            list(value_scales),
            key_order,
            value_order,
        )
        return PagedCache(native, spec, tensors)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self._native.page_tokens()

    @property
    def page_count(self) -> int:
        """Pages that a block table may name: 0 to page_count - 1."""
        return self._native.page_count()


class StagedBlocks:
    """Blocks that were copied into staging slots and aren't sealed. Made by Client.stage_blocks.

    Its slots are given back when it is closed, or sealed by BlockChain.append_staged. Belongs to
    one thread at a time.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def block_count(self) -> int:
        """Blocks that it has."""
        return self._native.block_count()

    def drop_first(self, count: int) -> None:
        """Gives the slots of its first blocks back."""
        self._native.drop_first(count)

    def close(self) -> None:
        """Gives all slots back. Idempotent."""
        self._native.close()

    def __enter__(self) -> StagedBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
