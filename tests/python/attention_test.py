"""Reads against exact attention in double."""

import threading
import time

import certkv
import numpy as np
import pytest
from conftest import LAYERS, MadeSequence, exact_attention, make_queries, make_spec

# What float arithmetic of the kernels may do to an exact output, relative to the values (which are
# of size one here): far below any quantization.
EXACT_SLACK = 1e-4


def errors_of(made, layer, position, queries, read):
    truth, _ = exact_attention(made.layers[layer], position, queries)
    return np.linalg.norm(truth - read.outputs, axis=1)


@pytest.mark.parametrize("formats", [("K8", "V4"), ("K6", "V4"), ("K4", "V4"), ("FP8_E4M3", "V8")])
def test_bounds_cover_the_truth_and_are_not_vacuous(server, request_id, formats):
    made = MadeSequence(300, seed=1)
    spec = make_spec(*formats)
    with certkv.Client(spec, server.target) as client:
        sequence = client.put_sequence(made.token_ids, made.layers)
        request = client.open_request(request_id)
        attention = client.attention(sequence, request)
        shares = []
        for layer in range(LAYERS):
            for position in (63, 64, 200, 299):
                queries = make_queries(seed=position)
                read = attention.attend(layer, position, queries)
                error = errors_of(made, layer, position, queries, read)
                bound = read.certificates["output_error_bound"]
                assert np.all(error <= bound + 1e-12), (layer, position, error, bound)
                assert np.all(np.isfinite(bound))
                shares.append((error / bound).max())
                assert set(read.certificates["outcome"]) <= {
                    certkv.Outcome.CERTIFIED,
                    certkv.Outcome.EXACT,
                }
        # A bound a thousand times its truth would say nothing.
        assert max(shares) > 0.02, shares


def test_records_are_laid_out_as_their_dtype_says(server, request_id):
    made = MadeSequence(70, seed=44)
    with certkv.Client(make_spec(), server.target) as client:
        sequence = client.put_sequence(made.token_ids, made.layers)
        attention = client.attention(sequence, client.open_request(request_id))
        read = attention.attend(1, 69, make_queries(seed=5))
        records = read.certificates
        # NumPy 2 moved the item size in its structures, see docs/decisions/0051.
        assert records.strides == (certkv.CERTIFICATE_DTYPE.itemsize,)
        assert records["query_head"].tolist() == list(range(len(records)))
        assert set(records["layer"]) == {1} and set(records["query_position"]) == {69}
        assert read.outputs.strides == (4 * read.outputs.shape[1], 4)


def test_tolerance_decides_how_far_a_read_is_repaired(server, request_id):
    made = MadeSequence(256, seed=2)
    with certkv.Client(make_spec("K4", "V4"), server.target) as client:
        sequence = client.put_sequence(made.token_ids, made.layers)
        queries = make_queries(seed=3, sharpness=4)
        loose = client.open_request(request_id + "-loose", tv_tolerance=0.2)
        tight = client.open_request(request_id + "-tight", tv_tolerance=0.01)
        for request, tolerance in ((loose, 0.2), (tight, 0.01)):
            read = client.attention(sequence, request).attend(0, 255, queries)
            records = read.certificates
            exact = records["outcome"] == certkv.Outcome.EXACT
            assert np.all(exact | (records["worst_case_tv"] <= tolerance))
            error = errors_of(made, 0, 255, queries, read)
            assert np.all(error <= records["output_error_bound"] + 1e-12)
        first = client.attention(sequence, tight).attend(0, 255, queries).certificates
        assert np.any(first["first_worst_case_tv"] > 0.01), "nothing had to be repaired"
        assert np.all(first["rung"][first["first_worst_case_tv"] > 0.01] > certkv.Rung.NONE)


def test_exact_reads_in_process_are_exact(client):
    made = MadeSequence(200, seed=4)
    sequence = client.put_sequence(made.token_ids, made.layers)
    queries = make_queries(seed=5)
    read = sequence.attend_exact(1, 199, queries)
    assert read.in_process
    assert np.all(errors_of(made, 1, 199, queries, read) < EXACT_SLACK)
    assert np.all(read.certificates["outcome"] == certkv.Outcome.EXACT)
    # The truth of another layer is another one, or the comparison would show nothing.
    assert np.all(errors_of(made, 0, 199, queries, read) > 0.01)


def test_ungoverned_requests_read_exactly(client):
    made = MadeSequence(130, seed=6)
    sequence = client.put_sequence(made.token_ids, made.layers)
    request = certkv.Request.ungoverned("no-gate")
    queries = make_queries(seed=7)
    read = client.attention(sequence, request).attend(0, 129, queries)
    assert np.all(read.certificates["outcome"] == certkv.Outcome.EXACT)
    assert np.all(errors_of(made, 0, 129, queries, read) < EXACT_SLACK)


def test_appended_tokens_are_read_after_a_refresh(client, request_id):
    made = MadeSequence(130, seed=8)
    sequence = client.put_sequence(made.token_ids[:126], made.first(126))
    attention = client.attention(sequence, client.open_request(request_id))
    for token in range(126, 130):  # token 127 fills the second block, which is sealed
        sequence.append(made.token_ids[token], made.layers_at(token))
        attention.refresh()
        queries = make_queries(seed=token)
        read = attention.attend(0, token, queries)
        error = errors_of(made, 0, token, queries, read)
        assert np.all(error <= read.certificates["output_error_bound"] + 1e-12)
    assert sequence.block_count == 2
    assert sequence.tail_count == 2
    assert sequence.token_ids == made.token_ids


