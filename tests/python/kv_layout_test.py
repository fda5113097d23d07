"""BlockLayout: engines' block orders, learnt from writes, and writes that are refused."""

import certkv
import numpy as np
import pytest
from certkv._kv_layout import BlockLayout

TOKENS, HEADS, DIM = 128, 2, 64
COUNT = TOKENS * DIM


def token_major(heads):
    return heads.reshape(HEADS, COUNT)


def channel_major(heads):
    """As vLLM's kernels for AVX2 and AVX-512 keep keys."""
    return heads.transpose(0, 2, 1).reshape(HEADS, COUNT)


def packed(heads):
    """Pairs of channels side by side within 16 tokens, in the manner of AMX tiles."""
    tiles = heads.reshape(HEADS, TOKENS // 16, 16, DIM // 2, 2)
    return tiles.transpose(0, 1, 3, 2, 4).reshape(HEADS, COUNT)


def writer(key_order, value_order=token_major, change=lambda block: block):
    def write(keys, values):
        block = np.zeros((HEADS, 2, COUNT), np.float32)
        block[:, 0] = key_order(np.asarray(keys).transpose(1, 0, 2))
        block[:, 1] = value_order(np.asarray(values).transpose(1, 0, 2))
        return change(block)

    return write


def probe(write):
    return BlockLayout.probe(write, TOKENS, HEADS, DIM)


@pytest.mark.parametrize("order", [token_major, channel_major, packed])
def test_any_order_is_learnt_and_undone(order):
    layout = probe(writer(order))
    random = np.random.default_rng(1)
    keys, values = random.integers(0, 2**16, (2, HEADS, TOKENS, DIM), np.uint16)
    engine = np.stack([order(keys), token_major(values)], axis=1)
    stored = np.empty_like(engine)
    for part, (tokens, channels) in enumerate((layout.key_order, layout.value_order)):
        stored[:, part] = engine[:, part, (tokens[:, None] + channels).reshape(-1)]
        assert tokens.min() >= 0 and channels.min() >= 0
    np.testing.assert_array_equal(stored[:, 0].reshape(HEADS, TOKENS, DIM), keys)
    np.testing.assert_array_equal(stored[:, 1].reshape(HEADS, TOKENS, DIM), values)
    again = np.empty_like(engine)
    layout.unpack(stored, again)
    np.testing.assert_array_equal(again, engine)
    assert np.array_equal(stored, engine) == (order is token_major)


def test_an_order_that_is_no_sum_of_tokens_and_channels_is_refused():
    places = np.arange(COUNT)
    places[[0, 1, DIM]] = places[[1, DIM, 0]]
    layout = BlockLayout(places, np.arange(COUNT), TOKENS)
    layout.value_order
    with pytest.raises(certkv.InvalidArgumentError, match="keys of a token") as raised:
        layout.key_order
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


def scale(block):
    return block * 0.5


def add_a_little(block):
    return np.where(block > 0, block + 0.25, block)


def round_off(block):
    return np.where(block > 100, np.round(block, -1), block)


def mix_heads(block):
    mixed = block.copy()
    mixed[:, 0] = block.reshape(HEADS * 2, COUNT)[::2].T.reshape(HEADS, COUNT)
    return mixed


def swap_one_head(block):
    swapped = block.copy()
    swapped[1, 0, :2] = block[1, 0, 1::-1]
    return swapped


def keys_among_values(block):
    """Per token: key, value."""
    both = block.reshape(HEADS, 2, TOKENS, DIM).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(both).reshape(HEADS, 2, COUNT)


def nothing(block):
    return np.zeros_like(block)


def not_a_number(block):
    return np.full_like(block, np.nan)


@pytest.mark.parametrize(
    "change",
    [
        scale,
        add_a_little,
        round_off,
        mix_heads,
        swap_one_head,
        keys_among_values,
        nothing,
        not_a_number,
    ],
)
def test_a_write_that_is_no_order_is_refused(change):
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        probe(writer(token_major, change=change))
    assert raised.value.reason == "ENGINE_UNSUPPORTED"


def test_a_block_with_too_many_places_is_refused():
    with pytest.raises(certkv.InvalidArgumentError, match="at most 65536"):
        BlockLayout.probe(writer(token_major), 1024, HEADS, 128)
