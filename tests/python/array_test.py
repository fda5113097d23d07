"""Arrays: what is taken without a copy, and what is refused by name."""

import array as stdlib_array
import ctypes
import gc

import certkv
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, LAYERS, MadeSequence, make_queries, make_spec

TOKENS = 64


@pytest.fixture()
def made():
    return MadeSequence(TOKENS, seed=40)


def put_with(client, made, keys):
    layers = list(made.layers)
    layers[1] = (keys, layers[1][1])
    return client.put_sequence(made.token_ids, layers)


def refused(call):
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        call()
    assert raised.value.reason == "ARRAY_INVALID"
    assert raised.value.code == "INVALID_ARGUMENT"
    return raised.value.message


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda k: k.astype(np.float32), "keys of layer 1 is float32, must be float16 or uint16"),
        (lambda k: k.astype(np.float64), "keys of layer 1 has the element format 'd'"),
        (lambda k: k.astype(">f2"), "keys of layer 1 has the element format '>e'"),
        (lambda k: k[:-1], "keys of layer 1 has the shape (63, 2, 64), must be (64, 2, 64)"),
        (lambda k: k[:, :, :32].copy(), "keys of layer 1 has the shape (64, 2, 32)"),
        (lambda k: k[0], "keys of layer 1 has the shape (2, 64)"),
        (lambda k: k[::-1], "keys of layer 1 has strides of (-256, 128, 2)"),
        (lambda k: np.asfortranarray(k), "must be C-contiguous"),
        (lambda k: k.transpose(1, 0, 2), "must be C-contiguous"),
        (lambda k: k.tolist(), "keys of layer 1 is a list; pass a NumPy array"),
        (lambda k: None, "keys of layer 1 is a NoneType"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(client, made, change, says):
    assert says in refused(lambda: put_with(client, made, change(made.layers[1][0])))


def test_misaligned_memory_is_refused(client, made):
    raw = np.zeros(made.layers[1][0].nbytes + 1, np.uint8)
    keys = raw[1:].view(np.float16) if raw.ctypes.data % 2 == 0 else raw[:-1].view(np.float16)
    keys = keys.reshape(TOKENS, KV_HEADS, DIM)
    assert "is not aligned" in refused(lambda: put_with(client, made, keys))


def test_layers_that_are_no_pairs_are_refused(client, made):
    layers = [made.layers[0], made.layers[1][0]]
    assert "layers[1] must be a pair" in refused(
        lambda: client.put_sequence(made.token_ids, layers)
    )


def test_a_wrong_number_of_layers_is_refused(client, made):
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        client.put_sequence(made.token_ids, made.layers[:1])
    assert raised.value.reason == "SEQUENCE_INVALID"


def test_numbers_that_are_not_finite_are_refused_with_their_place(client, made):
    keys = made.layers[1][0].copy()
    keys[7, 1, 3] = np.nan
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        put_with(client, made, keys)
    assert raised.value.reason == "NON_FINITE_KEY"


@pytest.mark.parametrize(
    "token_ids", [[1, -1], [1, 2**31], [1, 2**80], [1, 2.0], [1, "a"], ["1"]]
)
def test_token_ids_that_are_none_are_refused(client, token_ids):
    assert f"token_ids[{len(token_ids) - 1}] is" in refused(lambda: client.lookup(token_ids))


def test_token_ids_of_another_dtype_are_refused(client):
    assert "token_ids" in refused(lambda: client.lookup(np.array([1, 2], np.int64)))


def test_queries_are_checked_as_well(client, made):
    sequence = client.put_sequence(made.token_ids, made.layers)
    queries = make_queries(1)
    for wrong in (queries.astype(np.float16), queries[:, ::2], queries[:-1], queries.T):
        assert "queries of read 0" in refused(lambda: sequence.attend_exact(0, 63, wrong))
    sinks = np.zeros(5, np.float32)
    assert "sink_logits of read 0" in refused(
        lambda: sequence.attend_exact(0, 63, queries, sinks)
    )


def test_anything_with_the_buffer_protocol_is_taken(client, made):
    layers = [
        tuple(stdlib_array.array("H", array.tobytes()) for array in layer) for layer in made.layers
    ]
    # One axis is no [tokens, heads, channels]; a memoryview can say so.
    with pytest.raises(certkv.InvalidArgumentError):
        client.put_sequence(made.token_ids, layers)
    shape = (TOKENS, KV_HEADS, DIM)
    views = [
        tuple(memoryview(array).cast("B").cast("H", shape) for array in layer) for layer in layers
    ]
    sequence = client.put_sequence(made.token_ids, views)
    np.testing.assert_array_equal(
        sequence.originals(0, 0)[0], made.layers[0][0].transpose(1, 0, 2)
    )


class Dlpack:
    """A tensor that speaks DLPack alone, over a NumPy array."""

    def __init__(self, array, device=(1, 0)):
        self.array = array
        self.device = device
        self.exports = 0

    def __dlpack__(self, stream=None):
        self.exports += 1
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def references(array):
    return ctypes.c_ssize_t.from_address(id(array)).value


def test_dlpack_tensors_are_borrowed_and_given_back(client, made):
    layers = [tuple(Dlpack(array) for array in layer) for layer in made.layers]
    before = references(made.layers[0][0])
    sequence = client.put_sequence(made.token_ids, layers)
    after = references(made.layers[0][0])  # not in the assert, which holds what it looks at
    assert after == before
    assert [tensor.exports for layer in layers for tensor in layer] == [1] * 2 * LAYERS
    np.testing.assert_array_equal(
        sequence.originals(1, 0)[1], made.layers[1][1].transpose(1, 0, 2)
    )
    queries = make_queries(2)
    taken = sequence.attend_exact(0, 63, Dlpack(queries)).outputs
    np.testing.assert_array_equal(taken, sequence.attend_exact(0, 63, queries).outputs)


def test_dlpack_tensors_that_are_refused_are_given_back_too(client, made):
    strided = made.layers[1][0].transpose(1, 0, 2)
    before = references(strided)
    assert "must be C-contiguous" in refused(lambda: put_with(client, made, Dlpack(strided)))
    gc.collect()  # the exception and its frames
    after = references(strided)
    assert after == before
    on_gpu = Dlpack(made.layers[1][0], device=(2, 0))
    assert "DLPack device type 2" in refused(lambda: put_with(client, made, on_gpu))
    assert on_gpu.exports == 0


def test_specs_are_checked_when_they_are_made():
    for change, says in (
        ({"key_format": "K9"}, "key_format is 'K9', must be one of K8, K8D, K6, K4"),
        ({"rope_pairing": "split"}, "rope_pairing is 'split'"),
        ({"original_dtype": "float32"}, "original_dtype is 'float32'"),
        ({"block_tokens": 100}, "block_tokens"),
        ({"block_tokens": "64"}, "block_tokens is '64', which is of a wrong type"),
        ({"logit_scale": float("nan")}, "logit_scale"),
    ):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            make_spec(**change)
        assert raised.value.reason == "CACHE_SPEC_INVALID"
        assert says in raised.value.message


def test_specs_of_equal_fields_have_equal_digests():
    assert make_spec().digest == make_spec().digest
    assert len(make_spec().digest) == 32
    assert make_spec().digest != make_spec(rope_theta=500000.0).digest