def test_many_reads_come_back_in_order(client, request_id):
    made = MadeSequence(128, seed=9)
    sequence = client.put_sequence(made.token_ids, made.layers)
    attention = client.attention(sequence, client.open_request(request_id))
    asked = [
        certkv.ReadRequest(layer, position, make_queries(seed=position))
        for layer in range(LAYERS)
        for position in (5, 64, 127)
    ]
    reads = attention.attend_many(asked)
    for request, read in zip(asked, reads):
        assert read.error is None
        assert list(read.certificates["query_head"]) == list(range(6))
        assert set(read.certificates["layer"]) == {request.layer}
        assert set(read.certificates["query_position"]) == {request.query_position}


def test_risk_counts_what_was_read(client, request_id):
    made = MadeSequence(128, seed=10)
    sequence = client.put_sequence(made.token_ids, made.layers)
    request = client.open_request(request_id, tv_tolerance=0.1, label="a label")
    read = client.attention(sequence, request).attend(0, 127, make_queries(seed=1))
    request.flush()
    risk = request.risk()
    assert risk.read_count == 6
    assert risk.risk_score == pytest.approx(read.certificates["first_worst_case_tv"].max())
    assert not risk.closed
    assert request.finish().closed


def test_outputs_that_were_changed_are_found(client, request_id):
    made = MadeSequence(128, seed=11)
    sequence = client.put_sequence(made.token_ids, made.layers)
    request = client.open_request(request_id)
    attention = client.attention(sequence, request)
    asked = certkv.ReadRequest(0, 127, make_queries(seed=2))
    read = attention.attend(*asked)
    attention.check_used(asked, read, read.outputs)
    request.flush()
    assert request.risk().canary_mismatches == 0
    attention.check_used(asked, read, read.outputs + 5)
    request.flush()
    risk = request.risk()
    assert risk.canary_checks == 12
    assert risk.canary_mismatches == 6


def test_calls_release_the_interpreter_lock(client):
    made = MadeSequence(2048, seed=12)
    sequence = client.put_sequence(made.token_ids, made.layers)
    queries = make_queries(seed=3)
    ticks, stop = [0], threading.Event()

    def tick():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        # Between two bytecodes of this thread the ticker gets a turn or two; more than that in one
        # call are turns that the call itself let through.
        passed, deadline = 0, time.monotonic() + 20
        while passed < 5 and time.monotonic() < deadline:
            before = ticks[0]
            certkv._native.attend_exact(sequence._native, [(0, 2047, queries, None)] * 50)
            passed = ticks[0] - before
    finally:
        stop.set()
        ticker.join()
    assert passed >= 5


def test_two_threads_read_at_the_same_time(client, request_id):
    made = MadeSequence(512, seed=13)
    sequences = [client.put_sequence(made.token_ids, made.layers) for _ in range(2)]
    queries = make_queries(seed=4)
    wrong = []

    def read_often(sequence):
        for position in range(400, 440):
            read = sequence.attend_exact(0, position, queries)
            if not np.all(errors_of(made, 0, position, queries, read) < EXACT_SLACK):
                wrong.append(position)

    threads = [threading.Thread(target=read_often, args=(s,)) for s in sequences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_token_is_read_layer_by_layer_while_it_is_written(client, request_id):
    made = MadeSequence(130, seed=14)
    sequence = client.put_sequence(made.token_ids[:126], made.first(126))
    attention = client.attention(sequence, client.open_request(request_id))
    exact_tokens = []
    for token in range(126, 130):
        sequence.begin_token(made.token_ids[token])
        for layer, (keys, values) in enumerate(made.layers_at(token)):
            queries = make_queries(seed=token + layer)
            for read in (attention.attend, sequence.attend_exact):
                with pytest.raises(certkv.InvalidArgumentError) as raised:
                    read(layer, token, queries)
                assert raised.value.reason == "READ_INVALID"
                assert "not written yet" in raised.value.message
            sequence.write_layer(layer, keys, values)
            read = attention.attend(layer, token, queries)
            error = errors_of(made, layer, token, queries, read)
            assert np.all(error <= read.certificates["output_error_bound"] + 1e-12)
            if read.in_process:
                exact_tokens.append((token, layer))
        sequence.finish_token()
    # Token 127 fills the block: its reads are exact, and those after it certified again.
    assert exact_tokens == [(127, 0), (127, 1)]
    assert (sequence.block_count, sequence.tail_count) == (2, 2)
    assert client.lookup(made.token_ids).block_count == 2


def test_steps_out_of_order_are_refused(client):
    made = MadeSequence(70, seed=15)
    sequence = client.put_sequence(made.token_ids[:65], made.first(65))
    keys, values = made.layers_at(65)[0]
    steps = {
        "write": lambda: sequence.write_layer(0, keys, values),
        "skip": lambda: sequence.write_layer(1, keys, values),
        "finish": sequence.finish_token,
        "begin": lambda: sequence.begin_token(made.token_ids[65]),
        "append": lambda: sequence.append(made.token_ids[65], made.layers_at(65)),
    }

    def refused(name):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            steps[name]()
        assert raised.value.reason == "SEQUENCE_INVALID"

    refused("write")
    refused("finish")
    steps["begin"]()
    for name in ("begin", "skip", "finish", "append"):
        refused(name)
    assert sequence.token_count == 66
    for layer, pair in enumerate(made.layers_at(65)):
        sequence.write_layer(layer, *pair)
    refused("write")
    steps["finish"]()
    assert sequence.token_ids == made.token_ids[:66]
