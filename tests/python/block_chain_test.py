"""BlockChain: blocks by key, copied whole, exact or quantized."""

import certkv
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, LAYERS, MadeSequence, make_spec

BLOCK_TOKENS = 128
SHAPE = (LAYERS, KV_HEADS, 2, BLOCK_TOKENS, DIM)


def make_chain_spec(**others):
    return make_spec(block_tokens=BLOCK_TOKENS, **others)


def make_blocks(count, seed, scale=1.0):
    """[count, elements] uint16: bits of bfloat16, which are the upper half of a float32's."""
    random = np.random.default_rng(seed)
    numbers = scale * random.standard_normal((count, int(np.prod(SHAPE))), np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def as_floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def tokens(seed, count):
    return [seed * 10_000 + i for i in range(count)]


@pytest.fixture()
def chains(server):
    with certkv.Client(make_chain_spec(original_dtype="bfloat16"), server.target) as client:
        yield client


def test_blocks_come_back_bit_by_bit_in_another_client(server, chains):
    spec = chains.spec
    keys = chains.block_keys(tokens(1, 3 * BLOCK_TOKENS + 5), [b"a", b"b", b"c"])
    blocks = make_blocks(3, seed=1, scale=1000.0)
    blocks[0, :7] = [0x8000, 0x0001, 0x477F, 0xC77F, 0x0080, 0x3F80, 0x0000]  # -0, subnormal, 65280
    assert certkv.block_elements(spec) == blocks.shape[1]
    chain = chains.lookup_blocks(keys)
    assert chain.block_count == 0
    chain.append(keys[:1], blocks[:1])
    chain.append(keys[1:], blocks[1:])
    assert (chain.block_count, chain.shared_block_count) == (3, 0)
    with certkv.Client(spec, server.target) as other:
        found = other.lookup_blocks(other.block_keys(tokens(1, 384), [b"a", b"b", b"c"]))
        assert (found.block_count, found.shared_block_count) == (3, 3)
        out = np.zeros((2, blocks.shape[1]), np.uint16)
        found.copy(1, out)
        np.testing.assert_array_equal(out, blocks[1:])
        found.copy(0, out[:1])
        np.testing.assert_array_equal(out[0], blocks[0])
        found.check_lease()


def test_a_block_is_that_of_put_sequence(server):
    made = MadeSequence(BLOCK_TOKENS, seed=70)
    with certkv.Client(make_chain_spec(), server.target) as client:
        client.put_sequence(made.token_ids, made.layers)
        found = client.lookup_blocks(client.block_keys(made.token_ids))
        out = np.zeros((1, certkv.block_elements(client.spec)), np.uint16)
        found.copy(0, out)
        for layer, (keys, values) in enumerate(made.layers):
            stored = out.view(np.float16).reshape(SHAPE)[layer]
            np.testing.assert_array_equal(stored[:, 0], keys.transpose(1, 0, 2))
            np.testing.assert_array_equal(stored[:, 1], values.transpose(1, 0, 2))


def test_keys_depend_on_all_that_they_are_made_of(chains):
    ids = tokens(2, 2 * BLOCK_TOKENS)
    plain = chains.block_keys(ids)
    others = [
        chains.block_keys(ids, [b"x", b"y"]),
        chains.block_keys(ids, rank=1),
        chains.block_keys([7, *ids[1:]]),
        chains.block_keys(ids, parent=plain[0]),
    ]
    assert len({key for keys in [plain, *others] for key in keys}) == 10
    assert chains.block_keys(ids[BLOCK_TOKENS:], parent=plain[0]) == plain[1:]
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        chains.block_keys(ids, [b"x"])
    assert raised.value.reason == "BLOCK_KEYS_INVALID"
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        chains.block_keys(ids, [b"x" * 1025, b""])
    assert raised.value.reason == "BLOCK_KEYS_INVALID"
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        chains.block_keys(ids, parent=b"short")
    assert raised.value.reason == "DIGEST_SIZE"


def test_quantized_copies_are_near_and_not_the_originals(chains):
    keys = chains.block_keys(tokens(3, BLOCK_TOKENS))
    blocks = make_blocks(1, seed=3)
    chain = chains.lookup_blocks(keys)
    chain.append(keys, blocks)
    out = np.zeros_like(blocks)
    chain.copy(0, out, quantized=True)
    truth, decoded = (as_floats(bits).reshape(SHAPE).astype(np.float64) for bits in (blocks, out))
    # K8: half of a step of (max - min) / 255 over 64 tokens of a channel, and bf16's rounding.
    tiles = truth[:, :, 0].reshape(LAYERS, KV_HEADS, 2, 64, DIM)
    step = (tiles.max(axis=3) - tiles.min(axis=3)) / 255
    limit = 0.51 * step.max() + np.abs(truth[:, :, 0]) * 2**-8
    error = np.abs(decoded[:, :, 0] - truth[:, :, 0])
    assert np.all(error <= limit) and error.max() > 0.1 * step.min()
    # V4, rotated: a token's error is far below its norm, and far from nothing.
    error = np.linalg.norm(decoded[:, :, 1] - truth[:, :, 1], axis=-1)
    norm = np.linalg.norm(truth[:, :, 1], axis=-1)
    assert np.all(error < 0.25 * norm) and np.all(error > 0.01 * norm)


def test_what_the_formats_cannot_hold_is_refused_by_name(chains):
    keys = chains.block_keys(tokens(4, BLOCK_TOKENS))
    for bits, reason in ((0x4780, "KEY_OUT_OF_RANGE"), (0x7F80, "NON_FINITE_KEY")):  # 65536, inf
        blocks = make_blocks(1, seed=4)
        blocks[0, 5] = bits
        chain = chains.lookup_blocks(keys)
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            chain.append(keys, blocks)
        assert raised.value.reason == reason
        assert chain.block_count == 0


def test_arrays_of_another_shape_or_kind_are_refused(chains):
    keys = chains.block_keys(tokens(5, 2 * BLOCK_TOKENS))
    blocks = make_blocks(2, seed=5)
    chain = chains.lookup_blocks(keys)
    for wrong in (blocks[:1], blocks[:, :-1], blocks.astype(np.float32), blocks.view(np.float16)):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            chain.append(keys, wrong)
        assert raised.value.reason == "ARRAY_INVALID"
    chain.append(keys, blocks)
    frozen = np.zeros_like(blocks)
    frozen.setflags(write=False)
    for wrong in (frozen, np.zeros((1, 3), np.uint16), np.zeros(blocks.shape, np.float16)):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            chain.copy(0, wrong)
        assert raised.value.reason == "ARRAY_INVALID"
    out = np.zeros_like(blocks)
    for first in (-1, 1):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            chain.copy(first, out)
        assert raised.value.reason == "READ_INVALID"


def test_a_chain_with_a_hole_ends_at_it(server, chains):
    ids = tokens(6, 3 * BLOCK_TOKENS)
    keys = chains.block_keys(ids)
    chain = chains.lookup_blocks(keys[:1])
    chain.append(keys[:1], make_blocks(1, seed=6))
    # The parent of what is appended is the chain's last block, whatever the key says.
    assert chains.lookup_blocks(keys).block_count == 1
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        chain.append([b"short"], make_blocks(1, seed=6))
    assert raised.value.reason == "DIGEST_SIZE"


def test_a_copy_from_a_store_that_is_gone_is_an_error():
    with certkv.embedded() as own:
        client = certkv.Client(make_chain_spec(), own.target, rpc_timeout_ms=500)
        keys = client.block_keys(tokens(7, BLOCK_TOKENS))
        chain = client.lookup_blocks(keys)
        chain.append(keys, make_blocks(1, seed=7) & 0x3FFF)  # finite as float16 too
        client.close()
        with pytest.raises(certkv.FailedPreconditionError) as raised:
            chain.copy(0, np.zeros((1, certkv.block_elements(client.spec)), np.uint16))
        assert raised.value.reason == "OBJECT_CLOSED"


def flip_in_memory(pid, pattern):
    """Flips a bit of the first occurrence of `pattern` in each of a process's memfds; how many."""
    flipped = 0
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(
        f"/proc/{pid}/mem", "r+b", buffering=0
    ) as memory:
        for line in maps:
            if "memfd:" not in line or "rw" not in line:
                continue
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            memory.seek(first)
            at = memory.read(last - first).find(pattern)
            if at >= 0:
                memory.seek(first + at)
                memory.write(bytes([pattern[0] ^ 1]))
                flipped += 1
    return flipped


@pytest.mark.parametrize("quantized", [False, True])
def test_a_copy_of_changed_bytes_is_an_error(quantized):
    config = "kvstore:\n  device_memory: 4MiB\n  backing_memory: 4MiB\n"
    with certkv.embedded(config) as own, certkv.Client(make_chain_spec(), own.target) as client:
        keys = client.block_keys(tokens(8, BLOCK_TOKENS))
        chain = client.lookup_blocks(keys)
        chain.append(keys, make_blocks(1, seed=8) & 0x3FFF)
        out = np.zeros((1, certkv.block_elements(client.spec)), np.uint16)
        chain.copy(0, out)
        pattern = out[0, 500:532].tobytes()
        if quantized:
            # A tile's scan record has the lowest key of each channel, exact for float16.
            keys = out.view(np.float16).reshape(SHAPE)[0, 0, 0, :64]
            pattern = keys.min(axis=0)[:16].tobytes()
        assert flip_in_memory(own.pid, pattern) >= 1
        with pytest.raises(certkv.DataLossError) as raised:
            chain.copy(0, out, quantized=quantized)
        reason = "SCAN_CHECKSUM" if quantized else "ORIGINAL_CHECKSUM_MISMATCH"
        assert raised.value.reason == reason

