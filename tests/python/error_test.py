"""Errors: classes, reasons, and servers that are not there."""

import dataclasses
import pathlib
import pickle
import re
import tomllib

import certkv
import numpy as np
import pytest
from certkv import _errors
from conftest import MadeSequence, make_queries, make_spec

ROOT = pathlib.Path(__file__).parents[2]


def test_errors_have_code_reason_and_message(client, request_id):
    client.open_request(request_id)
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        client.open_request("not a name!")
    error = raised.value
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "REQUEST_ID_INVALID")
    assert isinstance(error, ValueError)
    assert str(error) == f"INVALID_ARGUMENT [REQUEST_ID_INVALID] {error.message}"


def test_tolerances_out_of_range_are_refused(client, request_id):
    for wrong in (1.5, -0.1, float("nan")):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            client.open_request(request_id, tv_tolerance=wrong)
        assert raised.value.reason == "TOLERANCE_INVALID"
    with pytest.raises(certkv.InvalidArgumentError) as raised:
        client.open_request(request_id, read_mode="MAYBE")
    assert raised.value.reason == "READ_MODE_UNKNOWN"
    assert "ENFORCE, OBSERVE or EXACT" in raised.value.message


def test_reads_out_of_range_are_refused(client):
    made = MadeSequence(64, seed=50)
    sequence = client.put_sequence(made.token_ids, made.layers)
    for layer, position in ((2, 0), (-1, 0), (0, 64), (0, -1)):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            sequence.attend_exact(layer, position, make_queries(1))
        assert raised.value.reason == "READ_INVALID"
    for layer, block in ((2, 0), (0, 1), (0, -1)):
        with pytest.raises(certkv.InvalidArgumentError) as raised:
            sequence.originals(layer, block)
        assert raised.value.reason == "READ_INVALID"


def test_a_store_that_is_not_there_is_unavailable(tmp_path):
    with pytest.raises(certkv.UnavailableError) as raised:
        certkv.Client(make_spec(), f"unix:{tmp_path}/none.sock", rpc_timeout_ms=300)
    assert raised.value.message


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="no option 'time_out'"):
        certkv.Client(make_spec(), time_out=1)


def test_a_read_with_an_error_gives_no_outputs(server, request_id):
    made = MadeSequence(128, seed=51)
    with certkv.embedded() as own, certkv.Client(make_spec(), own.target) as client:
        sequence = client.put_sequence(made.token_ids, made.layers)
        attention = client.attention(sequence, client.open_request(request_id))
        attention.attend(0, 127, make_queries(1))
        own.close()
        wait_until_lost(sequence)
        with pytest.raises(certkv.Error):
            attention.attend(0, 127, make_queries(1))
        read = attention.attend_many([certkv.ReadRequest(0, 127, make_queries(1))])[0]
        assert isinstance(read.error, certkv.Error) and read.error.reason
        for ask in (lambda: read.outputs, lambda: read.certificates):
            with pytest.raises(type(read.error)):
                ask()


def wait_until_lost(sequence):
    import time

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            sequence.check_lease()
        except certkv.Error:
            return
        time.sleep(0.1)
    raise AssertionError("the lease outlived its store by a minute")


def test_every_code_has_its_class_and_survives_pickling():
    for code, kind in _errors._CLASSES.items():
        error = _errors.error_of(code, "STORE_FULL", "message", 7)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (again.code, again.reason, again.message, again.retry_delay_ms) == (
            code,
            "STORE_FULL",
            "message",
            7,
        )
    assert type(_errors.error_of("UNKNOWN", "", "message")) is certkv.Error


def test_package_and_extension_are_of_one_version():
    project = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text())["project"]
    assert project["version"] == certkv.__version__


def test_the_readme_shows_names_that_exist():
    text = (ROOT / "clients/python/README.md").read_text()
    names = set(re.findall(r"certkv\.([A-Za-z_]+)", text)) - {"aio", "md", "sock", "yaml"}
    assert names and all(hasattr(certkv, name) for name in names), names


def test_certificates_have_the_documented_fields():
    fields = certkv.CERTIFICATE_DTYPE.names
    header = (ROOT / "kernels/core/policy.h").read_text()
    record = header[header.index("struct ReadCertificate {") :].split("};")[0]
    in_code = re.findall(r"^  [\w:]+ (\w+) = [^;]+;|^  [\w:]+ (\w+) = \w+::\w+;", record, re.M)
    assert set(fields) == {a or b for a, b in in_code}
    assert np.dtype(certkv.CERTIFICATE_DTYPE).itemsize == 80


def test_witness_weights_are_part_of_the_spec_and_checked():
    spec = make_spec(key_format="K6", witness_bands=1)
    heads = tuple((1.0,) * spec.head_dim for _ in range(spec.kv_head_count))

    def weighted(weights):
        layers = tuple(
            dataclasses.replace(layer, witness_weights=weights) for layer in spec.layers
        )
        return dataclasses.replace(spec, layers=layers)

    assert weighted(heads).digest != spec.digest
    for weights, text in (
        (heads[:1], "witness_weights has"),
        (((0.0,) * spec.head_dim,) + heads[1:], "KV head 0, channel 0 is 0"),
        ("abc", "wrong type"),
    ):
        with pytest.raises(certkv.InvalidArgumentError, match=text) as raised:
            weighted(weights)
        assert raised.value.reason == "CACHE_SPEC_INVALID"
