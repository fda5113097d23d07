"""PagedCache: blocks sealed straight from an engine's pages, of NumPy's and DLPack's arrays."""

import gc
import threading
import weakref

import certkv
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, LAYERS, make_queries, make_spec

PAGES = 24
TOKENS = 16  # of a page
COUNT = 300
LETTERS = {"L": LAYERS, "K": 2, "B": PAGES, "H": KV_HEADS, "T": TOKENS, "D": DIM}


@pytest.fixture()
def numbers():
    """[L, K, B, H, T, D], every one another bit pattern within its plane's neighbours."""
    random = np.random.default_rng(5)
    return random.standard_normal([LETTERS[a] for a in "LKBHTD"], np.float32).astype(np.float16)


@pytest.fixture()
def pages():
    return np.random.default_rng(6).permutation(PAGES).astype(np.int32)


def lay(numbers, axes):
    """Tensors of these axes, each in memory of its own."""
    whole = numbers
    parts = [whole] if "L" in axes else list(whole)
    if "K" not in axes:
        parts = [half for part in parts for half in np.moveaxis(part, 1 if "L" in axes else 0, 0)]
    names = "".join(a for a in "LKBHTD" if a in axes)
    return [np.ascontiguousarray(part.transpose([names.index(a) for a in axes])) for part in parts]


def rows_of(numbers, pages, count=COUNT):
    """(keys, values) of each layer, [tokens, heads, channels]."""
    rows = numbers[:, :, pages].transpose(0, 1, 2, 4, 3, 5).reshape(LAYERS, 2, -1, KV_HEADS, DIM)
    return [tuple(np.ascontiguousarray(part[:count]) for part in layer) for layer in rows]


def ids_of(seed, count=COUNT):
    """Of this file alone: all tests share one store, and the other files' ids are below these."""
    return [500_000_000 + seed * 100_000 + i for i in range(count)]


