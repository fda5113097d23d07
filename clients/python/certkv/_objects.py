"""Objects of 16-bit numbers, kept bit by bit, for engines that arrange keys and values themselves."""

from __future__ import annotations

from certkv._block_chain import BlockChain
from certkv._client import Client
from certkv._engine import unsupported
from certkv._spec import CacheSpec

# An object is so many pages of 64 tokens of one KV head, keys and values of 64 channels: the
# smallest that a CacheSpec has.
_TOKENS = _CHANNELS = 64
_PAGE_ELEMENTS = 2 * _TOKENS * _CHANNELS
_HEADS_MAX = _LAYERS_MAX = 256
_FORMATS = {"float16": "F16", "bfloat16": "BF16"}


def object_spec(name: str, elements: int, dtype: str, remedy: str) -> CacheSpec:
    """The cache of objects of so many numbers, of which each is one block.

    Args:
        name: all that tells objects of one size from others: who arranged what, and how.
        dtype: "float16" or "bfloat16".
        remedy: what to do when the size fits no block.

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], another dtype, or a size that fits no block.
    """
    if dtype not in _FORMATS:
        raise unsupported(f"objects hold {dtype}; only float16 or bfloat16 are stored")
    pages, rest = divmod(elements, _PAGE_ELEMENTS)
    heads = next(
        (h for h in range(_HEADS_MAX, 0, -1) if pages % h == 0 and pages // h <= _LAYERS_MAX), 0
    )
    if rest or not pages or not heads:
        raise unsupported(
            f"objects of {elements} numbers ({name}); only multiples of {_PAGE_ELEMENTS} that are "
            f"a product of two numbers up to {_LAYERS_MAX} times that; {remedy}"
        )
    return CacheSpec.uniform(
        name,
        layer_count=pages // heads,
        kv_head_count=heads,
        group_size=1,
        head_dim=_CHANNELS,
        key_format=_FORMATS[dtype],
        value_format=_FORMATS[dtype],
        block_tokens=_TOKENS,
        rope_pairing="none",
        original_dtype=dtype,
    )


def object_keys(client: Client, name: bytes) -> list[bytes]:
    """The one key of the object's block: of all that tells it from others, at most 1024 bytes."""
    return client.block_keys([0] * _TOKENS, [name])


def find_object(client: Client, keys: list[bytes]) -> BlockChain:
    """The object, leased: a chain of one block, or of none when the store hasn't got it."""
    return client.lookup_blocks(keys)
