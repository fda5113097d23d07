"""A client has its store fetch a prefix from another store, and reads it as if it were put there."""

import asyncio
import socket

import certkv
import numpy as np
import pytest
from certkv import aio
from conftest import MadeSequence, make_queries, make_spec
from restartable_store import wait_until

TOKENS = 200  # three whole blocks and a rest


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture()
def stores():
    """Two stores of which the second may pull from the first, and the first's bulk address."""
    peer = f"127.0.0.1:{unused_port()}"
    secured = "server:\n  tcp_security: insecure\nkvstore:\n"
    with certkv.embedded(f"{secured}  bulk_address: {peer}\n") as source:
        with certkv.embedded(f"{secured}  bulk_peers: {peer}\n") as target:
            yield source, target, peer


@pytest.fixture()
def clients(stores):
    source, target, peer = stores
    with certkv.Client(make_spec(), source.target) as there:
        with certkv.Client(make_spec(), target.target) as here:
            yield there, here, peer


@pytest.mark.parametrize("order", ["whole", "originals-later", "originals-only"])
def test_a_pulled_prefix_is_found_and_reads_the_same(clients, request_id, order):
    there, here, peer = clients
    made = MadeSequence(TOKENS, seed=80)
    put = there.put_sequence(made.token_ids, made.layers)
    assert here.lookup(made.token_ids).block_count == 0
    pulled = here.pull(peer, np.array(made.token_ids, np.int32), order)
    assert (pulled.block_count, pulled.token_count, pulled.tail_count) == (3, 192, 0)
    assert pulled.token_ids == made.token_ids[:192]
    found = []

    def has_originals():
        found[:] = [here.lookup(made.token_ids)]
        try:
            keys = [found[0].originals(1, block)[0] for block in range(3)]
        except certkv.FailedPreconditionError as error:
            assert error.reason == "ORIGINAL_MISSING" and order == "originals-later"
            return False
        for block, got in enumerate(keys):
            sealed = made.layers[1][0][64 * block : 64 * (block + 1)].transpose(1, 0, 2)
            np.testing.assert_array_equal(got, sealed)
        return True

    assert wait_until(has_originals)
    queries = make_queries(80)
    reads = []
    for client, sequence in ((there, put), (here, found[0])):
        with client.open_request(f"{request_id}-{len(reads)}") as request:
            reads.append(client.attention(sequence, request).attend(0, 191, queries))
    assert reads[1].outputs.tobytes() == reads[0].outputs.tobytes()
    assert reads[1].certificates.tobytes() == reads[0].certificates.tobytes()


def test_what_the_peer_lacks_ends_the_prefix(clients):
    there, here, peer = clients
    made = MadeSequence(TOKENS, seed=81)
    assert here.pull(peer, made.token_ids).block_count == 0
    there.put_sequence(made.token_ids[:128], made.first(128))
    assert here.pull(peer, made.token_ids).block_count == 2


def test_a_peer_that_is_not_configured_is_refused(clients):
    _, here, _ = clients
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        here.pull("127.0.0.1:1", MadeSequence(64, seed=82).token_ids)
    assert raised.value.reason == "BULK_PEER_UNKNOWN"


def test_a_peer_that_is_gone_is_unavailable(stores):
    source, target, peer = stores
    source.close()
    with certkv.Client(make_spec(), target.target) as here:
        with pytest.raises(certkv.UnavailableError) as raised:
            here.pull(peer, MadeSequence(64, seed=83).token_ids)
        assert raised.value.reason == "BULK_DISCONNECTED"


def test_an_order_that_is_none_is_refused(clients):
    _, here, peer = clients
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        here.pull(peer, [1] * 64, "never")
    assert raised.value.reason == "PULL_ORDER_UNKNOWN"
    assert "whole, originals-later, originals-only" in raised.value.message


def test_it_is_a_coroutine_too(stores):
    source, target, peer = stores
    made = MadeSequence(64, seed=84)
    with certkv.Client(make_spec(), source.target) as there:
        there.put_sequence(made.token_ids, made.layers)

    async def run():
        async with await aio.connect(make_spec(), target.target) as here:
            async with await here.pull(peer, made.token_ids, order="whole") as pulled:
                return pulled.blocking.block_count

    assert asyncio.run(run()) == 1