class Tensor:
    """A tensor that has DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


LAYOUTS = "KBTHD BKTHD KBHTD BKHTD BTHD BHTD LKBTHD BLKHTD LBTHD BHDT".split()


@pytest.mark.parametrize("axes", LAYOUTS)
def test_pages_give_the_originals_of_their_rows(client, numbers, pages, axes):
    ids = ids_of(100 + LAYOUTS.index(axes))
    cache = certkv.PagedCache.from_tensors(client.spec, axes, lay(numbers, axes))
    assert (cache.page_tokens, cache.page_count) == (TOKENS, PAGES)
    with client.put_paged(ids, cache, pages) as sequence:
        assert (sequence.block_count, sequence.tail_count) == (4, 44)
        for layer, rows in enumerate(rows_of(numbers, pages)):
            for block in range(4):
                for part, original in enumerate(sequence.originals(layer, block)):
                    wanted = rows[part][64 * block : 64 * block + 64].transpose(1, 0, 2)
                    np.testing.assert_array_equal(original, wanted)


def test_reads_of_a_paged_sequence_are_those_of_its_rows(client, numbers, pages):
    cache = certkv.PagedCache.from_tensors(client.spec, "KBTHD", lay(numbers, "KBTHD"))
    one = client.put_paged(ids_of(1), cache, list(map(int, pages)))
    two = client.put_sequence(ids_of(2), rows_of(numbers, pages))
    for layer in range(LAYERS):
        reads = [s.attend_exact(layer, COUNT - 1, make_queries(layer)) for s in (one, two)]
        np.testing.assert_array_equal(reads[0].outputs, reads[1].outputs)


def test_strides_of_views_are_taken_as_they_are(client, numbers, pages):
    # One allocation that has keys and values in halves of an axis, as engines cut it.
    (tensor,) = lay(numbers, "LBHTKD")
    views = [half for layer in tensor for half in (layer[..., 0, :], layer[..., 1, :])]
    cache = certkv.PagedCache.from_tensors(client.spec, "BHTD", [Tensor(v) for v in views])
    sequence = client.put_paged(ids_of(3), cache, pages)
    keys, values = sequence.originals(1, 2)
    rows = rows_of(numbers, pages)[1]
    np.testing.assert_array_equal(keys, rows[0][128:192].transpose(1, 0, 2))
    np.testing.assert_array_equal(values, rows[1][128:192].transpose(1, 0, 2))


def test_codes_of_eight_bits_are_products_with_their_scales(client, pages):
    codes = np.random.default_rng(7).integers(0, 0x7F, (LAYERS, 2, PAGES, TOKENS, KV_HEADS, DIM))
    cache = certkv.PagedCache.from_tensors(
        client.spec,
        "KBTHD",
        list(codes.astype(np.uint8)),
        dtype="float8_e4m3",
        key_scales=[0.25, 2.0],
        value_scales=[0.5],
    )
    sequence = client.put_paged(ids_of(4), cache, pages)
    exponent, mantissa = codes >> 3, codes & 7
    magnitude = np.where(
        exponent > 0, (8.0 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9
    )
    scaled = magnitude * np.array([[0.25, 0.5], [2.0, 0.5]]).reshape(2, 2, 1, 1, 1, 1)
    for layer in range(LAYERS):
        for part, original in enumerate(sequence.originals(layer, 1)):
            wanted = scaled[layer, part][pages].reshape(-1, KV_HEADS, DIM)[64:128]
            np.testing.assert_array_equal(original, wanted.transpose(1, 0, 2).astype(np.float16))


def test_an_order_that_was_learnt_is_followed(client, numbers, pages):
    places = np.random.default_rng(8).permutation(DIM).astype(np.int32)
    token_places = (np.arange(TOKENS, dtype=np.int32)[::-1] * DIM).copy()
    tensors = []
    for layer in numbers:
        blocks = np.empty((PAGES, KV_HEADS, 2, TOKENS * DIM), np.uint16)
        for token in range(TOKENS):
            where = token_places[token] + places
            blocks[..., where] = layer[:, :, :, token].transpose(1, 2, 0, 3).view(np.uint16)
        tensors.append(blocks)
    order = (token_places, places)
    cache = certkv.PagedCache.from_tensors(
        client.spec, "BHKE", tensors, key_order=order, value_order=order
    )
    sequence = client.put_paged(ids_of(9), cache, pages)
    keys, _ = sequence.originals(0, 0)
    np.testing.assert_array_equal(keys, rows_of(numbers, pages)[0][0][:64].transpose(1, 0, 2))


def test_blocks_are_appended_by_key_and_staged_ahead(client, numbers, pages):
    cache = certkv.PagedCache.from_tensors(client.spec, "KBTHD", lay(numbers, "KBTHD"))
    keys = client.block_keys(ids_of(10))
    chain = client.lookup_blocks(keys)
    chain.append_paged(keys[:2], cache, pages)
    staged = client.stage_blocks(cache, pages, 64, 3)
    staged.drop_first(1)
    assert staged.block_count == 2
    before = cache._tensors[0].copy()
    for tensor in cache._tensors:
        tensor[:] = 0  # the engine goes on
    chain.append_staged(keys[2:], staged)
    assert staged._native.is_closed
    out = np.empty((4, certkv.block_elements(client.spec)), np.uint16)
    chain.copy(0, out)
    numbers_of = out.view(np.float16).reshape(4, LAYERS, KV_HEADS, 2, 64, DIM)
    rows = rows_of(numbers, pages)
    for block in range(4):
        wanted = rows[0][0][64 * block : 64 * block + 64].transpose(1, 0, 2)
        np.testing.assert_array_equal(numbers_of[block, 0, :, 0], wanted)
    assert before.any()
    with pytest.raises(certkv.FailedPreconditionError, match="was closed"):
        chain.append_staged(keys[2:], staged)


def test_staged_blocks_give_their_slots_back(server, numbers, pages):
    with certkv.Client(
        make_spec(), server.target, staging_slot_count=4, pressure_wait_ms=0
    ) as client:
        cache = certkv.PagedCache.from_tensors(client.spec, "KBTHD", lay(numbers, "KBTHD"))
        staged = client.stage_blocks(cache, pages, 0, 4)
        with pytest.raises(certkv.ResourceExhaustedError) as raised:
            client.stage_blocks(cache, pages, 0, 1)
        assert raised.value.reason == "STAGING_FULL"
        staged.close()
        client.stage_blocks(cache, pages, 0, 4).close()
        keys = client.block_keys(ids_of(11))
        with pytest.raises(certkv.InvalidArgumentError):
            client.lookup_blocks(keys).append_staged(keys[:1], client.stage_blocks(cache, pages, 0, 2))
        client.stage_blocks(cache, pages, 0, 4).close()


@pytest.mark.parametrize(
    "change, reason, message",
    [
        (dict(axes="KBTH"), "PAGED_CACHE_INVALID", "at least once or E alone"),
        (dict(axes="KBHTD"), "PAGED_CACHE_INVALID", "KV heads"),
        (dict(dtype="float32"), "PAGED_CACHE_INVALID", "dtype is 'float32'"),
        (dict(dtype="bfloat16"), "ARRAY_INVALID", "tensor 0 is float16, must be bfloat16 or uint16"),
        (dict(dtype="float8_e4m3"), "ARRAY_INVALID", "must be uint8"),
        (dict(key_scales=[1.0]), "PAGED_CACHE_INVALID", "scales are for FP8"),
        (dict(tensors=[]), "PAGED_CACHE_INVALID", "has 0 tensors, must have 2"),
        (dict(tensors=["a", "b"]), "ARRAY_INVALID", "is a str"),
    ],
)
def test_what_is_no_cache_of_the_spec_is_refused_by_name(client, numbers, change, reason, message):
    given = dict(axes="KBTHD", tensors=lay(numbers, "KBTHD"))
    given.update(change)
    with pytest.raises(certkv.InvalidArgumentError, match=message) as raised:
        certkv.PagedCache.from_tensors(client.spec, given.pop("axes"), given.pop("tensors"), **given)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "scale, reason", [(0.1, "FP8_SCALE_INEXACT"), (float("nan"), "FP8_SCALE_INVALID")]
)
def test_a_scale_that_would_round_is_refused_with_one_that_does_not(client, scale, reason):
    codes = [np.zeros((2, PAGES, TOKENS, KV_HEADS, DIM), np.uint8) for _ in range(LAYERS)]
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        certkv.PagedCache.from_tensors(
            client.spec, "KBTHD", codes, dtype="float8_e4m3", key_scales=[scale], value_scales=[1]
        )
    assert raised.value.reason == reason
    assert reason == "FP8_SCALE_INVALID" or "0.125" in raised.value.message


def test_a_wrong_table_is_refused_and_nothing_is_stored(client, numbers, pages):
    cache = certkv.PagedCache.from_tensors(client.spec, "KBTHD", lay(numbers, "KBTHD"))
    wrong = pages.copy()
    wrong[12] = PAGES
    for table in (wrong, pages[:18], pages[:0]):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            client.put_paged(ids_of(12), cache, table)
        assert raised.value.reason == "BLOCK_TABLE_INVALID"
    with pytest.raises(certkv.InvalidArgumentError, match="pages is int64|element format 'l'"):
        client.put_paged(ids_of(12), cache, pages.astype(np.int64))
    assert client.lookup(ids_of(12)).block_count == 0


def test_a_cache_holds_its_tensors_and_no_longer(client, numbers):
    tensors = [Tensor(array) for array in lay(numbers, "KBTHD")]
    watched = weakref.ref(tensors[0])
    cache = certkv.PagedCache.from_tensors(client.spec, "KBTHD", tensors)
    del tensors
    gc.collect()
    assert watched() is not None
    del cache
    gc.collect()
    assert watched() is None


def test_other_threads_run_while_pages_are_sealed(client, numbers, pages):
    cache = certkv.PagedCache.from_tensors(client.spec, "KBTHD", lay(numbers, "KBTHD"))
    ticks, done = [0], threading.Event()

    def tick():
        while not done.is_set():
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    seen = ticks[0]
    for seed in range(20, 30):
        client.put_paged(ids_of(seed), cache, pages).close()
    seen = ticks[0] - seen
    done.set()
    thread.join()
    assert seen > 1000
