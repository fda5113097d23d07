"""What the tests share: a server, a small cache, sequences, and exact attention in double."""

import itertools

import certkv
import numpy as np
import pytest

LAYERS = 2
KV_HEADS = 2
GROUP = 3
DIM = 64
_request_ids = itertools.count()


def make_spec(key_format="K8", value_format="V4", model="python-test", **others):
    return certkv.CacheSpec.uniform(
        model,
        layer_count=LAYERS,
        kv_head_count=KV_HEADS,
        group_size=GROUP,
        head_dim=DIM,
        key_format=key_format,
        value_format=value_format,
        **others,
    )


class MadeSequence:
    """Random tokens, keys and values, drawn from `seed`."""

    def __init__(self, token_count, seed, dtype=np.float16):
        random = np.random.default_rng(seed)
        self.token_ids = [seed * 100_000 + i for i in range(token_count)]
        shape = (token_count, KV_HEADS, DIM)
        self.layers = [
            (
                random.standard_normal(shape, np.float32).astype(dtype),
                random.standard_normal(shape, np.float32).astype(dtype),
            )
            for _ in range(LAYERS)
        ]

    def layers_at(self, token):
        return [(keys[token], values[token]) for keys, values in self.layers]

    def first(self, count):
        return [(keys[:count], values[:count]) for keys, values in self.layers]


def make_queries(seed, sharpness=2.0):
    random = np.random.default_rng(seed)
    return sharpness * random.standard_normal((KV_HEADS * GROUP, DIM), np.float32)


def exact_attention(layer, position, queries):
    """[query heads, DIM] and the softmax [query heads, tokens], in double, by the definition."""
    keys, values = (np.asarray(array[: position + 1], np.float64) for array in layer)
    outputs, softmax = [], []
    for head, query in enumerate(np.asarray(queries, np.float64)):
        logits = keys[:, head // GROUP] @ query / np.sqrt(DIM)
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        softmax.append(weights)
        outputs.append(weights @ values[:, head // GROUP])
    return np.array(outputs), np.array(softmax)


@pytest.fixture(scope="session")
def server():
    with certkv.embedded() as running:
        yield running


@pytest.fixture()
def client(server):
    with certkv.Client(make_spec(), server.target) as attached:
        yield attached


@pytest.fixture()
def request_id():
    return f"python-test-{next(_request_ids)}"
