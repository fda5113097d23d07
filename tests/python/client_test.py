"""Putting, finding, mapped memory, and the life of objects."""

import gc
import os

import certkv
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, MadeSequence, make_queries, make_spec


def test_a_second_client_shares_the_blocks(server):
    made = MadeSequence(200, seed=20)
    with certkv.Client(make_spec(), server.target) as one:
        with certkv.Client(make_spec(), server.target) as two:
            first = one.put_sequence(made.token_ids, made.layers)
            second = two.put_sequence(made.token_ids, made.layers)
            assert (first.block_count, first.shared_block_count) == (3, 0)
            assert (second.block_count, second.shared_block_count) == (3, 3)
            assert (second.token_count, second.tail_count) == (200, 8)


def test_lookup_finds_the_longest_prefix_of_whole_blocks(client):
    made = MadeSequence(200, seed=21)
    assert client.lookup(made.token_ids).block_count == 0
    sequence = client.put_sequence(made.token_ids, made.layers)
    other = made.token_ids[:130] + [7] * 70
    found = client.lookup(np.array(other, np.int32))
    assert (found.block_count, found.token_count, found.tail_count) == (2, 128, 0)
    assert found.token_ids == made.token_ids[:128]
    sequence.check_lease()


def test_another_spec_shares_nothing(server):
    made = MadeSequence(128, seed=22)
    with certkv.Client(make_spec(), server.target) as one:
        one.put_sequence(made.token_ids, made.layers)
        with certkv.Client(make_spec(model="another"), server.target) as two:
            assert two.lookup(made.token_ids).block_count == 0


def test_originals_are_views_of_mapped_memory(client):
    made = MadeSequence(128, seed=23)
    sequence = client.put_sequence(made.token_ids, made.layers)
    keys, values = sequence.originals(1, 1)
    assert keys.shape == (KV_HEADS, 64, DIM) and keys.dtype == np.float16
    np.testing.assert_array_equal(keys, made.layers[1][0][64:].transpose(1, 0, 2))
    np.testing.assert_array_equal(values, made.layers[1][1][64:].transpose(1, 0, 2))
    # The address lies in a shared mapping of the store, and asking again gives the same one.
    address = keys.__array_interface__["data"][0]
    assert address == sequence.originals(1, 1)[0].__array_interface__["data"][0]
    assert "memfd:" in mapping_of(address)
    assert not keys.flags.writeable
    with pytest.raises(ValueError):
        keys[0, 0, 0] = 1
    with pytest.raises(ValueError):
        keys.setflags(write=True)


def mapping_of(address):
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return line
    return ""


def test_views_outlive_the_objects_they_came_from(server):
    made = MadeSequence(128, seed=24)
    client = certkv.Client(make_spec(), server.target)
    sequence = client.put_sequence(made.token_ids, made.layers)
    keys, _ = sequence.originals(0, 0)
    sequence.close()
    client.close()
    del sequence, client
    gc.collect()
    np.testing.assert_array_equal(keys, made.layers[0][0][:64].transpose(1, 0, 2))


def test_outputs_are_not_copied_and_outlive_the_read(client):
    made = MadeSequence(100, seed=25)
    read = client.put_sequence(made.token_ids, made.layers).attend_exact(0, 99, make_queries(1))
    one, two = read.outputs, read.outputs
    assert one.__array_interface__["data"] == two.__array_interface__["data"]
    copy = one.copy()
    del read, two
    gc.collect()
    np.testing.assert_array_equal(one, copy)
    np.testing.assert_array_equal(np.from_dlpack(one), copy)


def test_bfloat16_is_taken_as_its_bits(server):
    made = MadeSequence(128, seed=26, dtype=np.float32)
    bits = [
        tuple((array.view(np.uint32) >> 16).astype(np.uint16) for array in layer)
        for layer in made.layers
    ]
    spec = make_spec(model="bf16", original_dtype="bfloat16")
    with certkv.Client(spec, server.target) as client:
        sequence = client.put_sequence(made.token_ids, bits)
        np.testing.assert_array_equal(
            sequence.originals(0, 0)[0], bits[0][0][:64].transpose(1, 0, 2)
        )


def test_pins_are_the_stores_to_refuse(client):
    made = MadeSequence(64, seed=27)
    sequence = client.put_sequence(made.token_ids, made.layers)
    sequence.pin(ttl_ms=60_000)
    sequence.unpin()
    with certkv.embedded("kvstore:\n  pinned_percent_max: 0\n") as own:
        with certkv.Client(make_spec(), own.target) as other:
            sequence = other.put_sequence(made.token_ids, made.layers)
            with pytest.raises(certkv.ResourceExhaustedError) as raised:
                sequence.pin()
            assert raised.value.reason == "PIN_LIMIT"
            sequence.unpin()


@pytest.mark.parametrize("kind", ["client", "sequence", "request", "attention"])
def test_closed_objects_say_so(server, request_id, kind):
    made = MadeSequence(64, seed=28)
    with certkv.Client(make_spec(), server.target) as client:
        objects = {"client": client}
        objects["sequence"] = client.put_sequence(made.token_ids, made.layers)
        objects["request"] = client.open_request(request_id)
        objects["attention"] = client.attention(objects["sequence"], objects["request"])
        objects[kind].close()
        objects[kind].close()
        calls = {
            "client": lambda: client.lookup([1]),
            "sequence": objects["sequence"].check_lease,
            "request": objects["request"].risk,
            "attention": objects["attention"].refresh,
        }
        with pytest.raises(certkv.FailedPreconditionError) as raised:
            calls[kind]()
        assert raised.value.reason == "OBJECT_CLOSED"
        assert kind.capitalize() in raised.value.message


def test_a_closed_client_frees_its_session(server):
    # The server allows 256 sessions; more than that would be refused if one stayed.
    made = MadeSequence(64, seed=29)
    for _ in range(280):
        with certkv.Client(make_spec(), server.target, staging_slot_count=1) as client:
            client.lookup(made.token_ids)


def test_a_forked_child_may_not_use_the_client_nor_end_its_session(client):
    made = MadeSequence(64, seed=30)
    sequence = client.put_sequence(made.token_ids, made.layers)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            client.lookup([1])
        except certkv.FailedPreconditionError as error:
            status = 0 if error.reason == "PROCESS_FORKED" else 2
        sequence.close()
        client.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sequence.check_lease()
    assert client.lookup(made.token_ids).block_count == 1
