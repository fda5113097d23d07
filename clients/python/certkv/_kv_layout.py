"""BlockLayout: the order of an engine's cache blocks, learnt from the engine's own cache write."""

from __future__ import annotations

from typing import Callable

import numpy as np

from certkv._engine import unsupported
from certkv._paged_cache import PageOrder

# Writes keys and values, each [block_tokens, KV heads, channels], into a fresh block as the engine
# does; returns the block's numbers: [KV heads, (keys, values), block_tokens * channels]. All are
# float32.
WriteBlock = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Whole numbers up to here are exact in float16 and in bfloat16.
_DIGITS = 256


class BlockLayout:
    """Where an engine keeps the keys and values of a block, for each KV head.

    Engines order a block's numbers as their kernels like it, and the order differs between
    machines. The store's order is token, channel. So the engine's own write is asked: it gets
    numbers that name their place, and what lies where is read from the block.

    Attributes:
        block_tokens: of a block.
        key_places, value_places: [block_tokens * channels] int64: element i of the store's order is
            element places[i] of the engine's.
    """

    def __init__(
        self, key_places: np.ndarray, value_places: np.ndarray, block_tokens: int
    ) -> None:
        self.block_tokens = block_tokens
        self.key_places, self.value_places = key_places, value_places
        self._key_inverse, self._value_inverse = np.argsort(key_places), np.argsort(value_places)

    @property
    def key_order(self) -> PageOrder:
        """The order as PagedCache takes it. Raises InvalidArgumentError [ENGINE_UNSUPPORTED]."""
        return _order_of(self.key_places, self.block_tokens, "keys")

    @property
    def value_order(self) -> PageOrder:
        """As key_order."""
        return _order_of(self.value_places, self.block_tokens, "values")

    @staticmethod
    def probe(
        write: WriteBlock, block_tokens: int, kv_head_count: int, head_dim: int
    ) -> BlockLayout:
        """Learns the layout.

        Raises:
            InvalidArgumentError: [ENGINE_UNSUPPORTED], the write is no reordering of each head's
                keys and values, the same for all of them: it scales or rounds, mixes heads, or
                keeps keys among values.
        """
        count = block_tokens * head_dim
        shape = (block_tokens, kv_head_count, head_dim)
        if not 1 <= count <= _DIGITS**2:
            raise unsupported(f"a block of {count} keys per head, at most {_DIGITS**2}")
        # Element i of a head gets the digits of i to base 256, one write each.
        places = np.arange(count).reshape(block_tokens, 1, head_dim)
        digits = [np.broadcast_to(d, shape) for d in np.divmod(places, _DIGITS)]
        zeros = np.zeros(shape, np.float32)
        found = []
        for is_value in (False, True):
            indices, is_order = np.zeros((kv_head_count, count), np.int64), True
            for digit in digits:
                # Plus one, so that no place keeps the zero that it may have had before.
                numbers = digit.astype(np.float32) + 1
                block = write(*((zeros, numbers) if is_value else (numbers, zeros)))
                other = block[:, 0 if is_value else 1]
                if np.any(other != 0):
                    raise unsupported("the engine keeps keys among values in its cache blocks")
                seen = block[:, 1 if is_value else 0]
                numbers = np.where(np.isfinite(seen), seen, 0).astype(np.int64)
                indices = indices * _DIGITS + numbers - 1
                is_order = is_order and bool(np.all(seen == numbers))
            is_order = is_order and bool(np.all(np.sort(indices, axis=1) == np.arange(count)))
            if not is_order or np.any(indices != indices[0]):
                raise unsupported(
                    f"the engine's cache block of {block_tokens} tokens, {kv_head_count} KV heads "
                    f"and {head_dim} channels is no reordering of its "
                    f"{'values' if is_value else 'keys'}, head by head"
                )
            found.append(np.argsort(indices[0]))
        return BlockLayout(*found, block_tokens)

    def unpack(self, block: np.ndarray, out: np.ndarray) -> None:
        """Copies a block in the store's order into an engine's.

        Args:
            block: [..., (keys, values), block_tokens * channels] in the store's order.
            out: the same shape.
        """
        out[..., 0, :] = _take(block[..., 0, :], self._key_inverse)
        out[..., 1, :] = _take(block[..., 1, :], self._value_inverse)


def _order_of(places: np.ndarray, block_tokens: int, what: str) -> PageOrder:
    """Places as sums of a token's and a channel's, which all strides and packings are."""
    table = places.reshape(block_tokens, -1)
    tokens, channels = table[:, 0], table[0] - table[0, 0]
    if not np.array_equal(tokens[:, None] + channels, table):
        raise unsupported(f"{what} of a token lie in another order than those of the next")
    # A channel's place may lie before the first one's; the lower of both tables then begins at 0.
    shift = channels.min()
    return (tokens + shift).astype(np.int32), (channels - shift).astype(np.int32)


def _take(numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
    """numbers[..., places], 13 times as fast: contiguous, and without looking at each index."""
    return np.take(np.ascontiguousarray(numbers), places, axis=-1, mode="clip")
